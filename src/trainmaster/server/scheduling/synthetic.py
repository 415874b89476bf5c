"""Synthetic traces: seeded random jobs like those of a team that trains models, and the mixes of Kueue's benchmark."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, log
from typing import Any

from trainmaster.server.core.resources import JobQueue, Needs, Node
from trainmaster.server.core.spec.configs import HIGHEST_PRIORITY
from trainmaster.server.scheduling.traces import Trace, TraceError, TraceJob, uniform_nodes

SHORTEST_S = 30.0
LONGEST_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticJobType:
    name: str
    share: float
    """Of all jobs, in proportion to the shares of the other classes."""
    gpus: Sequence[int] = (1,)
    """Per node; one of these, each as likely. More than a node has becomes all that it has."""
    nodes: Sequence[int] = (1,)
    cpu_cores: int = 4
    """Per GPU, or in all where there is none."""
    median_s: float
    spread: float = 1.0
    """Sigma of the logarithm of the duration: 1 means that one in six runs for 2.7 times the median or more."""
    priority: int = 5
    preemptible: bool = False
    limited: float = 0.5
    """How many of the jobs say how long they run at most."""
    slack: float = 2.0
    """Such a limit lies between the duration and so many times the duration; 1 means that it is exact."""


TEAM: Sequence[SyntheticJobType] = (
    SyntheticJobType(name="interactive", share=10, median_s=600, spread=0.8, priority=8, limited=1.0),
    SyntheticJobType(name="evaluation", share=15, gpus=(0,), cpu_cores=8, median_s=300, spread=0.7),
    SyntheticJobType(name="sweep", share=45, median_s=1800, priority=3, preemptible=True),
    SyntheticJobType(name="finetune", share=22, gpus=(1, 2, 4, 8), median_s=5400),
    SyntheticJobType(name="pretrain", share=8, gpus=(8,), nodes=(1, 2, 4), median_s=14_400, priority=6, limited=0.9),
)
"""Few large jobs hold most of the GPUs; many small ones come in between."""


def synthetic(
    *, jobs: int, seed: int, nodes: Sequence[Node], queues: Sequence[JobQueue] = (), load: float = 0.9
) -> Trace:
    """Jobs that come at random and ask for `load` of the GPUs (or cores), in each queue in proportion to its weight."""
    chance = random.Random(seed)
    largest = max((len(node.gpus) for node in nodes), default=0)
    drawn = chance.choices(TEAM, [each.share for each in TEAM], k=jobs)
    shapes = [_job(chance, each, largest, len(nodes)) for each in drawn]
    gpus = sum(len(node.gpus) for node in nodes)
    if gpus:
        busy_s = sum(job.gpus * job.duration_s for job in shapes) / gpus
    else:
        busy_s = sum(job.cpu_cores * job.duration_s for job in shapes) / max(sum(node.cpu_cores for node in nodes), 1)
    gap_s = busy_s / load / max(jobs, 1)
    waiting_in = chance.choices(queues, [queue.weight for queue in queues], k=jobs) if queues else []
    at_s, arriving = 0.0, []
    for index, job in enumerate(shapes):
        at_s += chance.expovariate(1 / gap_s) if gap_s else 0.0
        queue = waiting_in[index].name if queues else "default"
        arriving.append(replace(job, name=f"{job.class_name}-{index}", arrival_s=round(at_s, 3), queue=queue))
    return Trace(name=f"synthetic (seed {seed})", jobs=arriving, nodes=nodes, queues=queues)


def _job(chance: random.Random, each: SyntheticJobType, largest: int, node_count: int) -> TraceJob:
    gpus = min(chance.choice(each.gpus), largest)
    duration_s = round(min(max(chance.lognormvariate(log(each.median_s), each.spread), SHORTEST_S), LONGEST_S))
    limited = chance.random() < each.limited
    return TraceJob(
        name="",
        arrival_s=0.0,
        duration_s=float(duration_s),
        needs=Needs(
            node_count=min(chance.choice(each.nodes), max(node_count, 1)),
            gpus_per_node=gpus,
            cpu_cores=each.cpu_cores * max(gpus, 1),
            ram_mb=8192 * max(gpus, 1),
        ),
        priority=each.priority,
        preemptible=each.preemptible,
        max_runtime_s=round(duration_s * chance.uniform(1.0, each.slack)) + 1.0 if limited else None,
        class_name=each.name,
    )


GPUS_PER_NODE = 20
"""Of the nodes for a trace of Kueue's."""


def kueue_trace(document: object, *, name: str) -> Trace:
    """The trace of a document of Kueue's generator: a list of cohort classes, or an object that has it as `cohorts`.

    A document has classes of cohorts, each with sets of queues that have a nominal quota and a borrowing limit, each
    with sets of workloads that are created one every `creationIntervalMs`. It becomes a trace so:

    - A unit of `request` is one GPU. Each cohort has nodes of its own, of `GPUS_PER_NODE` GPUs, that together have the
      nominal quota of its queues; a capability keeps its jobs there, as Kueue lends quota only within a cohort.
    - A request that is larger than a node becomes a gang.
    - A queue's nominal quota is its weight, and nominal quota plus borrowing limit its quota.
    - Priorities keep their order and are spread over 0 to 10.
    - Nothing is preemptible: Kueue takes lent quota back by eviction, here the weights decide who is next.
    - No job has a limit on its runtime. Kueue has none, so the scheduler gets none.
    """
    cohorts = document.get("cohorts") if isinstance(document, Mapping) else document
    try:
        return _trace(_sequence(cohorts, "cohorts"), name)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        what = f"has no {error}" if isinstance(error, KeyError) else f"has a wrong value: {error}"
        raise TraceError(f"is not a generator's document: it {what}") from None


