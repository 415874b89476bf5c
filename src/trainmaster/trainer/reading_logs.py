"""A step's lines: all there are, the last of them, or each as it is written."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from trainmaster.sdk import Client
from trainmaster.sdk.types import LogLine
from trainmaster.trainer.translating import translated

LINES_PER_PAGE = 1000
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
    if follow:
        return _followed(client, job, chosen, tail=tail, since=moment)
    return _messages(_Pages(client, job, chosen, tail=tail, since=moment).lines())


def _ends(
    client: Client, job: str, chosen: Mapping[str, Any], since: str | None, tail: int, *, follow: bool
) -> Iterator[str]:
    """The last of the lines since a time, and then on from there."""
    pages = _Pages(client, job, chosen, since=since)
    yield from _messages(deque(pages.lines(), maxlen=tail))
    if follow:
        yield from _followed(client, job, chosen, cursor=pages.cursor)


def _followed(client: Client, job: str, chosen: Mapping[str, Any], **start: Any) -> Iterator[str]:
    with translated(job), contextlib.closing(client.follow_logs(job, **chosen, **start)) as following:
        yield from _messages(following)


class _Pages:
    """The log as it is now, page by page."""

    def __init__(self, client: Client, job: str, chosen: Mapping[str, Any], **start: Any) -> None:
        self._client = client
        self._job = job
        self._chosen = chosen
        self._start = start
        self.cursor: str | None = None
        """Where the last page ended."""

    def lines(self) -> Iterator[LogLine]:
        """The lines of all pages."""
        while True:
            start = self._start if self.cursor is None else {"cursor": self.cursor}
            with translated(self._job):
                page = self._client.logs(self._job, limit=LINES_PER_PAGE, **self._chosen, **start)
            self.cursor = page["next_cursor"]
            yield from page["lines"]
            if not page["lines"]:  # a page of long lines has fewer than were asked for
                return


def _messages(lines: Iterable[LogLine]) -> Iterator[str]:
    return (line["message"] for line in lines)


def _moment(since: datetime | str | None) -> str | None:
    if since is None:
        return None
    try:
        moment = datetime.fromisoformat(since) if isinstance(since, str) else since
        return moment.astimezone().isoformat()  # one without a time zone is of the local one
    except (AttributeError, ValueError):
        raise ValueError(f"since must be a datetime, or a time such as 2026-01-31T12:00:00Z, not {since!r}") from None
