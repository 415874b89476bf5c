"""`trainmaster simulate`: how the scheduler would do, in virtual time."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import CommandError, UsageError, say
from trainmaster.cli.options import JsonOption, connect
from trainmaster.cli.output import draw, duration, facts, print_json, seconds_between, styled, table
from trainmaster.schema.jobs import TERMINAL

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import Job
    from trainmaster.server.core.job import Job as SimulatedJob
    from trainmaster.server.core.resources import JobQueue, Node
    from trainmaster.server.scheduling.simulation import Figures
    from trainmaster.server.scheduling.traces import Trace, TraceJob
    from trainmaster.server.scheduling.virtual_time import Watcher

SYNTHETIC = "synthetic"
KUEUE = ("kueue-baseline", "kueue-large")
YAML = (".yaml", ".yml")


def simulate(
    trace: Annotated[
        str,
        typer.Option(
            "--trace",
            metavar="NAME|FILE",
            help=f"{SYNTHETIC}, {', '.join(KUEUE)}, a file of JSON lines (a job a line), or a Kueue generator's YAML.",
        ),
    ] = SYNTHETIC,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, metavar="N", help="Machines; by default 16.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, metavar="N", help="GPUs of each; by default 8.")] = None,
    gpu_type: Annotated[str, typer.Option("--gpu-type", help="Their type.")] = "H100-80GB",
    cores: Annotated[int, typer.Option("--cores", min=1, metavar="N", help="Cores of each machine.")] = 128,
    backend: Annotated[
        str | None,
        typer.Option("--backend", metavar="NAME", help="The machines of a backend of the server, such as a cluster."),
    ] = None,
    queue: Annotated[
        list[str],
        typer.Option("--queue", metavar="NAME=WEIGHT[:QUOTA]", help="A queue and its GPU quota; may be repeated."),
    ] = [],  # noqa: B006 - typer copies it
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, metavar="N", help="How many; by default 1000, or all of a file.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Another seed, another synthetic trace.")] = 0,
    load: Annotated[
        float, typer.Option("--load", min=0.01, metavar="X", help="What a synthetic trace asks for; 1 is all there is.")
    ] = 0.9,
    backfill: Annotated[
        bool, typer.Option("--backfill/--no-backfill", help="Let short jobs run before the head, without delaying it.")
    ] = True,
    charge: Annotated[
        bool, typer.Option("--charge-scheduler-time", help="Count the scheduler's own time as virtual time.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Hold every step against what the scheduler promises.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="FILE", help="Simulate nothing: write the server's ended jobs as a trace."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a trace of jobs through the scheduler, in virtual time; needs no server but for --record and --backend."""
    if record is not None:
        with connect() as client:
            written = record_jobs(client, record, limit=jobs)
        print_json({"file": str(record), "jobs": written}) if as_json else say(f"{written} jobs written to {record}")
        return

    from trainmaster.server.scheduling.audit import GuaranteeViolationError
    from trainmaster.server.scheduling.simulation import simulate
    from trainmaster.server.scheduling.traces import uniform_nodes
    from trainmaster.server.scheduling.virtual_time import Rules

    if backend is None:
        cluster = uniform_nodes(nodes or 16, gpus=8 if gpus is None else gpus, gpu_type=gpu_type, cpu_cores=cores)
    elif nodes or gpus is not None:
        raise UsageError(f"the backend {backend} has nodes of its own; leave --nodes and --gpus out")
    else:
        with connect() as client:
            cluster = nodes_of(client, backend)
    asked = _trace(trace, cluster, [_queue(text) for text in queue], jobs, seed, load)
    if asked.nodes is not cluster and (nodes or gpus is not None or queue or backend):
        raise UsageError(
            f"trace {trace} has nodes and queues of its own; leave --nodes, --gpus, --backend and --queue out"
        )
    rules = Rules(backfill=backfill, charge=charge)
    gc.set_threshold(10_000)  # as in the server: a collection looks at every job there is
    with progress_of(len(asked.jobs), quiet=as_json) as watcher:
        try:
            figures = simulate(asked, rules=rules, check=check, watchers=(watcher,))
        except GuaranteeViolationError as error:
            raise CommandError(f"the scheduler broke a promise: {error}") from error
    if as_json:
        print_json(dataclasses.asdict(figures) | {"stretch": figures.stretch, "checked": check})
    else:
        draw_figures(figures, checked=check)


