"""Values on the wire: times, and what code inside jobs reported, which may be anything."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, overload


@overload
def instant(seconds: float) -> datetime: ...
@overload
def instant(seconds: None) -> None: ...
def instant(seconds: float | None) -> datetime | None:
    """A time of ours: shown as ISO 8601, UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def reported_at(seconds: object) -> datetime | None:
    """A time that a job or its worker wrote down; None when it is none."""
    found = number(seconds)
    try:
        return None if found is None else datetime.fromtimestamp(found, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) < float("inf") else None


def numbers(values: object) -> dict[str, float | None]:
    """Named numbers."""
    return {clean(name): number(value) for name, value in values.items()} if isinstance(values, dict) else {}


def clean(value: Any) -> Any:
    """A JSON value with nothing in it that JSON cannot carry: no halves of characters, no infinities."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case float():
            return number(value)
        case dict():
            return {clean(str(name)): clean(item) for name, item in value.items()}
        case list() | tuple():
            return [clean(item) for item in value]
        case _:
            return value
