"""Reading requests: bodies within limits, JSON, times, idempotency keys."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from trainmaster.protocol.documents import is_deeper
from trainmaster.server.coordinator.commands import Idempotency
from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.http.context import context_of
from trainmaster.server.http.errors import StalledError, TooLargeError, wrong

MAX_BODY_BYTES = 8 << 20
"""Larger things are files, and go to /v1/blobs."""
PATIENCE_S = 60.0
"""The time for the next piece of a body, and for the whole body beyond what its bytes take at the slowest rate."""
SLOWEST_BYTES_PER_S = 1024
"""A slower body is meant to keep a connection open."""
MAX_VALUES = 100_000
"""Twice what a sensible request has. Reporting a wrong value costs a hundred times its length."""
MAX_COMMAS = 4 * MAX_VALUES
"""Counted before a body is decoded, as decoding millions of values takes a second. Texts may hold commas, too."""
MAX_DEPTH = 64
"""Nesting of objects and lists, as in trainers: deeper documents may fail to be encoded further down the stack."""
PREFIX = "/v1"
ALIAS = "/modules/scaimind"
"""Below the prefix, where all routes are found a second time."""
METRICS_PATH = "/metrics"

REPLAYED = {"Idempotent-Replayed": "true"}

_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?")

ModelT = TypeVar("ModelT", bound=BaseModel)


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    return b"".join([piece async for piece in bounded_pieces(request, limit)])


def bounded_pieces(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The body of a request, piece by piece. Raises TooLargeError at the call, where Content-Length says so."""
    too_large = TooLargeError(f"the body may have at most {limit} bytes")

    async def counted() -> AsyncIterator[bytes]:
        size = 0
        async for piece in pieces_of(request):
            size += len(piece)
            if size > limit:
                raise too_large
            yield piece

    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limit):
        raise too_large
    return counted()


async def pieces_of(request: Request, slowest_bytes_per_s: int = SLOWEST_BYTES_PER_S) -> AsyncIterator[bytes]:
    """The body of a request, piece by piece. With a slowest rate of 0, it may take any time between its pauses."""
    loop = asyncio.get_running_loop()
    stream = aiter(request.stream())
    received, waited_s = 0, 0.0
    while True:
        allowed_s = PATIENCE_S
        if slowest_bytes_per_s:
            allowed_s = min(allowed_s, PATIENCE_S + received / slowest_bytes_per_s - waited_s)
        began = loop.time()
        try:
            async with asyncio.timeout(allowed_s):
                piece = await anext(stream, None)
        except TimeoutError:
            raise StalledError(f"the rest of the body did not come; {received} bytes did") from None
        if piece is None:
            return
        waited_s += loop.time() - began
        received += len(piece)
        if piece:
            yield piece


def parse_json(body: bytes) -> object:
    if len(body) > MAX_COMMAS and body.count(b",") > MAX_COMMAS:
        raise wrong("body", f"has more than {MAX_COMMAS} commas; send data as files")
    try:
        document = json.loads(body, parse_constant=_no_constant)
        # A value takes at least two bytes, and a level a bracket: few bodies have to be counted.
        if len(body) > 2 * MAX_VALUES and not _holds_at_most(document, MAX_VALUES):
            message = f"has more than {MAX_VALUES} values"
        elif body.count(b"[") + body.count(b"{") > MAX_DEPTH and is_deeper(document, MAX_DEPTH):
            message = f"is nested more than {MAX_DEPTH} levels deep"
        else:
            return document
    except RecursionError:
        message = "is nested too deeply"
    except UnicodeDecodeError:
        message = "is not UTF-8"
    except json.JSONDecodeError as error:
        message = f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except ValueError as error:
        message = f"is not valid JSON: {error}"
    raise wrong("body", message)


def parse_time(field: str, text: str) -> float:
    """A time in a query, ISO 8601 or seconds since 1970, as seconds since 1970."""
    with contextlib.suppress(ValueError):
        return float(text)
    with contextlib.suppress(ValueError, OverflowError):
        # In a query a '+' stands for a space.
        moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    raise not_a_time(field)


def not_a_time(field: str) -> SpecError:
    return wrong(field, "must be a time such as 2025-01-31T12:00:00Z, or seconds since 1970")


async def read_model(request: Request, model: type[ModelT]) -> ModelT:
    """The body of a request as a model; an empty body stands for all defaults."""
    return _parsed(model, await read_body(request))


async def read_command(request: Request, model: type[ModelT]) -> tuple[ModelT, Idempotency | None]:
    """The body of a command as a model, and what makes a repetition of the command recognisable."""
    body = await read_body(request)
    return _parsed(model, body), idempotency_of(request, body)


def _parsed(model: type[ModelT], body: bytes) -> ModelT:
    return parse(model, parse_json(body) if body.strip() else {})


def idempotency_of(request: Request, body: bytes) -> Idempotency | None:
    """The idempotency key of a request with a fingerprint of the request; None where it has no key."""
    if (key := request.headers.get("idempotency-key")) is None:
        return None
    if not _KEY.fullmatch(key):
        raise wrong("Idempotency-Key", "must have 1 to 255 printable ASCII characters")
    digest = hashlib.sha256(f"{request.method}\n{request.scope['path']}\n".encode("utf-8", "replace"))
    digest.update(request.scope["query_string"] + b"\n" + body)
    # A keyed hash: from what is stored, nobody can guess the secrets in the body.
    fingerprint, *older = context_of(request).vault.sealer.fingerprints(digest.digest())
    return Idempotency(key=key, fingerprint=fingerprint, older=tuple(older))


def _holds_at_most(document: object, most: int) -> bool:
    waiting, found = [document], 1
    while waiting:
        match waiting.pop():
            case dict() as mapping:
                inner: Iterable[object] = mapping.values()
                found += len(mapping)
            case list() as values:
                inner = values
                found += len(values)
            case _:
                continue
        if found > most:
            return False
        waiting.extend(inner)
    return True


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")
