"""The cluster as the scheduler sees it: nodes, and the jobs that are not over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trainmaster.core.job import Job
from trainmaster.core.resources import Free, Node, Queue, whole
from trainmaster.core.states import ACTIVE, TERMINAL, JobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A snapshot. Two views of the same jobs and nodes are equal, however they came about."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    """By id; a job that is over is not in it."""
    pending: Mapping[str, Job] = field(default_factory=dict)
    """Those of the jobs that wait for admission."""
    holding: Mapping[str, Job] = field(default_factory=dict)
    """Those of the jobs that have a current attempt, and with it resources."""
    queues: Mapping[str, Queue] = field(default_factory=dict)
    """By name; one that is not in it has weight 1 and no quota."""

    def with_jobs(self, changed: Iterable[Job]) -> ClusterView:
        """The view after these jobs were committed as they are."""
        jobs, pending, holding = dict(self.jobs), dict(self.pending), dict(self.holding)
        for job in changed:
            _file(jobs, job, job.status not in TERMINAL)
            _file(pending, job, job.status is JobStatus.PENDING)
            _file(holding, job, job.status in ACTIVE)
        return replace(self, jobs=jobs, pending=pending, holding=holding)

    def with_nodes(self, nodes: Iterable[Node]) -> ClusterView:
        """The view with this inventory."""
        return replace(self, nodes={node.node_id: node for node in nodes})

    def with_queues(self, queues: Iterable[Queue]) -> ClusterView:
        """The view with these queues."""
        return replace(self, queues={queue.name: queue for queue in queues})

    def queued(self) -> list[Job]:
        """Jobs that wait for resources, first come first."""
        waiting = [job for job in self.jobs.values() if job.status is JobStatus.QUEUED]
        waiting.sort(key=lambda job: (job.order_key, job.job_id))
        return waiting

    def free(self) -> dict[str, Free]:
        """What is left of each node."""
        left = {node_id: whole(node) for node_id, node in self.nodes.items()}
        for job in self.holding.values():
            for share in job.live.shares:
                if share.node_id in left:
                    left[share.node_id] = left[share.node_id].without(share)
        return left


def _file(index: dict[str, Job], job: Job, belongs: bool) -> None:
    if belongs:
        index[job.job_id] = job
    else:
        index.pop(job.job_id, None)
