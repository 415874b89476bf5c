"""Server-sent events: from the bytes of a response to events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvent:
    """One event of a stream."""

    event: str
    data: str
    id: str
    """The last id that the stream has named; empty before the first."""


def parse_events(chunks: Iterable[bytes]) -> Iterator[ServerEvent]:
    """The events of a response's body. One that was cut off is dropped; comments only keep the line alive."""
    kind, last_id = "", ""
    data: list[str] = []
    for line in _lines(chunks):
        if not line:
            if data:
                yield ServerEvent(event=kind or "message", data="\n".join(data), id=last_id)
            kind = ""
            data.clear()
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "event":
            kind = value
        elif name == "id" and "\0" not in value:
            last_id = value


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    # Only the three line ends that the format knows: a log message may well hold the others that Unicode has.
    rest = b""
    for chunk in chunks:
        rest += chunk
        held = b"\r" if rest.endswith(b"\r") else b""  # the \n that belongs to it may come with the next chunk
        *lines, rest = _LINE_END.split(rest.removesuffix(held))
        rest += held
        for line in lines:
            yield line.decode("utf-8", "replace")
