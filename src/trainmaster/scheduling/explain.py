"""Why a job waits, and what would let it run. Made when asked, not on every pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainmaster.core.job import Job
from trainmaster.core.resources import Free, Node, NodeState, whole
from trainmaster.core.states import JobStatus
from trainmaster.scheduling.placement import fit, gpus_wanted, matching_gpus, usable
from trainmaster.scheduling.view import ClusterView


def pending_reason(
    view: ClusterView,
    job: Job,
    *,
    now: float,
    position: int | None = None,
    visible: Callable[[str], bool] = bool,
) -> str | None:
    """One sentence for people; None when the job does not wait.

    `position` is its place in the queue; jobs of accounts that are not `visible` are not named.
    """
    if job.status is JobStatus.PENDING:
        return "is being admitted"
    if job.status is not JobStatus.QUEUED:
        return None
    if job.not_before > now:
        return f"waits {job.not_before - now:.0f} s more before its next try ({job.message or 'the last one failed'})"
    nodes = [node for node in view.nodes.values() if node.backend == job.backend]
    if not nodes:
        return f"backend {job.backend!r} has no nodes"
    free = view.free()
    if fit(job.needs, nodes, {node.node_id: whole(node) for node in nodes}) is None:
        return _never(job, nodes)
    if fit(job.needs, nodes, free) is not None:
        ahead = (position or 1) - 1
        if ahead:
            return f"{ahead} {'job is' if ahead == 1 else 'jobs are'} before it, and what is free is kept for the first"
        return "is about to be placed"
    return _not_now(job, nodes, free) + _held_by(view, job, nodes, visible)


def _asks(job: Job, nodes: Sequence[Node]) -> str:
    needs = job.needs
    gpus = gpus_wanted(needs, nodes)
    parts = []
    if gpus:
        parts.append(f"{gpus} × {needs.gpu_type or 'GPU'}")
    if needs.gpu_memory_min_mb:
        parts.append(f"{needs.gpu_memory_min_mb} MB of GPU memory")
    if needs.cpu_cores:
        parts.append(f"{needs.cpu_cores} cores")
    if needs.ram_mb:
        parts.append(f"{needs.ram_mb} MB of memory")
    if needs.storage_mb:
        parts.append(f"{needs.storage_mb} MB of disk")
    if needs.capabilities:
        parts.append(f"the capabilities {', '.join(needs.capabilities)}")
    what = ", ".join(parts) or "one slot"
    where = "on one node" if needs.node_count == 1 else f"on each of {needs.node_count} nodes"
    return f"needs {what} {where}"


def _never(job: Job, nodes: Sequence[Node]) -> str:
    drained = [node for node in nodes if node.state is not NodeState.READY]
    note = f"; {len(drained)} of {len(nodes)} nodes take no work" if drained else ""
    return f"{_asks(job, nodes)}; no node has that, even when nothing runs{note}"


def _not_now(job: Job, nodes: Sequence[Node], free: dict[str, Free]) -> str:
    gpus = gpus_wanted(job.needs, nodes)
    able = [node for node in nodes if usable(job.needs, node)]
    if gpus:
        best = max((len(matching_gpus(job.needs, node, free[node.node_id])) for node in able), default=0)
        have = f"the best node has {best} free"
    else:
        best_node = max(able, key=lambda node: (free[node.node_id].slots > 0, free[node.node_id].cpu_cores))
        left = free[best_node.node_id]
        have = f"the best node has {left.cpu_cores} cores, {left.ram_mb} MB and {left.slots} slots free"
    return f"{_asks(job, nodes)}; {have}"


def _held_by(view: ClusterView, job: Job, nodes: Sequence[Node], visible: Callable[[str], bool]) -> str:
    """Who holds what the job waits for, as far as the one who asks may know."""
    wanted = {node.node_id: set(matching_gpus(job.needs, node, whole(node))) for node in nodes}
    needs_gpus = gpus_wanted(job.needs, nodes) > 0
    holders = [
        other
        for other in view.holding.values()
        if visible(other.account_id)
        and any(
            share.node_id in wanted and (not needs_gpus or wanted[share.node_id] & set(share.gpus))
            for share in other.live.shares
        )
    ]
    if not holders:
        return ""
    holders.sort(key=lambda other: other.status_at)
    named = ", ".join(other.handle or other.job_id for other in holders[:3])
    return f"; held by {named}{f' and {len(holders) - 3} more' if len(holders) > 3 else ''}"
