"""`trainmaster simulate`: how the scheduler would do, in virtual time."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import CommandError, UsageError, say
from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import print_json

if TYPE_CHECKING:
    from trainmaster.server.core.resources import Node, Queue
    from trainmaster.server.scheduling.traces import Trace

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
        bool, typer.Option("--charge-scheduler-time", help="Let time pass while the scheduler thinks.")
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
    """Run a trace of jobs through the scheduler, in virtual time; needs no server."""
    if record is not None:
        from trainmaster.cli.options import connect
        from trainmaster.cli.simulation import record_jobs

        with connect() as client:
            written = record_jobs(client, record, limit=jobs)
        print_json({"file": str(record), "jobs": written}) if as_json else say(f"{written} jobs written to {record}")
        return

    from trainmaster.cli.simulation import draw_figures, progress_of
    from trainmaster.server.scheduling.audit import BrokenPromiseError
    from trainmaster.server.scheduling.simulation import simulate
    from trainmaster.server.scheduling.traces import uniform_nodes
    from trainmaster.server.scheduling.virtual_time import Rules

    cluster = uniform_nodes(nodes or 16, gpus=8 if gpus is None else gpus, gpu_type=gpu_type, cpu_cores=cores)
    asked = _trace(trace, cluster, [_queue(text) for text in queue], jobs, seed, load)
    if asked.nodes is not cluster and (nodes or gpus is not None or queue):
        raise UsageError(f"trace {trace} has nodes and queues of its own; leave --nodes, --gpus and --queue out")
    rules = Rules(backfill=backfill, charge=charge)
    gc.set_threshold(10_000)  # as in the server: a collection looks at every job there is
    with progress_of(len(asked.jobs), quiet=as_json) as watcher:
        try:
            figures = simulate(asked, rules=rules, check=check, watchers=(watcher,))
        except BrokenPromiseError as error:
            raise CommandError(f"the scheduler broke a promise: {error}") from error
    if as_json:
        print_json(dataclasses.asdict(figures) | {"stretch": figures.stretch, "checked": check})
    else:
        draw_figures(figures, checked=check)


def _trace(name: str, cluster: list[Node], queues: list[Queue], jobs: int | None, seed: int, load: float) -> Trace:
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
            made = kueue_trace(_yaml(text), name=path.name)
            return dataclasses.replace(made, jobs=made.jobs[:jobs])
        recorded = sorted(from_lines(text.splitlines()), key=lambda job: job.arrival_s)
        return Trace(name=path.name, jobs=recorded[:jobs], nodes=cluster, queues=queues)
    except TraceError as error:
        raise UsageError(f"{name}: {error}") from None


def _yaml(text: str) -> object:
    import yaml

    from trainmaster.server.scheduling.traces import TraceError

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TraceError(f"is not YAML: {' '.join(str(error).split())}") from None


def _queue(text: str) -> Queue:
    from trainmaster.server.core.resources import Queue

    name, _, rest = text.partition("=")
    weight, _, quota = rest.partition(":")
    try:
        made = Queue(name=name, weight=float(weight or 1), quota_gpus=int(quota) if quota else None)
    except ValueError:
        made = None
    if made is None or not name or not 0 < made.weight < float("inf") or (made.quota_gpus or 0) < 0:
        raise UsageError(f"--queue {text}: write NAME, NAME=WEIGHT or NAME=WEIGHT:QUOTA, such as research=2:64")
    return made
