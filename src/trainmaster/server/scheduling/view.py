"""The cluster as the scheduler sees it: nodes, queues, and the jobs that are not over.

What a pass needs to find quickly is kept up with each change (`inventory`, `waiting`, `occupancy`); the cost of
a change is that of the jobs that changed, and of copying the tables that name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Free, Node, Queue
from trainmaster.server.core.states import ACTIVE, TERMINAL, JobStatus
from trainmaster.server.scheduling.inventory import Inventory, inventory_from_nodes
from trainmaster.server.scheduling.job_lots import Waiting
from trainmaster.server.scheduling.occupancy import Occupancy


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A snapshot, made by the `with_` methods. Two views of the same things are equal, however they came about."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    """By id; a job that is over is not in it."""
    pending: Mapping[str, Job] = field(default_factory=dict)
    """Those of the jobs that wait for admission."""
    holding: Mapping[str, Job] = field(default_factory=dict)
    """Those of the jobs that have a current attempt, and with it resources."""
    queues: Mapping[str, Queue] = field(default_factory=dict)
    """By name; one that is not in it has weight 1 and no quota."""
    inventory: Inventory = field(default_factory=Inventory)
    waiting: Waiting = field(default_factory=Waiting)
    occupancy: Occupancy = field(default_factory=Occupancy)

    def with_jobs(self, changed: Iterable[Job]) -> ClusterView:
        """The view after these jobs were committed as they are."""
        latest = {job.job_id: job for job in changed}
        if not latest:
            return self
        pairs = [(self.jobs.get(job.job_id), job) for job in latest.values()]
        queued_before = [before for before, _ in pairs if before is not None and before.status is JobStatus.QUEUED]
        queued = [job for job in latest.values() if job.status is JobStatus.QUEUED]
        held = [
            (before if before and before.status in ACTIVE else None, job if job.status in ACTIVE else None)
            for before, job in pairs
        ]
        return replace(
            self,
            jobs=_filed(self.jobs, latest, {job.job_id for job in latest.values() if job.status not in TERMINAL}),
            pending=_filed(
                self.pending, latest, {id_ for id_, job in latest.items() if job.status is JobStatus.PENDING}
            ),
            holding=_filed(self.holding, latest, {id_ for id_, job in latest.items() if job.status in ACTIVE}),
            waiting=self.waiting.changed(queued_before, queued),
            occupancy=self.occupancy.changed(held, self.nodes),
        )

    def with_nodes(self, nodes: Iterable[Node]) -> ClusterView:
        """The view with this inventory."""
        found = {node.node_id: node for node in nodes}
        return replace(
            self,
            nodes=found,
            inventory=inventory_from_nodes(found.values()),
            occupancy=self.occupancy.on_nodes(found, self.nodes),
        )

    def with_queues(self, queues: Iterable[Queue]) -> ClusterView:
        """The view with these queues."""
        return replace(self, queues={queue.name: queue for queue in queues})

    def queued(self) -> list[Job]:
        """Jobs that wait for resources, first come first."""
        return self.waiting.in_order()

    def free(self) -> dict[str, Free]:
        """What is left of each node."""
        return dict(self.occupancy.left)


def _filed(index: Mapping[str, Job], changed: Mapping[str, Job], belong: set[str]) -> Mapping[str, Job]:
    """The index with those that belong into it, without the others; itself when nothing changes."""
    if not belong and not any(job_id in index for job_id in changed):
        return index
    filed = dict(index)
    for job_id, job in changed.items():
        if job_id in belong:
            filed[job_id] = job
        else:
            filed.pop(job_id, None)
    return filed
