"""What a body is about, without decoding it: a few names and numbers from its ends, whatever lies between."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import zstandard

from trainmaster.trainer_service.bodies import INLINE_BYTES

Read = Callable[[int, int], bytes]
"""Some bytes of a body, by offset and count; fewer at its end."""

_WINDOW = 4096
"""How much of either end is looked at; the public clients need a few hundred bytes."""
_MAX_FIELDS = 4096
"""More top-level protobuf fields than this are not walked over in search of two that belong in front."""

_VALUE = rb'"[^"\\]*"|-?[0-9][0-9.eE+-]*|true|false|null'
_MEMBER = re.compile(rb'"([^"\\]*)"\s*:\s*(' + _VALUE + rb")\s*")
_MEMBERS = rb'\s*"[^"\\]*"\s*:\s*(?:' + _VALUE + rb")\s*"
_HEAD = re.compile(rb"\s*\{(?:" + _MEMBERS + rb",)+")
_TAIL = re.compile(rb"(?:," + _MEMBERS + rb")+\}\s*\Z")


class PeekError(Exception):
    """The body does not say what it is about."""


def protobuf_fields(read: Read, size: int) -> dict[str, Any]:
    """The `model_id` and `seq_id` of a ForwardBackwardRequest.

    Raises:
        PeekError: it has no such fields in front.
    """
    found: dict[str, Any] = {}
    position = 0
    for _ in range(_MAX_FIELDS):
        if position >= size or len(found) == 2:
            break
        window = read(position, 24)
        tag, at = _varint(window, 0)
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(window, at)
            if field == 2:
                found["seq_id"] = value
            position += at
        elif kind == 2:
            length, at = _varint(window, at)
            position += at
            if field == 1:
                found["model_id"] = _text(read(position, min(length, _WINDOW)))
            position += length
        elif kind in (1, 5):
            position += at + (8 if kind == 1 else 4)
        else:
            raise PeekError("the body is no protobuf message")
    return found


def compressed_protobuf_fields(body: memoryview) -> dict[str, Any]:
    """The same of a body that is compressed with zstd; only its beginning is decompressed.

    Raises:
        PeekError: likewise, or it is not compressed.
    """
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as stream:
            head = stream.read(INLINE_BYTES)
    except zstandard.ZstdError as error:
        raise PeekError(f"the body is not compressed with zstd: {error}") from error
    return protobuf_fields(lambda offset, count: head[offset : offset + count], len(head))


def json_fields(read: Read, size: int) -> dict[str, Any]:
    """The plain top-level members at both ends of a JSON object.

    What lies outside the ends is not looked at. Both ends of an object are outside strings, so that members which
    reach there without a gap, and have no quotes inside, are its own and not of something that it holds.

    Raises:
        PeekError: it is no JSON object; only found out for a small one.
    """
    if size <= INLINE_BYTES:
        try:
            whole = json.loads(read(0, size))
        except (ValueError, RecursionError) as error:
            raise PeekError(f"the body is not JSON: {error}") from error
        if not isinstance(whole, dict):
            raise PeekError("the body is no JSON object")
        return whole
    found: dict[str, Any] = {}
    head = _HEAD.match(read(0, _WINDOW))
    tail = _TAIL.search(read(size - _WINDOW, _WINDOW))
    for members in (head, tail):
        if members is not None:
            for name, value in _MEMBER.findall(members.group()):
                found[name.decode("utf-8", "replace")] = _plain(value)
    return found


def _plain(value: bytes) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise PeekError("the body is no protobuf message")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PeekError(f"model_id is no text: {error}") from error
