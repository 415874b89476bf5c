"""Drained nodes: which jobs have to leave them, and which nodes are empty by now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Node, NodeState
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
