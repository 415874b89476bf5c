"""Simulation: runs a whole trace in virtual time, with the scheduler of the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.job import Job
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.audit import Audit
from trainmaster.server.scheduling.simulation_metrics import Figures, Tally
from trainmaster.server.scheduling.traces import BACKEND, Trace, TraceJob
from trainmaster.server.scheduling.view import ClusterView
from trainmaster.server.scheduling.virtual_time import Rules, VirtualCluster, Watcher


def simulate(
    trace: Trace, *, rules: Rules | None = None, check: bool = False, watchers: Iterable[Watcher] = ()
) -> Figures:
    """Run a trace to its end. With `check`, hold every step against the scheduler's promises.

    Raises:
        BrokenPromiseError: with `check`, as soon as one does not hold.
    """
    rules = rules or Rules()
    arrivals = {job.job_id: job for job in map(arriving, range(len(trace.jobs)), trace.jobs)}
    work = TrueWork(dict(zip(arrivals, trace.jobs, strict=True)))
    tally = Tally(trace, work.jobs)
    audit = [Audit(trace, punctual=not rules.charge)] if check else []
    cluster = VirtualCluster(
        ClusterView().with_nodes(trace.nodes).with_queues(trace.queues),
        now=0.0,
        work=work,
        rules=rules,
        arrivals=list(arrivals.values()),
        changes=trace.changes,
        watchers=(work, tally, *audit, *watchers),
    )
    while cluster.step():
        pass
    for each in audit:
        each.finish(cluster.view, cluster.now)
    return tally.figures(cluster.view)


class TrueWork(Watcher):
    """What the jobs of a trace really have to do, and how much of it is done and saved."""

    def __init__(self, jobs: Mapping[str, TraceJob]) -> None:
        self.jobs = jobs
        self.done_s = dict.fromkeys(jobs, 0.0)
        """Work that no preemption can take away any more."""

    def ends_at(self, job: Job) -> float | None:
        """After the rest of its work, or at its limit."""
        return (job.live.started_at or 0.0) + min(self._left_s(job), _limit_s(job))

    def ended(self, job: Job) -> Reason:
        """With its work done, or at its limit."""
        return Reason.SUCCEEDED if self._left_s(job) <= _limit_s(job) else Reason.TIMEOUT

    def saves_in_s(self, job: Job) -> float:
        """As its trace has it."""
        return self.jobs[job.job_id].save_s

    def left(self, held: Job, after: Job, now: float) -> None:
        """Take note of what was done; of a stopped attempt, only if it had the time to save it."""
        attempt = held.live
        until = now
        if attempt.stop_at is not None:
            if self.saves_in_s(held) > attempt.stop_grace_s:
                return
            until = attempt.stop_at
        if after.status in (JobStatus.COMPLETED, JobStatus.QUEUED, JobStatus.PREEMPTED):
            self.done_s[held.job_id] += until - (attempt.started_at or 0.0)

    def _left_s(self, job: Job) -> float:
        return self.jobs[job.job_id].duration_s - self.done_s[job.job_id]


def _limit_s(job: Job) -> float:
    return inf if job.max_runtime_s is None else job.max_runtime_s


def arriving(index: int, job: TraceJob) -> Job:
    """The job of a trace as it comes: admitted, and queued."""
    job_id = f"job-{index:06}"
    return Job(
        account_id="simulated",
        job_id=job_id,
        root_job_id=job_id,
        name=job.name or job_id,
        created_at=job.arrival_s,
        spec_version=0,
        spec={},
        workload_kind="simulated",
        backend=BACKEND,
        queue=job.queue,
        priority=job.priority,
        needs=job.needs,
        max_retries=job.max_retries,
        preemptible=job.preemptible,
        max_runtime_s=job.max_runtime_s,
        status=JobStatus.QUEUED,
        can_save=True,
        queued_at=job.arrival_s,
        updated_at=job.arrival_s,
        status_at=job.arrival_s,
    )
