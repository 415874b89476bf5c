"""What a simulation shows: how far it is, and what came of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trainmaster.cli.human_units import duration
from trainmaster.cli.output import draw, facts, table
from trainmaster.server.core.states import TERMINAL
from trainmaster.server.scheduling.virtual_time import Watcher

if TYPE_CHECKING:
    from trainmaster.server.core.job import Job
    from trainmaster.server.scheduling.simulation_metrics import Figures

SHOWN_EVERY = 100
"""Jobs; a bar that moves more often costs more than it tells."""


class _Ends(Watcher):
    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._ended = 0

    def left(self, held: Job, after: Job, now: float) -> None:  # noqa: ARG002 - as the base has it
        if after.status in TERMINAL:
            self._ended += 1
            if self._ended % SHOWN_EVERY == 0:
                self._tell(self._ended)


@contextlib.contextmanager
def progress_of(jobs: int, *, quiet: bool) -> Iterator[Watcher]:
    """A bar on stderr that counts the jobs that ended; nothing where nobody looks."""
    if quiet or not sys.stderr.isatty():
        yield Watcher()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        "jobs that ended", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=jobs)
        yield _Ends(lambda ended: bar.update(task, completed=ended))


def draw_figures(figures: Figures, *, checked: bool) -> None:
    """The figures for a person."""
    from rich.text import Text

    gpus = f"{figures.gpus} GPUs" if figures.gpus else f"{figures.cpu_cores} cores"
    ended = ", ".join(f"{count} {status.lower()}" for status, count in figures.ended.items())
    impossible = f", of which {figures.impossible} fit no machine" if figures.impossible else ""
    used = figures.cpu_utilisation if figures.gpu_utilisation is None else figures.gpu_utilisation
    of_what = "cores" if figures.gpu_utilisation is None else "GPUs"
    lost = f", {duration(figures.lost_gpu_s)} of GPU time lost" if figures.preemptions else ""
    rows = {
        "cluster": f"{figures.nodes} nodes, {gpus}",
        "jobs": f"{figures.jobs}: {ended}{impossible}",
        "utilisation": f"{used:.1%} of the {of_what}",
        "makespan": f"{_time(figures.makespan_s)}, {figures.stretch:.2f} × its lower bound of "
        f"{_time(figures.makespan_bound_s)}",
        "preemptions": f"{figures.preemptions}{lost}",
        "fairness": f"{figures.fairness:.3f} (Jain's index over the queues; 1 is even)"
        if figures.fairness is not None
        else "",
        "scheduler": f"{figures.decisions_per_s:,.0f} decisions a second; {figures.passes:,} passes, "
        f"p50 {_ms(figures.pass_p50_s)}, p99 {_ms(figures.pass_p99_s)}, {duration(figures.scheduler_s)} in all",
        "checked": "every promise was kept" if checked else "",
    }
    waits = [
        (
            Text(name),
            Text(f"{each.jobs:,}"),
            *(Text(_time(wait)) for wait in (each.mean_s, each.p50_s, each.p95_s, each.p99_s, each.max_s)),
            Text(str(each.never_started) if each.never_started else ""),
        )
        for name, each in figures.waiting.items()
    ]
    headings = ("WAITED", "JOBS", "MEAN", "P50", "P95", "P99", "MAX", "NEVER STARTED")
    draw(Text(figures.trace, style="bold"), facts(rows), "", table(headings, waits, right=headings[1:]))


def _time(seconds: float) -> str:
    return f"{seconds:.2f}s" if 0 < seconds < 120 else duration(seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"