def _trace(name: str, cluster: list[Node], queues: list[JobQueue], jobs: int | None, seed: int, load: float) -> Trace:
    from trainmaster.plain_yaml import YamlError, parse_yaml
    from trainmaster.server.scheduling.synthetic import kueue_baseline, kueue_large, kueue_trace, synthetic
    from trainmaster.server.scheduling.traces import Trace, TraceError, from_lines

    if name == SYNTHETIC:
        return synthetic(jobs=jobs or 1000, seed=seed, nodes=cluster, queues=queues, load=load)
    if name in KUEUE:
        made = kueue_baseline() if name == KUEUE[0] else kueue_large()
        return dataclasses.replace(made, jobs=made.jobs[:jobs])
    path = Path(name)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        known = ", ".join((SYNTHETIC, *KUEUE))
        raise UsageError(f"cannot read trace {name}: {why}; a trace is a file, or one of {known}") from None
    try:
        if path.suffix in YAML:
            made = kueue_trace(parse_yaml(text, name), name=path.name)
            return dataclasses.replace(made, jobs=made.jobs[:jobs])
        recorded = sorted(from_lines(text.splitlines()), key=lambda job: job.arrival_s)
        return Trace(name=path.name, jobs=recorded[:jobs], nodes=cluster, queues=queues)
    except TraceError as error:
        raise UsageError(f"{name}: {error}") from None
    except YamlError as error:
        raise UsageError(str(error)) from None


def _queue(text: str) -> JobQueue:
    from trainmaster.server.core.resources import JobQueue

    name, _, rest = text.partition("=")
    weight, _, quota = rest.partition(":")
    try:
        made = JobQueue(name=name, weight=float(weight or 1), quota_gpus=int(quota) if quota else None)
    except ValueError:
        made = None
    if made is None or not name or not 0 < made.weight < float("inf") or (made.quota_gpus or 0) < 0:
        raise UsageError(f"--queue {text}: write NAME, NAME=WEIGHT or NAME=WEIGHT:QUOTA, such as research=2:64")
    return made


def nodes_of(client: Client, backend: str) -> list[Node]:
    """The nodes of a backend as the server knows them, with nothing running there. What the engine of a cluster places
    is taken to be placed as Trainmaster would."""
    from trainmaster.server.core.resources import Gpu, Node, NodeState
    from trainmaster.server.scheduling.traces import BACKEND

    known = client.cluster.nodes()
    found = [
        Node(
            node_id=node["id"],
            backend=BACKEND,
            hostname=node["hostname"],
            cpu_cores=node["cpu_cores"]["total"],
            ram_mb=node["ram_mb"]["total"],
            storage_mb=node["storage_mb"]["total"],
            gpus=tuple(
                Gpu(
                    index=gpu["index"],
                    device=str(gpu["index"]),
                    type=gpu["type"],
                    memory_mb=gpu["memory_mb"],
                    healthy=gpu["healthy"],
                )
                for gpu in node["gpus"]
            ),
            labels=tuple(node["labels"]),
            capabilities=tuple(node["capabilities"]),
            slots=node["slots"]["total"],
            state=NodeState(node["state"]),
        )
        for node in known
        if node["backend"] == backend
    ]
    if not found:
        others = ", ".join(sorted({node["backend"] for node in known})) or "none"
        raise UsageError(f"the server knows no nodes of a backend {backend}; it knows those of: {others}")
    return found


def record_jobs(client: Client, path: Path, *, limit: int | None) -> int:
    """Write the jobs that ran and ended, the newest `limit` of them, as a trace; how many there were.

    What a job ran for is taken for its duration: nobody knows what a cancelled one still had to do. Its label
    `class`, if it has one, is its class.
    """
    from trainmaster.server.scheduling.traces import to_line

    ran = (job for job in client.list(statuses=sorted(TERMINAL)) if job["runtime_seconds"] > 0)
    summaries = itertools.islice(ran, limit)
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
    from trainmaster.server.core.resources import Needs
    from trainmaster.server.scheduling.traces import TraceJob

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


@contextlib.contextmanager
def progress_of(jobs: int, *, quiet: bool) -> Iterator[Watcher]:
    """A bar on stderr that counts the jobs that ended; nothing where nobody looks."""
    from trainmaster.server.scheduling.virtual_time import Watcher

    if quiet or not sys.stderr.isatty():
        yield Watcher()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    ended = itertools.count(1)

    class Ends(Watcher):
        def left(self, held: SimulatedJob, after: SimulatedJob, now: float) -> None:  # noqa: ARG002 - as the base has it
            if after.status in TERMINAL and (count := next(ended)) % SHOWN_EVERY == 0:
                bar.update(task, completed=count)

    columns = ("jobs that ended", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=jobs)
        yield Ends()


def draw_figures(figures: Figures, *, checked: bool) -> None:
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
        "checked": "every guarantee held" if checked else "",
    }
    waits = [
        (
            name,
            f"{each.jobs:,}",
            *(_time(wait) for wait in (each.mean_s, each.p50_s, each.p95_s, each.p99_s, each.max_s)),
            str(each.never_started) if each.never_started else "",
        )
        for name, each in figures.waiting.items()
    ]
    headings = ("WAITED", "JOBS", "MEAN", "P50", "P95", "P99", "MAX", "NEVER STARTED")
    draw(styled(figures.trace, "bold"), facts(rows), "", table(headings, waits, right=headings[1:]))


def _time(seconds: float) -> str:
    return f"{seconds:.2f}s" if 0 < seconds < 120 else duration(seconds)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"
