"""Watching a job: a thread receives its log, its state is polled, and a view shows both."""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from trainmaster.cli.exits import say
from trainmaster.cli.job_summary import StepRate, ending, percent, sentence
from trainmaster.cli.output import console, print_json_line, status_text
from trainmaster.client import Client
from trainmaster.client.errors import ClientError, UnavailableError, UnreachableError
from trainmaster.client.event_stream import Following, OpenLineStates
from trainmaster.client.types import Job, LogLine
from trainmaster.schema.jobs import TERMINAL

BAR_WIDTH = 24
_COUNTED = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineForm:
    """What stands before each line of a log."""

    ranks: bool = False
    times: bool = False


class View(ABC):
    """Shows a job while it runs."""

    plain: LineForm | None = None
    """How lines look where they are plain text; None: they are not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...  # noqa: B027 - most views have nothing to close

    @abstractmethod
    def lines(self, lines: Sequence[LogLine]) -> None: ...

    @abstractmethod
    def job(self, job: Job) -> None:
        """Show the job's state, which is polled."""

    @abstractmethod
    def end(self, job: Job) -> None: ...


def has_several_ranks(job: Job) -> bool:
    resources, training = job["resource_config"], job["training_config"]
    if resources["node_count"] > 1:
        return True
    if job["workload"] is not None and job["kind"] == job["workload"]["kind"] != "trainer":
        return bool(job["workload"]["ranks_per_node"] > 1)
    world_size = training["framework"]["distributed"]["world_size"] if training else None
    return (world_size or resources["gpu_count"] or 1) > 1


def line_text(line: LogLine, form: LineForm) -> str:
    before = (f"{line['ts'] or '?'} " if form.times else "") + (f"[rank {line['rank']}] " if form.ranks else "")
    return before + line["message"]


class PlainView(View):
    """The job's lines on the standard output; what else there is to say on the other one."""

    def __init__(self, *, ranks: bool = False, times: bool = False) -> None:
        self._form = self.plain = LineForm(ranks=ranks, times=times)
        self._seen = ""
        self._told = ""
        self._shown = OpenLineStates()

    def lines(self, lines: Sequence[LogLine]) -> None:
        """Write the lines; of one that is being overwritten, each state."""
        new = (line for line in lines if self._shown.is_new(line))
        sys.stdout.writelines(line_text(line, self._form) + "\n" for line in new)
        sys.stdout.flush()

    def job(self, job: Job) -> None:
        """Tell what has changed and lasts: not every short evaluation, how a wait counts down, nor the end."""
        if job["status"] in TERMINAL:
            return
        doing = job["status_message"]
        waits = {"QUEUED": job["pending_reason"], "SCHEDULING": doing, "PREPARING": doing}.get(job["status"])
        told = f"{job['status']}: {waits}" if waits else job["status"]
        seen, self._seen = self._seen, _COUNTED.sub("", told)
        if self._seen != self._told and seen in ("", self._seen):
            self._told = self._seen
            say(told)

    def end(self, job: Job) -> None:
        say("\n".join(ending(job)))


class JsonView(View):
    def __init__(self, *, with_job: bool) -> None:
        """`with_job`: each line says whether it is a line of the log or the job itself."""
        self._with_job = with_job

    def lines(self, lines: Sequence[LogLine]) -> None:
        for line in lines:
            print_json_line({"log": line} if self._with_job else line)

    def job(self, job: Job) -> None:
        """Write nothing: a program reads the job at its end."""

    def end(self, job: Job) -> None:
        if self._with_job:
            print_json_line({"job": job})


class LiveView(View):
    """The job's lines scroll; below them one line shows how it goes."""

    def __init__(self, *, ranks: bool = False, times: bool = False) -> None:
        self._form = self.plain = LineForm(ranks=ranks, times=times)
        self._open: dict[tuple[int, str], str] = {}
        """Progress bars that the job draws, by rank and stream."""
        self._console = console()
        self._pace = StepRate()
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live = Live(console=self._console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def lines(self, lines: Sequence[LogLine]) -> None:
        """Print the lines above the footer, with the colours that the job gave them; open ones stay beside it."""
        texts: list[str] = []
        for line in lines:
            source = (line["rank"], line["stream"])
            if line.get("open"):
                self._open[source] = line_text(line, self._form)
            else:
                self._open.pop(source, None)
                texts.append(line_text(line, self._form))
        if texts:
            self._console.print(Text("\n").join(Text.from_ansi(text) for text in texts), soft_wrap=True)

    def job(self, job: Job) -> None:
        self._pace.see(job)
        self._live.update(Group(*[Text.from_ansi(text) for text in self._open.values()], self._footer(job)))

    def end(self, job: Job) -> None:
        self._live.stop()
        first, *rest = ending(job)
        word, _, after = first.partition(" ")
        self._console.print(status_text(word).append(f" {after}", style="default"), soft_wrap=True)
        for line in rest:
            self._console.print(line, markup=False, soft_wrap=True)

    def _footer(self, job: Job) -> RenderableType:
        footer = Table.grid(padding=(0, 1))
        parts: list[RenderableType] = [self._spinner, status_text(job["status"])]
        done = percent(job)
        if done is not None:
            parts += [
                ProgressBar(total=100, completed=done, width=BAR_WIDTH, complete_style="cyan", finished_style="green"),
                Text(f"{done:3.0f}%"),
            ]
        parts.append(Text(sentence(job, self._pace), style="dim", no_wrap=True, overflow="ellipsis"))
        footer.add_row(*parts)
        return footer


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
    """Show a job until it has ended and its log is complete; or, if asked, until it is paused."""
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
            look_at = time.monotonic() + LOOK_EVERY_S
            while not incoming.ended and (left_s := look_at - time.monotonic()) > 0:
                view.lines(incoming.take(left_s))
            if until_paused and job["status"] == "PAUSED":
                incoming.close()
                # What it wrote before it stopped may still have been on its way.
                for lines in pages(client, job_id, cursor=incoming.cursor, **filters):
                    view.lines(lines)
                break
            with contextlib.suppress(UnreachableError, UnavailableError):  # the follower waits for the server
                job = client.get(job_id)
        job = client.get(job_id)
        view.end(job)
    if incoming.notice:
        say(incoming.notice)
    return job


def pages(client: Client, job_id: str, *, cursor: str | None = None, **filters: Any) -> Iterator[Sequence[LogLine]]:
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
        return self._lines.notice

    def close(self) -> None:
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
