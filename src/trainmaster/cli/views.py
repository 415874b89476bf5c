"""What a watched job looks like: lines for a pipe, JSON for a program, a footer below the lines for a person."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from trainmaster.cli.exits import say
from trainmaster.cli.job_summary import Pace, ending, percent, sentence
from trainmaster.cli.output import console, print_json_line, status_text
from trainmaster.client.event_stream import Shown
from trainmaster.client.types import TERMINAL

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from trainmaster.client.types import Job, LogLine

BAR_WIDTH = 24
_COUNTED = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What stands before each line of a log."""

    ranks: bool = False
    times: bool = False


class View(Protocol):
    """Shows a job while it runs."""

    @property
    def plain(self) -> Form | None:
        """How lines look where they are plain text; None: they are not."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def lines(self, lines: Sequence[LogLine]) -> None:
        """Show what the job wrote."""

    def job(self, job: Job) -> None:
        """Show how it goes."""

    def end(self, job: Job) -> None:
        """Show how it ended."""


def has_several_ranks(job: Job) -> bool:
    """Whether lines of its log may be of different ranks."""
    resources, training = job["resource_config"], job["training_config"]
    if resources["node_count"] > 1:
        return True
    if job["workload"] is not None and job["kind"] == job["workload"]["kind"] != "trainer":
        return bool(job["workload"]["ranks_per_node"] > 1)
    world_size = training["framework"]["distributed"]["world_size"] if training else None
    return (world_size or resources["gpu_count"] or 1) > 1


def line_text(line: LogLine, form: Form) -> str:
    """A line of a log, with as much in front as is wanted."""
    before = (f"{line['ts'] or '?'} " if form.times else "") + (f"[rank {line['rank']}] " if form.ranks else "")
    return before + line["message"]


class _Plain:
    """No footer to take down."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave everything as it is."""


class PlainView(_Plain):
    """The job's lines on the standard output; what else there is to say on the other one."""

    def __init__(self, *, ranks: bool = False, times: bool = False) -> None:
        self.plain = Form(ranks=ranks, times=times)
        self._seen = ""
        self._told = ""
        self._shown = Shown()

    def lines(self, lines: Sequence[LogLine]) -> None:
        """Write the lines; of one that is being overwritten, each state."""
        new = (line for line in lines if self._shown.is_new(line))
        sys.stdout.writelines(line_text(line, self.plain) + "\n" for line in new)
        sys.stdout.flush()

    def job(self, job: Job) -> None:
        """Tell what has changed and lasts: not every short evaluation, nor how a wait counts down.

        Of its end there is more to say.
        """
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
        """Tell how it ended."""
        say("\n".join(ending(job)))


class JsonView(_Plain):
    """JSON lines."""

    plain = None

    def __init__(self, *, with_job: bool) -> None:
        """`with_job`: each line says whether it is a line of the log or the job itself."""
        self._with_job = with_job

    def lines(self, lines: Sequence[LogLine]) -> None:
        """Write each line as an object."""
        for line in lines:
            print_json_line({"log": line} if self._with_job else line)

    def job(self, job: Job) -> None:
        """Nothing: a program can ask."""

    def end(self, job: Job) -> None:
        """Write the job as it ended."""
        if self._with_job:
            print_json_line({"job": job})


class LiveView:
    """The job's lines scroll; below them one line shows how it goes."""

    def __init__(self, *, ranks: bool = False, times: bool = False) -> None:
        from rich.live import Live
        from rich.spinner import Spinner

        self.plain = Form(ranks=ranks, times=times)
        self._open: dict[tuple[int, str], str] = {}
        """Progress bars that the job draws, by rank and stream."""
        self._console = console()
        self._pace = Pace()
        self._spinner = Spinner("dots", style="cyan")
        self._live: Live = Live(console=self._console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def lines(self, lines: Sequence[LogLine]) -> None:
        """Print the lines above the footer, with the colours that the job gave them; open ones stay beside it."""
        from rich.text import Text

        texts: list[str] = []
        for line in lines:
            source = (line["rank"], line["stream"])
            if line.get("open"):
                self._open[source] = line_text(line, self.plain)
            else:
                self._open.pop(source, None)
                texts.append(line_text(line, self.plain))
        if texts:
            self._console.print(Text("\n").join(Text.from_ansi(text) for text in texts), soft_wrap=True)

    def job(self, job: Job) -> None:
        """Draw the footer."""
        from rich.console import Group
        from rich.text import Text

        self._pace.see(job)
        bars = [Text.from_ansi(text) for text in self._open.values()]
        self._live.update(Group(*bars, self._footer(job)))

    def end(self, job: Job) -> None:
        """Take the footer down and say how it ended."""
        self._live.stop()
        first, *rest = ending(job)
        word, _, after = first.partition(" ")
        self._console.print(status_text(word).append(f" {after}", style="default"), soft_wrap=True)
        for line in rest:
            self._console.print(line, markup=False, soft_wrap=True)

    def _footer(self, job: Job) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

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
