"""The cluster as the scheduler sees it: nodes, queues, unfinished jobs, and who holds what until when. What a pass
needs to find quickly (`inventory`, `waiting`, `occupancy`) is kept up at the cost of the jobs that changed."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from typing import NamedTuple

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Free, JobQueue, Needs, Node, Share, whole
from trainmaster.server.core.states import ACTIVE, TERMINAL, JobStatus
from trainmaster.server.scheduling.placement import Amounts, Inventory, inventory_from_nodes, pools_of

# The queued jobs in order, in groups of jobs with the same needs, so that a pass can skip a whole group at once.

Line = tuple[str, str]
"""A queue and a backend."""
BULK = 64
"""With more changes than this a group is sorted anew; with fewer each is put in its place."""


class JobGroup(NamedTuple):
    needs: Needs
    priority: int


Key = tuple[float, float, str]
"""The place of a job among those that wait: those that room is being made for come first, then by `order_key`."""
Entry = tuple[float, float, str, Job]
"""A key and its job."""


def key_of(job: Job) -> Key:
    return (math.inf if job.room_at is None else job.room_at, job.order_key, job.job_id)


WaitingJobs = Mapping[Line, Mapping[JobGroup, Sequence[Entry]]]
"""The queued jobs; each group is sorted by key."""


def _requeued(waiting: WaitingJobs, gone: Iterable[Job], come: Iterable[Job]) -> WaitingJobs:
    changes: dict[tuple[Line, JobGroup], tuple[list[Key], list[Entry]]] = {}
    for job in gone:
        changes.setdefault(_home(job), ([], []))[0].append(key_of(job))
    for job in come:
        changes.setdefault(_home(job), ([], []))[1].append((*key_of(job), job))
    if not changes:
        return waiting
    lines: dict[Line, Mapping[JobGroup, Sequence[Entry]]] = dict(waiting)
    fresh: dict[Line, dict[JobGroup, Sequence[Entry]]] = {}
    for (line, group), (removed, added) in changes.items():
        if (groups := fresh.get(line)) is None:
            groups = lines[line] = fresh[line] = dict(lines.get(line, {}))
        if entries := _edited(groups.get(group, ()), removed, added):
            groups[group] = entries
        else:
            groups.pop(group, None)
            if not groups:
                del lines[line], fresh[line]
    return lines


def _home(job: Job) -> tuple[Line, JobGroup]:
    return (job.queue, job.host_backend), JobGroup(job.needs, job.priority)


def _edited(entries: Sequence[Entry], removed: list[Key], added: list[Entry]) -> list[Entry]:
    edited = list(entries)
    if len(removed) + len(added) > BULK:
        out = set(removed)
        edited = [entry for entry in edited if entry[:3] not in out] if out else edited
        edited += added
        edited.sort()
        return edited
    for key in removed:
        # A key sorts just before its entry.
        del edited[bisect_left(edited, key)]
    for entry in added:
        insort(edited, entry)
    return edited


class HeldShare(NamedTuple):
    """A share of a node, and until when it is held. Sorts by the end."""

    end: float
    """The latest; infinite when nobody knows."""
    lasting: bool
    """Never ends by itself: a service."""
    job_id: str
    rank: int
    share: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    stays: Mapping[str, tuple[HeldShare, ...]] = field(default_factory=dict)
    """By node, the earliest end first."""
    left: Mapping[str, Free] = field(default_factory=dict)
    usage: Mapping[Line, Amounts] = field(default_factory=dict)
    preemptible: Mapping[str, Job] = field(default_factory=dict)
    """Those that may be stopped for others, and are not being stopped."""
    stopping: Mapping[str, Job] = field(default_factory=dict)
    """Those that are being stopped, for whatever reason."""

    def changed(self, earlier: Mapping[str, Job], changed: Mapping[str, Job], nodes: Mapping[str, Node]) -> Occupancy:
        """After some jobs changed; `earlier` are all jobs before."""
        moved: set[str] = set()
        touched: dict[str, list[HeldShare]] = {}
        """The new stays of each node where a job that moved is or was."""
        usage = dict(self.usage)
        for job_id, job in changed.items():
            before, after = _holder(earlier.get(job_id)), _holder(job)
            if before is None and after is None:
                continue
            if _fair(before) != _fair(after):
                _count(usage, before, -1)
                _count(usage, after, 1)
            if _stays_differ(before, after):
                moved.add(job_id)
                for share in before.live.shares if before else ():
                    touched.setdefault(share.node_id, [])
                for stay in stays_of(after) if after else ():
                    touched.setdefault(stay.share.node_id, []).append(stay)
        stays, left = self.stays, self.left
        if touched:
            stays, left = dict(self.stays), dict(self.left)
            for node_id, come in touched.items():
                here = [*(stay for stay in self.stays.get(node_id, ()) if stay.job_id not in moved), *come]
                if here:
                    stays[node_id] = tuple(sorted(here))
                else:
                    stays.pop(node_id, None)
                if node_id in nodes:
                    left[node_id] = left_of(nodes[node_id], here)
        return Occupancy(
            stays=stays,
            left=left,
            usage=usage,
            preemptible=_filed(self.preemptible, changed, _may_be_preempted),
            stopping=_filed(self.stopping, changed, lambda job: job.status in ACTIVE and job.live.stop is not None),
        )

    def on_nodes(self, nodes: Mapping[str, Node], known: Mapping[str, Node]) -> Occupancy:
        """The same on other nodes; `known` are the nodes before."""
        left = {
            node_id: self.left[node_id]
            if (before := known.get(node_id)) is not None and _size(before) == _size(node)
            else left_of(node, self.stays.get(node_id, ()))
            for node_id, node in nodes.items()
        }
        return replace(self, left=left)


def known_end(job: Job) -> float:
    """When a job gives back what it holds at the latest, start-up apart; infinite when unknown."""
    attempt = job.live
    if attempt.stop is not None:
        return (attempt.stop_at or 0.0) + attempt.stop_grace_s
    if job.max_runtime_s is None or job.is_service:
        return math.inf
    return (attempt.created_at if attempt.started_at is None else attempt.started_at) + job.max_runtime_s


def stays_of(job: Job) -> list[HeldShare]:
    end = known_end(job)
    lasting = job.is_service and math.isinf(end)
    return [HeldShare(end, lasting, job.job_id, rank, share) for rank, share in enumerate(job.live.shares)]


def _may_be_preempted(job: Job) -> bool:
    return job.status in ACTIVE and job.preemptible and job.live.stop is None


def _holder(job: Job | None) -> Job | None:
    return job if job is not None and job.status in ACTIVE else None


def held_by(job: Job) -> Amounts:
    shares = job.live.shares
    return Amounts(sum(len(share.gpus) for share in shares), sum(share.cpu_cores for share in shares), len(shares))


def left_of(node: Node, stays: Sequence[HeldShare]) -> Free:
    gpus: list[int] = []
    cpu_cores = ram_mb = storage_mb = 0
    for stay in stays:
        share = stay.share
        gpus += share.gpus
        cpu_cores += share.cpu_cores
        ram_mb += share.ram_mb
        storage_mb += share.storage_mb
    return whole(node).less(gpus, cpu_cores, ram_mb, storage_mb, len(stays))


def _count(usage: dict[Line, Amounts], job: Job | None, times: int) -> None:
    if job is None:
        return
    line = (job.queue, job.host_backend)
    total = usage.get(line, Amounts()).plus(held_by(job), times)
    if any(total):
        usage[line] = total
    else:
        usage.pop(line, None)


def _fair(job: Job | None) -> tuple[Line, tuple[Share, ...]] | None:
    return None if job is None else ((job.queue, job.host_backend), job.live.shares)


def _stays_differ(before: Job | None, after: Job | None) -> bool:
    if before is None or after is None:
        return True
    return (
        before.live.shares != after.live.shares
        or known_end(before) != known_end(after)
        or before.is_service != after.is_service
    )


def _size(node: Node) -> tuple[object, ...]:
    return node.gpus, node.cpu_cores, node.ram_mb, node.storage_mb, node.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A snapshot, made by the `with_` methods. Two views of the same things are equal, however they were made."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    """By id; a job that is over is not in it."""
    pending: Mapping[str, Job] = field(default_factory=dict)
    """Those of the jobs that wait for admission."""
    holding: Mapping[str, Job] = field(default_factory=dict)
    """Those of the jobs that have a current attempt, and with it resources."""
    queues: Mapping[str, JobQueue] = field(default_factory=dict)
    """By name; one that is not in it has weight 1 and no quota."""
    inventory: Inventory = field(default_factory=Inventory)
    waiting: WaitingJobs = field(default_factory=dict)
    occupancy: Occupancy = field(default_factory=Occupancy)

    def with_jobs(self, changed: Iterable[Job]) -> ClusterView:
        """The view after these jobs were committed as they are."""
        if not (latest := {job.job_id: job for job in changed}):
            return self
        known = [before for job_id in latest if (before := self.jobs.get(job_id)) is not None]
        return replace(
            self,
            jobs=_filed(self.jobs, latest, lambda job: job.status not in TERMINAL),
            pending=_filed(self.pending, latest, lambda job: job.status is JobStatus.PENDING),
            holding=_filed(self.holding, latest, lambda job: job.status in ACTIVE),
            waiting=_requeued(self.waiting, filter(_is_queued, known), filter(_is_queued, latest.values())),
            occupancy=self.occupancy.changed(self.jobs, latest, self.nodes),
        )

    def with_nodes(self, nodes: Iterable[Node]) -> ClusterView:
        found = {node.node_id: node for node in nodes}
        found |= {pool.node_id: pool for pool in pools_of(found.values())}
        return replace(
            self,
            nodes=found,
            inventory=inventory_from_nodes(found.values()),
            occupancy=self.occupancy.on_nodes(found, self.nodes),
        )

    def with_queues(self, queues: Iterable[JobQueue]) -> ClusterView:
        return replace(self, queues={queue.name: queue for queue in queues})

    def queued(self) -> list[Job]:
        """In the order of their keys."""
        groups = (group for line in self.waiting.values() for group in line.values())
        return [entry[3] for entry in merge(*groups)]


def _is_queued(job: Job) -> bool:
    return job.status is JobStatus.QUEUED


def _filed(index: Mapping[str, Job], changed: Mapping[str, Job], belongs: Callable[[Job], bool]) -> Mapping[str, Job]:
    """The index with those that belong into it, without the others; itself when nothing changes."""
    belonging = {job_id: job for job_id, job in changed.items() if belongs(job)}
    gone = [job_id for job_id in changed if job_id in index and job_id not in belonging]
    if not belonging and not gone:
        return index
    filed = {**index, **belonging}
    for job_id in gone:
        del filed[job_id]
    return filed
