"""Traces in the shape of Kueue's public scheduler benchmark, and its two mixes.

The shape: classes of cohorts, each with sets of queues that have a nominal quota and a borrowing limit, each with
sets of workloads that are created one every `creationIntervalMs`. What it becomes here:

- A unit of `request` is one GPU. Each cohort has nodes of its own, of `gpus_per_node` GPUs, that together have the
  nominal quota of its queues; a capability keeps its jobs there, as Kueue lends quota only within a cohort.
- A request that is larger than a node becomes a gang.
- A queue's nominal quota is its weight, and nominal quota plus borrowing limit its quota.
- Priorities keep their order and are spread over 0 to 10.
- Nothing is preemptible: Kueue takes lent quota back by eviction, here the weights decide who is next.
- No job has a limit on its runtime. Kueue knows of none, and so the scheduler is told of none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainmaster.server.core.resources import Needs, Node, Queue
from trainmaster.server.scheduling.traces import HIGHEST_PRIORITY, Trace, TraceError, TraceJob, uniform_nodes

GPUS_PER_NODE = 20


def from_document(document: object, *, name: str, gpus_per_node: int = GPUS_PER_NODE) -> Trace:
    """The trace of a generator's document: a list of cohort classes, or an object that has it as `cohorts`.

    Raises:
        TraceError: the document has another shape; the message says where.
    """
    cohorts = document.get("cohorts") if isinstance(document, Mapping) else document
    try:
        return _trace(_sequence(cohorts, "cohorts"), name, gpus_per_node)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        what = f"has no {error}" if isinstance(error, KeyError) else f"has a wrong value: {error}"
        raise TraceError(f"is not a generator's document: it {what}") from None


def _trace(cohorts: Sequence[Any], name: str, gpus_per_node: int) -> Trace:
    priorities = _spread({workload["priority"] for workload in _workloads(cohorts)})
    jobs: list[TraceJob] = []
    nodes: list[Node] = []
    queues: list[Queue] = []
    for cohort_class in cohorts:
        for cohort in _numbered(cohort_class):
            quota = 0
            for queue_class in _sequence(cohort_class["queuesSets"], "queuesSets"):
                for number in _numbered(queue_class):
                    queue = _queue(f"{cohort}-{number}", queue_class)
                    queues.append(queue)
                    quota += int(queue_class["nominalQuota"])
                    for workload_set in _sequence(queue_class["workloadsSets"], "workloadsSets"):
                        jobs += _jobs(workload_set, queue.name, cohort, priorities, gpus_per_node)
            nodes += uniform_nodes(
                math.ceil(quota / gpus_per_node), gpus=gpus_per_node, capabilities=(cohort,), prefix=cohort
            )
    jobs.sort(key=lambda job: job.arrival_s)
    return Trace(name=name, jobs=jobs, nodes=nodes, queues=queues)


def _workloads(cohorts: Sequence[Any]) -> Iterator[Any]:
    for cohort in cohorts:
        for queue in _sequence(cohort["queuesSets"], "queuesSets"):
            for workloads in _sequence(queue["workloadsSets"], "workloadsSets"):
                yield from _sequence(workloads["workloads"], "workloads")


def _queue(name: str, queue_class: Mapping[str, Any]) -> Queue:
    nominal = int(queue_class["nominalQuota"])
    if nominal <= 0:
        raise TraceError("nominalQuota must be above 0: it is the queue's weight")
    limit = queue_class.get("borrowingLimit")
    return Queue(name=name, weight=float(nominal), quota_gpus=None if limit is None else nominal + int(limit))


def _jobs(
    workload_set: Mapping[str, Any], queue: str, cohort: str, priorities: Mapping[Any, int], gpus_per_node: int
) -> Iterator[TraceJob]:
    """One workload after the other, each an interval after the one before; the templates take turns."""
    interval_s = float(workload_set["creationIntervalMs"]) / 1000
    templates = workload_set["workloads"]
    for index in range(int(workload_set["count"]) * len(templates)):
        workload = templates[index % len(templates)]
        request, runtime_s = int(workload["request"]), float(workload["runtimeMs"]) / 1000
        node_count = math.ceil(request / gpus_per_node)
        if request % node_count:
            raise TraceError(f"a request of {request} cannot be split over nodes of {gpus_per_node} GPUs")
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
    """Cohorts of queues with a quota of 20 that borrow up to 100.

    A set is: class name, count, ms between two, runtime in ms, priority, request.
    """
    workloads = [
        {
            "count": count,
            "creationIntervalMs": interval,
            "workloads": [{"className": name, "runtimeMs": runtime, "priority": priority, "request": request}],
        }
        for name, count, interval, runtime, priority, request in sets
    ]
    queue = {
        "className": "cq",
        "count": queues,
        "nominalQuota": 20,
        "borrowingLimit": 100,
        "workloadsSets": workloads,
    }
    return [{"className": "cohort", "count": cohorts, "queuesSets": [queue]}]


def baseline() -> Trace:
    """Kueue's baseline mix: 15,000 workloads in 30 queues. Kueue's own time for it is 351 s, the bound 66 s."""
    sets = (
        ("small", 350, 100, 200, 50, 1),
        ("medium", 100, 500, 500, 100, 5),
        ("large", 50, 1200, 1000, 200, 20),
    )
    return from_document(_mix(5, 6, sets), name="kueue-baseline")


def large() -> Trace:
    """Kueue's large-scale mix: 50,000 workloads in 1,000 queues. Kueue's own time for it is 1,179 s."""
    sets = (
        ("small", 35, 60, 150, 50, 1),
        ("medium", 11, 300, 350, 100, 5),
        ("large", 4, 700, 700, 200, 20),
    )
    return from_document(_mix(10, 100, sets), name="kueue-large")
