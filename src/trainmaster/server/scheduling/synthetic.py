"""Made-up traces: reproducible by their seed, shaped like the work of a team that trains models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from trainmaster.server.core.resources import Needs, Node, Queue
from trainmaster.server.scheduling.traces import Trace, TraceJob

SHORTEST_S = 30.0
LONGEST_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobClass:
    """A kind of job, and how its jobs vary."""

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


TEAM: Sequence[JobClass] = (
    JobClass(name="interactive", share=10, median_s=600, spread=0.8, priority=8, limited=1.0),
    JobClass(name="evaluation", share=15, gpus=(0,), cpu_cores=8, median_s=300, spread=0.7),
    JobClass(name="sweep", share=45, median_s=1800, priority=3, preemptible=True),
    JobClass(name="finetune", share=22, gpus=(1, 2, 4, 8), median_s=5400),
    JobClass(name="pretrain", share=8, gpus=(8,), nodes=(1, 2, 4), median_s=14_400, priority=6, limited=0.9),
)
"""Few large jobs hold most of the GPUs; many small ones come in between."""


def synthetic(
    *,
    jobs: int,
    seed: int,
    nodes: Sequence[Node],
    queues: Sequence[Queue] = (),
    classes: Sequence[JobClass] = TEAM,
    load: float = 0.9,
) -> Trace:
    """Jobs that come at random and ask, in the long run, for `load` of the cluster's GPUs (cores, where it has none).

    Each queue gets jobs in proportion to its weight.
    """
    chance = random.Random(seed)
    largest = max((len(node.gpus) for node in nodes), default=0)
    drawn = chance.choices(classes, [each.share for each in classes], k=jobs)
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


def _job(chance: random.Random, each: JobClass, largest: int, node_count: int) -> TraceJob:
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
