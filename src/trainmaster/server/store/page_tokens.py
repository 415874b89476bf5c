"""Page tokens of lists: opaque keyset positions, so that new rows do not shift pages."""

from __future__ import annotations

import base64
import json
from typing import Any

from trainmaster.server.core.errors import Problem, SpecError

MAX_TOTAL_COUNT = 10_001
"""The total count of a list stops here: nobody pages through more, and a list must stay fast."""

_MAX_NUMBER = 2.0**62
"""Databases do not take every integer that JSON can spell."""


def token_after(order_by: str, value: str | float, row_id: str) -> str:
    """The token of the page after a row, from the value that the list is ordered by and the row's id."""
    return encode_position([order_by, value, row_id])


def position_of(token: str, order_by: str, kind: type[str] | type[float]) -> tuple[str | float, str]:
    """The value and the id in a token; SpecError when it is not a token of a list with this order."""
    try:
        order, value, row_id = decode_position(token)
    except (ValueError, TypeError) as error:
        raise bad_token() from error
    if order != order_by:
        raise bad_token(f"belongs to a list that is ordered by {order}; send the same order_by with it")
    well_formed = is_text(value) if kind is str else type(value) in (int, float) and -_MAX_NUMBER < value < _MAX_NUMBER
    if not well_formed or not is_text(row_id):
        raise bad_token()
    return kind(value), row_id


def encode_position(position: object) -> str:
    """A position in a list, a document of JSON, as the opaque text that clients hold."""
    text = json.dumps(position, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_position(token: str) -> Any:
    """The position that a client sent; ValueError when no server of ours made it."""
    try:
        return json.loads(base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True))
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def is_text(value: object) -> bool:
    """Whether a value is text that every database accepts."""
    # JSON can spell half of a surrogate pair, which no database takes, and NUL, which PostgreSQL does not take.
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" or c == "\0" for c in value)


def bad_token(message: str = "is not a token that this server gave out") -> SpecError:
    return SpecError([Problem(field="page_token", message=message)])
