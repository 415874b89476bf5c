"""Log files of containers, whose lines are `TIME STREAM F|P TEXT` as container runtimes write them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path

from kubernetes_server.objects import instant

_POLL_S = 0.05


async def lines_of(
    path: Path, *, follow: Callable[[], bool] | None, since: str, tail: int | None, limit: int, timestamps: bool
) -> AsyncIterator[bytes]:
    """The text of a log. With `follow`, it goes on for as long as that says that there may be more."""
    left = limit or (1 << 62)
    earliest = instant(since) if since else None
    with path.open("rb") if path.exists() else open("/dev/null", "rb") as file:
        lines = [_text(line, timestamps) for line in file if earliest is None or _time(line) >= earliest]
        if tail is not None:
            lines = list(deque(lines, tail)) if tail else []
        for start in range(0, len(lines), 1000):
            chunk = b"".join(lines[start : start + 1000])[:left]
            left -= len(chunk)
            yield chunk
        rest = b""
        while follow is not None and left > 0:
            more = follow()
            rest += file.read()
            complete, newline, rest = rest.rpartition(b"\n")
            if complete:
                chunk = b"".join(_text(line + b"\n", timestamps) for line in complete.split(b"\n"))[:left]
                left -= len(chunk)
                yield chunk
            elif not more:
                return
            elif not newline:
                await asyncio.sleep(_POLL_S)


def _time(line: bytes) -> datetime:
    return instant(line.partition(b" ")[0].decode())


def _text(line: bytes, timestamps: bool) -> bytes:
    at, _, rest = line.partition(b" ")
    _, flag, text = rest.split(b" ", 2)
    if flag == b"P":
        text = text.removesuffix(b"\n")
    return at + b" " + text if timestamps else text
