"""A small trace for each seed: every one has another cluster, other queues and another mix of jobs."""

from __future__ import annotations

import random
from dataclasses import replace

from trainmaster.server.core.resources import JobQueue, Needs, Node, NodeState
from trainmaster.server.scheduling.traces import NodeChange, Trace, TraceJob, uniform_nodes

JOBS = 40
DAY_S = 86_400.0
TYPES = ("A100-40GB", "H100-80GB")
TAGS = ("nvlink", "infiniband")
LABELS = ("rack=1", "rack=2")


def random_trace(seed: int, *, exact: bool = False) -> Trace:
    """The trace of a seed; `exact` has one queue, no preemption, and jobs that say what they really run for."""
    chance = random.Random(seed)
    nodes = [_node(chance, index) for index in range(chance.randint(1, 6))]
    gpus = sum(len(node.gpus) for node in nodes)
    queues = [
        JobQueue(
            name=f"queue-{index}",
            weight=float(chance.choice((1, 1, 2, 5))),
            quota_gpus=chance.randint(1, max(gpus, 1)) if chance.random() < 0.3 else None,
        )
        for index in range(1 if exact else chance.randint(1, 4))
    ]
    limits = "exact" if exact else chance.choice(("exact", "bounds", "mixed", "none"))
    busy_s = chance.choice((0.0, 3600.0, 4 * 3600.0, DAY_S))
    jobs = [_job(chance, index, nodes, queues, limits, busy_s) for index in range(JOBS)]
    if exact:
        plain = [replace(job, preemptible=False) for job in jobs]
        return Trace(name=f"seed {seed}", jobs=plain, nodes=nodes, queues=[JobQueue(name=queues[0].name)])
    changes = _changes(chance, nodes, busy_s) if chance.random() < 0.3 else []
    return Trace(name=f"seed {seed}", jobs=jobs, nodes=nodes, queues=queues, changes=changes)


def _node(chance: random.Random, index: int) -> Node:
    (node,) = uniform_nodes(
        1,
        gpus=chance.choice((0, 1, 2, 4, 8)),
        gpu_type=(kind := chance.choice(TYPES)),
        gpu_memory_mb=40_960 if kind == TYPES[0] else 81_920,
        cpu_cores=chance.choice((4, 16, 64)),
        ram_mb=chance.choice((16, 64, 256)) * 1024,
        storage_mb=chance.choice((50, 500)) * 1024,
        slots=chance.choice((2, 8, 16)),
        capabilities=tuple(tag for tag in TAGS if chance.random() < 0.5),
        prefix=f"node-{index}",
    )
    return replace(node, labels=(chance.choice(LABELS),))


def _job(
    chance: random.Random, index: int, nodes: list[Node], queues: list[JobQueue], limits: str, busy_s: float
) -> TraceJob:
    runs_s = float(round(chance.choice((60, 600, 3600, 10_000)) * chance.uniform(0.2, 2.0)))
    kind = chance.choice(("none", "bound", "exact", "short")) if limits == "mixed" else limits
    limit_s = {
        "none": None,
        "exact": runs_s,
        "bounds": runs_s * chance.uniform(1.0, 3.0),
        "bound": runs_s * chance.uniform(1.0, 3.0),
        "short": runs_s * chance.uniform(0.3, 1.0),
    }[kind]
    return TraceJob(
        name=f"job {index}",
        # Many come together, as sweeps and mornings do.
        arrival_s=float(round(chance.random() * busy_s, chance.choice((-3, 0)))),
        duration_s=runs_s,
        needs=_needs(chance, chance.choice(nodes), len(nodes)),
        priority=chance.randint(0, 10),
        queue=chance.choice(queues).name,
        preemptible=chance.random() < 0.4,
        max_retries=chance.choice((0, 1, 1)),
        max_runtime_s=limit_s,
        save_s=chance.choice((0.0, 5.0, 30.0, 60.0)),
    )


def _needs(chance: random.Random, node: Node, count: int) -> Needs:
    """Mostly what a node like this one has; now and then what no node has."""
    gpus = chance.choice([size for size in (0, 1, 1, 2, 4, 8) if size <= len(node.gpus) or chance.random() < 0.02])
    kind = node.gpus[0].type if node.gpus else TYPES[0]
    return Needs(
        node_count=min(chance.choice((1, 1, 1, 1, 2, 3)), count if chance.random() < 0.9 else 3),
        gpus_per_node=gpus,
        gpu_type=chance.choice((None, None, kind, kind.lower().replace("-", " "), kind[:4])) if gpus else None,
        gpu_memory_min_mb=chance.choice((0, 0, 40_000)) if gpus else 0,
        cpu_cores=min(chance.choice((0, 1, 2, 8)), node.cpu_cores),
        ram_mb=chance.choice((0, 1, 8)) * 1024,
        storage_mb=chance.choice((0, 0, 10)) * 1024,
        capabilities=chance.choice(((), (), node.capabilities)),
        affinity=chance.choice(((), (), (LABELS[0],))),
        anti_affinity=chance.choice(((), (), (LABELS[1],))),
    )


def _changes(chance: random.Random, nodes: list[Node], busy_s: float) -> list[NodeChange]:
    """A node is drained for a while, gently or by force."""
    node, at_s = chance.choice(nodes), chance.random() * busy_s
    drained = replace(node, state=NodeState.DRAINING, drain_force=chance.random() < 0.5)
    return [NodeChange(at_s=at_s, node=drained), NodeChange(at_s=at_s + chance.random() * DAY_S, node=node)]
