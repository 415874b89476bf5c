"""`schedule(view) -> plan`: the jobs to start now, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmaster.core.job import Job
from trainmaster.core.resources import Node, Share, whole
from trainmaster.core.states import Desired
from trainmaster.scheduling.placement import fit
from trainmaster.scheduling.view import ClusterView


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A job to start, and the share of each node of its gang."""

    job: Job
    shares: Sequence[Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one pass of the scheduler decided."""

    placements: Sequence[Placement] = ()


def schedule(view: ClusterView, *, now: float, limit: int = 256) -> Plan:
    """Start what fits, by priority and age.

    A job that could run on the whole cluster but not on what is free now keeps its place: what it
    waits for is set aside, and those behind it get only what it does not need. A job that no node
    could ever hold waits without holding anybody up.
    """
    placements: list[Placement] = []
    free = view.free()
    by_backend: dict[str, list[Node]] = {}
    for node in view.nodes.values():
        by_backend.setdefault(node.backend, []).append(node)
    for job in view.queued():
        if len(placements) >= limit or not any(left.slots for left in free.values()):
            break
        if job.not_before > now or job.desired is not Desired.RUN:
            continue
        nodes = by_backend.get(job.backend, [])
        shares = fit(job.needs, nodes, free)
        if shares is not None:
            placements.append(Placement(job=job, shares=shares))
        else:
            shares = fit(job.needs, nodes, {node.node_id: whole(node) for node in nodes}) or []
        for share in shares:
            free[share.node_id] = free[share.node_id].without(share)
    return Plan(placements=placements)
