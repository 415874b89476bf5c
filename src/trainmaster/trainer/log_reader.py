"""A step's lines: all there are, the last of them, or each as it is written."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from trainmaster.client import Client
from trainmaster.client.log_text import LogText, Shown
from trainmaster.trainer.error_translation import translated

LONGEST_TAIL = 10_000
"""The server begins no further back by itself; with more, the log is read from its beginning."""


def log_lines(
    client: Client,
    job: str,
    chosen: Mapping[str, Any],
    *,
    follow: bool,
    tail: int | None,
    since: datetime | str | None,
) -> Iterator[str]:
    """The lines that a filter of the server's chooses.

    Raises:
        ValueError: `tail` or `since` is wrong.
    """
    if tail is not None and (isinstance(tail, bool) or not isinstance(tail, int) or tail < 0):
        raise ValueError(f"tail must be a number of lines, not {tail!r}")
    moment = _moment(since)
    if tail is not None and (moment is not None or tail > LONGEST_TAIL):
        return _ends(client, job, chosen, moment, tail, follow=follow)
    return _lines(client, job, chosen, {"tail": tail, "since": moment}, follow=follow)


def _ends(
    client: Client, job: str, chosen: Mapping[str, Any], since: str | None, tail: int, *, follow: bool
) -> Iterator[str]:
    """The last of the lines since a time, and then on from there."""
    last: deque[str] = deque(maxlen=tail)
    cursor = None
    for part in _parts(client, job, chosen, {"since": since}):
        last.extend(part.lines())
        cursor = part.cursor
    yield from last
    if follow:
        yield from _followed(client, job, chosen, cursor)


def _lines(
    client: Client, job: str, chosen: Mapping[str, Any], start: Mapping[str, Any], *, follow: bool
) -> Iterator[str]:
    cursor = None
    for part in _parts(client, job, chosen, start):
        yield from part.lines()
        cursor = part.cursor
    if follow:
        yield from _followed(client, job, chosen, cursor)


def _parts(client: Client, job: str, chosen: Mapping[str, Any], start: Mapping[str, Any]) -> Iterator[LogText]:
    """The log as it is now."""
    with translated(job):
        yield from client.log_texts(job, **chosen, **start)


def _followed(client: Client, job: str, chosen: Mapping[str, Any], cursor: str | None) -> Iterator[str]:
    with translated(job), contextlib.closing(client.follow_logs(job, **chosen, cursor=cursor)) as following:
        shown = Shown()
        yield from (line["message"] for line in following if shown.is_new(line))


def _moment(since: datetime | str | None) -> str | None:
    if since is None:
        return None
    try:
        moment = datetime.fromisoformat(since) if isinstance(since, str) else since
        return moment.astimezone().isoformat()  # one without a time zone is of the local one
    except (AttributeError, ValueError):
        raise ValueError(f"since must be a datetime, or a time such as 2026-01-31T12:00:00Z, not {since!r}") from None
