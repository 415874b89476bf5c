"""Nodes that lose capacity: drained nodes, and GPUs whose memory something other than a job holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Gpu, Node, NodeState
from trainmaster.server.scheduling.view import ClusterView


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """A job that is preempted because a node of it is drained by force."""

    job: Job
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Drainage:
    """What the nodes that are being drained call for."""

    evictions: Sequence[Eviction] = ()
    empty: Sequence[str] = ()
    """Nodes on which nothing runs any more."""


def drain(view: ClusterView) -> Drainage:
    """Evict what holds a node that is drained by force; name the nodes that are done.

    `preemptible` does not matter here: it is about priority, and an operator who forces a drain means it.
    """
    draining = {node.node_id: node for node in view.nodes.values() if node.state is NodeState.DRAINING}
    if not draining:
        return Drainage()
    holders: defaultdict[str, list[Job]] = defaultdict(list)
    for job in view.holding.values():
        for node_id in {share.node_id for share in job.live.shares} & draining.keys():
            holders[node_id].append(job)
    evicted: dict[str, Eviction] = {}
    for node_id, jobs in holders.items():
        if draining[node_id].drain_force:
            for job in jobs:
                if job.live.stop is None:
                    evicted.setdefault(job.job_id, Eviction(job=job, node=draining[node_id]))
    return Drainage(
        evictions=tuple(evicted.values()), empty=tuple(node_id for node_id in draining if node_id not in holders)
    )


TOLERATED_MB = 1024
"""What a driver, a display or a monitoring tool may hold on a GPU that is free."""


def judge(nodes: Iterable[Node], view: ClusterView) -> list[Node]:
    """The nodes as they were reported, without the GPUs that are in use by something that is no job of ours.

    That is memory which a job left behind, or a process that was started beside Trainmaster: the next job would not
    find what it was promised.
    """
    held: defaultdict[str, set[int]] = defaultdict(set)
    for job in view.holding.values():
        for share in job.live.shares:
            held[share.node_id].update(share.gpus)
    return [_judge_node(node, held[node.node_id]) for node in nodes]


def occupied(nodes: Iterable[Node]) -> bool:
    """Whether a GPU is out of the pool only until its memory is free, so that it should be checked again soon."""
    return any(not gpu.healthy and _in_use(gpu) for node in nodes for gpu in node.gpus)


def _judge_node(node: Node, held: set[int]) -> Node:
    if not any(gpu.healthy and gpu.index not in held and _in_use(gpu) for gpu in node.gpus):
        return node
    return replace(node, gpus=tuple(gpu if gpu.index in held else _judge_gpu(gpu) for gpu in node.gpus))


def _judge_gpu(gpu: Gpu) -> Gpu:
    if not gpu.healthy or not _in_use(gpu):
        return gpu
    return replace(gpu, healthy=False, problem=f"{gpu.used_mb} MB of its memory are in use, and no job holds it")


def _in_use(gpu: Gpu) -> bool:
    return gpu.used_mb is not None and gpu.used_mb > TOLERATED_MB
