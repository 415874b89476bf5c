"""Watching a job: its log comes in on a thread, its state is asked for now and then, a view shows both."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trainmaster.cli.exits import say
from trainmaster.cli.views import JsonView, LiveView, PlainView, View
from trainmaster.client.errors import ClientError, UnavailableError, UnreachableError

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.event_stream import Following
    from trainmaster.client.types import Job, LogLine

LOOK_EVERY_S = 0.5
BATCH = 500
"""Lines that are shown at once: a chatty job would otherwise redraw the footer for each."""
PAGE_LINES = 10_000


def view_for(*, as_json: bool, with_job: bool = False, ranks: bool = False, times: bool = False) -> View:
    """The view that suits whoever reads the standard output."""
    if as_json:
        return JsonView(with_job=with_job)
    return LiveView(ranks=ranks, times=times) if sys.stdout.isatty() else PlainView(ranks=ranks, times=times)


def watch(client: Client, job_id: str, view: View, *, until_paused: bool = False, **filters: Any) -> Job:
    """Show a job until it has ended and its log is complete; or, if asked, until it is paused.

    Raises:
        KeyboardInterrupt: the person has seen enough.
        ClientError: the server said no, or stayed away for too long.
    """
    job = client.get(job_id)
    start = {"tail": filters.pop("tail", None)}
    if (form := view.plain) is not None:
        with contextlib.suppress(UnreachableError, UnavailableError):  # the follower waits for the server
            for part in client.log_texts(job_id, ranks=form.ranks, times=form.times, **start, **filters):
                sys.stdout.write(part.text)
                start = {"cursor": part.cursor}
        sys.stdout.flush()
    incoming = _Incoming(client.follow_logs(job_id, **start, **filters))
    with contextlib.closing(incoming), view:
        while not incoming.ended:
            view.job(job)
            _show_lines(view, incoming)
            if until_paused and job["status"] == "PAUSED":
                incoming.close()
                # What it wrote before it stopped may still have been on its way.
                for lines in pages(client, job_id, cursor=incoming.cursor, **filters):
                    view.lines(lines)
                break
            job = _look(client, job_id) or job
        job = client.get(job_id)
        view.end(job)
    if incoming.notice:
        say(incoming.notice)
    return job


def pages(client: Client, job_id: str, *, cursor: str | None = None, **filters: Any) -> Iterator[Sequence[LogLine]]:
    """The log as it is now, page by page."""
    while True:
        page = client.logs(job_id, cursor=cursor, limit=PAGE_LINES, **filters)
        if not page["lines"]:
            yield page["open_lines"]
            return
        yield page["lines"]
        cursor = page["next_cursor"]


class _Incoming:
    """Lines of a log, received on a thread of their own."""

    def __init__(self, lines: Following[LogLine]) -> None:
        self.ended = False
        """There are no more lines, and all were taken."""
        self.cursor = lines.cursor
        """After the last line that was taken; at first, where the stream begins."""
        self._lines = lines
        self._queue: queue.Queue[tuple[str | None, LogLine | ClientError | None]] = queue.Queue(maxsize=20 * BATCH)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="log", daemon=True)
        self._thread.start()

    def take(self, timeout_s: float) -> list[LogLine]:
        """The next lines; none when none came in time."""
        taken: list[LogLine] = []
        try:
            cursor, item = self._queue.get(timeout=timeout_s)
            while isinstance(item, dict):
                taken.append(item)
                self.cursor = cursor
                if len(taken) == BATCH:
                    return taken
                cursor, item = self._queue.get_nowait()
        except queue.Empty:
            return taken
        if isinstance(item, ClientError):
            raise item
        self.ended = True
        return taken

    @property
    def notice(self) -> str | None:
        """What the server said at the end, where it had something to say."""
        return self._lines.notice

    def close(self) -> None:
        """Receive no more."""
        self._closed.set()
        self._lines.close()
        self._thread.join()

    def _receive(self) -> None:
        try:
            for line in self._lines:
                self._put(line)
            self._put(None)
        except ClientError as error:
            self._put(error)

    def _put(self, item: LogLine | ClientError | None) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put((self._lines.cursor, item), timeout=LOOK_EVERY_S)
                return


def _show_lines(view: View, incoming: _Incoming) -> None:
    """Show what comes in, until it is time to look at the job again."""
    look_at = time.monotonic() + LOOK_EVERY_S
    while not incoming.ended and (left_s := look_at - time.monotonic()) > 0:
        view.lines(incoming.take(left_s))


def _look(client: Client, job_id: str) -> Job | None:
    """The job as it is now; None while the server is away, for which the stream has its own patience."""
    try:
        return client.get(job_id)
    except (UnreachableError, UnavailableError):
        return None
