"""The cluster as the scheduler sees it: nodes, and the jobs that are not over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trainmaster.core.job import Job
from trainmaster.core.resources import Free, Node, whole
from trainmaster.core.states import ACTIVE, TERMINAL, JobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A snapshot. Two views of the same jobs and nodes are equal, however they came about."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    """By id; a job that is over and has nothing left to do is not in it."""

    def with_jobs(self, changed: Iterable[Job]) -> ClusterView:
        """The view after these jobs were committed as they are."""
        jobs = dict(self.jobs)
        for job in changed:
            if is_over(job):
                jobs.pop(job.job_id, None)
            else:
                jobs[job.job_id] = job
        return ClusterView(nodes=self.nodes, jobs=jobs)

    def with_nodes(self, nodes: Iterable[Node]) -> ClusterView:
        """The view with this inventory."""
        return ClusterView(nodes={node.node_id: node for node in nodes}, jobs=self.jobs)

    def active(self) -> list[Job]:
        """Jobs with a current attempt."""
        return [job for job in self.jobs.values() if job.status in ACTIVE]

    def queued(self) -> list[Job]:
        """Jobs that wait for resources, first come first."""
        waiting = [job for job in self.jobs.values() if job.status is JobStatus.QUEUED]
        waiting.sort(key=lambda job: (job.order_key, job.job_id))
        return waiting

    def free(self) -> dict[str, Free]:
        """What is left of each node."""
        left = {node_id: whole(node) for node_id, node in self.nodes.items()}
        for job in self.jobs.values():
            if job.attempt is not None:
                for share in job.attempt.shares:
                    if share.node_id in left:
                        left[share.node_id] = left[share.node_id].without(share)
        return left


def is_over(job: Job) -> bool:
    """Whether nothing will ever happen to this job again by itself."""
    return job.status in TERMINAL