def _trace(cohorts: Sequence[Any], name: str) -> Trace:
    priorities = _spread({workload["priority"] for workload in _workloads(cohorts)})
    jobs: list[TraceJob] = []
    nodes: list[Node] = []
    queues: list[JobQueue] = []
    for cohort_class in cohorts:
        for cohort in _numbered(cohort_class):
            quota = 0
            for queue_class in _sequence(cohort_class["queuesSets"], "queuesSets"):
                for number in _numbered(queue_class):
                    queue = _queue(f"{cohort}-{number}", queue_class)
                    queues.append(queue)
                    quota += int(queue_class["nominalQuota"])
                    for workload_set in _sequence(queue_class["workloadsSets"], "workloadsSets"):
                        jobs += _jobs(workload_set, queue.name, cohort, priorities)
            count = ceil(quota / GPUS_PER_NODE)
            nodes += uniform_nodes(count, gpus=GPUS_PER_NODE, capabilities=(cohort,), prefix=cohort)
    jobs.sort(key=lambda job: job.arrival_s)
    return Trace(name=name, jobs=jobs, nodes=nodes, queues=queues)


def _workloads(cohorts: Sequence[Any]) -> Iterator[Any]:
    for cohort in cohorts:
        for queue in _sequence(cohort["queuesSets"], "queuesSets"):
            for workloads in _sequence(queue["workloadsSets"], "workloadsSets"):
                yield from _sequence(workloads["workloads"], "workloads")


def _queue(name: str, queue_class: Mapping[str, Any]) -> JobQueue:
    nominal = int(queue_class["nominalQuota"])
    if nominal <= 0:
        raise TraceError("nominalQuota must be above 0: it is the queue's weight")
    limit = queue_class.get("borrowingLimit")
    return JobQueue(name=name, weight=float(nominal), quota_gpus=None if limit is None else nominal + int(limit))


def _jobs(
    workload_set: Mapping[str, Any], queue: str, cohort: str, priorities: Mapping[Any, int]
) -> Iterator[TraceJob]:
    """One workload after the other, each an interval after the one before; the templates take turns."""
    interval_s = float(workload_set["creationIntervalMs"]) / 1000
    templates = workload_set["workloads"]
    for index in range(int(workload_set["count"]) * len(templates)):
        workload = templates[index % len(templates)]
        request, runtime_s = int(workload["request"]), float(workload["runtimeMs"]) / 1000
        node_count = ceil(request / GPUS_PER_NODE)
        if request % node_count:
            raise TraceError(f"a request of {request} cannot be split over nodes of {GPUS_PER_NODE} GPUs")
        yield TraceJob(
            name=f"{queue}-{workload['className']}-{index}",
            arrival_s=index * interval_s,
            duration_s=runtime_s,
            needs=Needs(node_count=node_count, gpus_per_node=request // node_count, capabilities=(cohort,)),
            priority=priorities[workload["priority"]],
            queue=queue,
            class_name=str(workload["className"]),
        )


def _numbered(document: Mapping[str, Any]) -> list[str]:
    return [f"{document['className']}-{index}" for index in range(int(document["count"]))]


def _spread(priorities: set[Any]) -> dict[Any, int]:
    """Each priority's place on our scale."""
    ordered = sorted(priorities)
    steps = max(len(ordered) - 1, 1)
    return {priority: round(index * HIGHEST_PRIORITY / steps) for index, priority in enumerate(ordered)}


def _sequence(value: object, name: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise TraceError(f"is not a generator's document: {name} must be a list that is not empty")
    return value


def _mix(cohorts: int, queues: int, sets: Sequence[tuple[str, int, int, int, int, int]]) -> list[dict[str, Any]]:
    """Cohorts of queues; a set is: class name, count, ms between two, runtime in ms, priority, request."""
    workloads = [
        {
            "count": count,
            "creationIntervalMs": interval,
            "workloads": [{"className": name, "runtimeMs": runtime, "priority": priority, "request": request}],
        }
        for name, count, interval, runtime, priority, request in sets
    ]
    queue = {"className": "cq", "count": queues, "nominalQuota": 20, "borrowingLimit": 100, "workloadsSets": workloads}
    return [{"className": "cohort", "count": cohorts, "queuesSets": [queue]}]


def kueue_baseline() -> Trace:
    """Kueue's baseline mix: 15,000 workloads in 30 queues. Kueue's own time for it is 351 s, the bound 66 s."""
    sets = (
        ("small", 350, 100, 200, 50, 1),
        ("medium", 100, 500, 500, 100, 5),
        ("large", 50, 1200, 1000, 200, 20),
    )
    return kueue_trace(_mix(5, 6, sets), name="kueue-baseline")


def kueue_large() -> Trace:
    """Kueue's large-scale mix: 50,000 workloads in 1,000 queues. Kueue's own time for it is 1,179 s."""
    sets = (
        ("small", 35, 60, 150, 50, 1),
        ("medium", 11, 300, 350, 100, 5),
        ("large", 4, 700, 700, 200, 20),
    )
    return kueue_trace(_mix(10, 100, sets), name="kueue-large")
