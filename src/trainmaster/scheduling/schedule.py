"""`schedule(view) -> plan`: the jobs to start now, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainmaster.core.job import Job
from trainmaster.core.resources import Free, Needs, Node, Share, whole
from trainmaster.core.states import Desired
from trainmaster.scheduling.placement import fit, matching_gpus
from trainmaster.scheduling.view import ClusterView

Wish = tuple[str, Needs]
"""A backend, and what a job needs there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A job to start, and the share of each node of its gang."""

    job: Job
    shares: Sequence[Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """A job to stop, for the sake of one that waits."""

    victim: Job
    """Holds an attempt that is not being stopped yet."""
    by: Job
    """Is queued, has a higher priority, and does not fit without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one pass of the scheduler decided."""

    placements: Sequence[Placement] = ()
    preemptions: Sequence[Preemption] = ()
    blocked: frozenset[Wish] = frozenset()
    """What does not fit now."""
    full: bool = False
    """No machine takes another job."""

    def blocks(self, job: Job) -> bool:
        """Whether it is useless to try this job before something is freed."""
        return self.full or (job.backend, job.needs) in self.blocked


def schedule(view: ClusterView, *, now: float, limit: int = 256, backfill: bool = True) -> Plan:  # noqa: ARG001
    """Start what fits, by priority and age.

    A job that could run on the whole cluster but not on what is free now keeps its place: what it
    waits for is set aside, and those behind it get only what it does not need. A job that no node
    could ever hold waits without holding anybody up.
    """
    placements: list[Placement] = []
    blocked: set[Wish] = set()
    free = view.free()
    by_backend: dict[str, list[Node]] = {}
    for node in view.nodes.values():
        by_backend.setdefault(node.backend, []).append(node)
    full = False
    for job in view.queued():
        full = not any(left.slots for left in free.values())
        if full or len(placements) >= limit:
            break
        if job.not_before > now or job.desired is not Desired.RUN:
            continue
        wish = (job.backend, job.needs)
        if wish in blocked:
            continue  # What is free only shrinks during a pass.
        nodes = by_backend.get(job.backend, [])
        shares = fit(job.needs, nodes, free)
        if shares is not None:
            placements.append(Placement(job=job, shares=shares))
        else:
            blocked.add(wish)
            shares = _set_aside(job.needs, nodes, free)
        for share in shares:
            free[share.node_id] = free[share.node_id].without(share)
    return Plan(placements=placements, blocked=frozenset(blocked), full=full)


def _set_aside(needs: Needs, nodes: Sequence[Node], free: Mapping[str, Free]) -> list[Share]:
    """What of the free resources a job that does not fit yet will need, on the nodes where it would fit."""
    by_id = {node.node_id: node for node in nodes}
    held = []
    for share in fit(needs, nodes, {node.node_id: whole(node) for node in nodes}) or []:
        idle = matching_gpus(needs, by_id[share.node_id], free[share.node_id])
        held.append(replace(share, gpus=tuple(idle[: len(share.gpus)])))
    return held
