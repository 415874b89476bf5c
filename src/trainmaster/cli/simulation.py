"""What simulate writes: a trace of a server's jobs, and a report of the simulation."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli.exits import CommandError
from trainmaster.cli.human_units import duration, seconds_between
from trainmaster.cli.output import draw, facts, table
from trainmaster.server.core.resources import Needs
from trainmaster.server.core.states import TERMINAL
from trainmaster.server.scheduling.traces import TraceJob, to_line
from trainmaster.server.scheduling.virtual_time import Watcher

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import Job
    from trainmaster.server.core.job import Job as SimulatedJob
    from trainmaster.server.scheduling.simulation import Figures


ENDED = ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")


def record_jobs(client: Client, path: Path, *, limit: int | None) -> int:
    """Write the jobs that ran and ended, the newest `limit` of them, as a trace; how many there were.

    What a job ran for is taken for its duration: nobody knows what a cancelled one still had to do. Its label
    `class`, if it has one, is its class.

    Raises:
        CommandError: there are none, or the file cannot be written.
    """
    summaries = itertools.islice((job for job in client.list(statuses=ENDED) if job["runtime_seconds"] > 0), limit)
    jobs = sorted((client.get(job["job_id"]) for job in summaries), key=lambda job: job["created_at"])
    if not jobs:
        raise CommandError("no job has run and ended yet: there is nothing to record")
    lines = [to_line(_traced(job, jobs[0]["created_at"])) + "\n" for job in jobs]
    half = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        half.write_text("".join(lines))
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    return len(jobs)


def _traced(job: Job, first: str) -> TraceJob:
    resources, scheduling = job["resource_config"], job["scheduling_config"]
    asked, nodes = resources["gpu_count"], resources["node_count"]
    # Where the job left it to the server, what it got is what it needs.
    gpus = asked if asked is not None else round(job["gpu_seconds"] / job["runtime_seconds"])
    return TraceJob(
        name=job["name"],
        arrival_s=round(seconds_between(first, job["created_at"]), 3),
        duration_s=round(job["runtime_seconds"], 3),
        needs=Needs(
            node_count=nodes,
            gpus_per_node=gpus // nodes,
            gpu_type=resources["gpu_type"],
            gpu_memory_min_mb=resources["gpu_memory_min_mb"] or 0,
            cpu_cores=resources["cpu_cores"] or 0,
            ram_mb=resources["ram_min_mb"] or 0,
            storage_mb=resources["storage_min_mb"] or 0,
            capabilities=tuple(scheduling["required_capabilities"]),
            affinity=tuple(resources["node_affinity"]),
            anti_affinity=tuple(resources["node_anti_affinity"]),
        ),
        priority=job["priority"],
        queue=job["queue"],
        preemptible=scheduling["preemptible"],
        max_retries=job["max_retries"],
        max_runtime_s=scheduling["max_runtime_seconds"],
        class_name=job["labels"].get("class", ""),
    )


SHOWN_EVERY = 100
"""Jobs; a bar that moves more often costs more than it tells."""


class _Ends(Watcher):
    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._ended = 0

    def left(self, held: SimulatedJob, after: SimulatedJob, now: float) -> None:  # noqa: ARG002 - as the base has it
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
