"""Traces written by hand, and a diary of what became of their jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import JobQueue, Needs, Node
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.simulation import Figures, simulate
from trainmaster.server.scheduling.traces import NodeChange, Trace, TraceJob, uniform_nodes
from trainmaster.server.scheduling.virtual_time import Rules, Watcher

NEEDS = set(Needs.__dataclass_fields__)


def job(name: str, *, at: float = 0.0, runs: float = 100.0, gpus: int = 1, **more: Any) -> TraceJob:
    needs = Needs(gpus_per_node=gpus, **{key: more.pop(key) for key in list(more) if key in NEEDS})
    return TraceJob(name=name, arrival_s=at, duration_s=runs, needs=needs, **more)


def nodes(count: int = 1, **more: Any) -> list[Node]:
    return uniform_nodes(count, **more)


class Diary(Watcher):
    """When and where each job started, was told to stop, and left, by its name."""

    def __init__(self) -> None:
        self.starts: defaultdict[str, list[float]] = defaultdict(list)
        self.places: defaultdict[str, list[list[str]]] = defaultdict(list)
        self.stops: defaultdict[str, list[tuple[float, str | None]]] = defaultdict(list)
        self.ends: defaultdict[str, list[tuple[float, JobStatus]]] = defaultdict(list)
        self.figures: Figures

    def placed(self, job: Job, now: float) -> None:
        self.starts[job.name].append(now)
        self.places[job.name].append([share.node_id for share in job.live.shares])

    def stopping(self, victim: Job, by: Job | None, now: float) -> None:
        self.stops[victim.name].append((now, by.name if by else None))

    def left(self, held: Job, after: Job, now: float) -> None:
        self.ends[held.name].append((now, after.status))


def run(
    *jobs: TraceJob,
    on: Sequence[Node],
    queues: Sequence[JobQueue] = (),
    changes: Sequence[NodeChange] = (),
    backfill: bool = True,
) -> Diary:
    """The diary of a checked simulation."""
    diary = Diary()
    trace = Trace(name="by hand", jobs=jobs, nodes=on, queues=queues, changes=changes)
    diary.figures = simulate(trace, rules=Rules(backfill=backfill), check=True, watchers=(diary,))
    return diary
