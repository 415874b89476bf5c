"""Simulation: runs a whole trace in virtual time with the scheduler of the server, and measures it."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import JobQueue, Needs, Node, same_gpu_type
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.audit import Audit
from trainmaster.server.scheduling.pool import Pool
from trainmaster.server.scheduling.schedule import Plan
from trainmaster.server.scheduling.traces import BACKEND, Trace, TraceJob
from trainmaster.server.scheduling.view import ClusterView, held_by
from trainmaster.server.scheduling.virtual_time import Rules, VirtualCluster, Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitTimes:
    """How long the jobs of a class waited between arrival and first start."""

    jobs: int
    never_started: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The result of a simulation; times are virtual unless they are the scheduler's."""

    trace: str
    nodes: int
    gpus: int
    cpu_cores: int
    jobs: int
    ended: Mapping[str, int]
    """Jobs by the status that they ended with (TIMEOUT apart), and those that never ended as `unfinished`."""
    impossible: int
    """Of the unfinished: those that no set of the nodes could ever hold."""
    makespan_s: float
    """From the first arrival to the last end."""
    makespan_bound_s: float
    """No schedule can be shorter; see `makespan_bound`."""
    gpu_utilisation: float | None
    """GPU-seconds held over GPU-seconds there were in the makespan; None without GPUs."""
    cpu_utilisation: float
    """The same for the cores that jobs asked for."""
    waiting: Mapping[str, WaitTimes]
    preemptions: int
    lost_gpu_s: float
    """GPU-seconds that were held and have to be held again: saving, and work that could not be saved."""
    fairness: float | None
    """Jain's index of what queues held while they competed: 1 is even, 1/n is all to one. A queue competes while a
    job of it and a job of another queue wait; what it held then, in GPU-seconds, counts over its weight and over
    the time. None when fewer than two queues ever did."""
    passes: int
    placements: int
    scheduler_s: float
    """Processor time of the scheduler."""
    decisions_per_s: float
    """Placements and preemptions in a second of it."""
    pass_p50_s: float
    pass_p99_s: float

    @property
    def stretch(self) -> float:
        """The makespan over its bound."""
        return self.makespan_s / self.makespan_bound_s if self.makespan_bound_s else 1.0


class MetricsCollector(Watcher):
    def __init__(self, trace: Trace, jobs: Mapping[str, TraceJob]) -> None:
        self._trace = trace
        self._jobs = jobs
        self._started: dict[str, float] = {}
        self._ended: Counter[str] = Counter()
        self._last_end_s = 0.0
        self._held_gpu_s = 0.0
        self._held_core_s = 0.0
        self._lost_gpu_s = 0.0
        self._preemptions = 0
        self._passes: list[float] = []
        self._placements = 0
        self._competition = _Competition()

    def arrived(self, job: Job, now: float) -> None:
        self._competition.change(job.queue, now, waiting=1)

    def placed(self, job: Job, now: float) -> None:
        self._started.setdefault(job.job_id, now)
        self._placements += 1
        self._competition.change(job.queue, now, waiting=-1, gpus=held_by(job).gpus)

    def stopping(self, victim: Job, by: Job | None, now: float) -> None:  # noqa: ARG002 - as the base has it
        self._preemptions += 1

    def left(self, held: Job, after: Job, now: float) -> None:
        attempt = held.live
        began_s = attempt.started_at or 0.0
        gpus, cores, _ = held_by(held)
        self._held_gpu_s += gpus * (now - began_s)
        self._held_core_s += cores * (now - began_s)
        if attempt.stop_at is not None:
            saved = self._jobs[held.job_id].save_s <= attempt.stop_grace_s
            self._lost_gpu_s += gpus * (now - (attempt.stop_at if saved else began_s))
        queued_again = after.status is JobStatus.QUEUED
        self._competition.change(held.queue, now, waiting=1 if queued_again else 0, gpus=-gpus)
        if not queued_again:
            self._ended["TIMEOUT" if after.reason is Reason.TIMEOUT else after.status.value] += 1
            self._last_end_s = max(self._last_end_s, now)

    def passed(self, view: ClusterView, plan: Plan, now: float, took_s: float) -> None:  # noqa: ARG002
        self._passes.append(took_s)

    def figures(self, view: ClusterView) -> Figures:
        trace = self._trace
        makespan_s = max(self._last_end_s - min((job.arrival_s for job in trace.jobs), default=0.0), 0.0)
        gpus = sum(len(node.gpus) for node in trace.nodes)
        cores = sum(node.cpu_cores for node in trace.nodes)
        unfinished = len(trace.jobs) - sum(self._ended.values())
        possible = _possible(trace.nodes)
        scheduler_s = sum(self._passes)
        return Figures(
            trace=trace.name,
            nodes=len(trace.nodes),
            gpus=gpus,
            cpu_cores=cores,
            jobs=len(trace.jobs),
            ended={**dict(sorted(self._ended.items())), **({"unfinished": unfinished} if unfinished else {})},
            impossible=sum(not possible(job.needs) for job in view.queued()),
            makespan_s=makespan_s,
            makespan_bound_s=makespan_bound(trace),
            gpu_utilisation=self._held_gpu_s / (gpus * makespan_s) if gpus and makespan_s else None,
            cpu_utilisation=self._held_core_s / (cores * makespan_s) if cores and makespan_s else 0.0,
            waiting=self._waiting(),
            preemptions=self._preemptions,
            lost_gpu_s=self._lost_gpu_s,
            fairness=self._competition.evenness({queue.name: queue for queue in trace.queues}),
            passes=len(self._passes),
            placements=self._placements,
            scheduler_s=scheduler_s,
            decisions_per_s=(self._placements + self._preemptions) / scheduler_s if scheduler_s else 0.0,
            pass_p50_s=percentile(self._passes, 50),
            pass_p99_s=percentile(self._passes, 99),
        )

    def _waiting(self) -> dict[str, WaitTimes]:
        waits: defaultdict[str, list[float]] = defaultdict(list)
        never: Counter[str] = Counter()
        for job_id, job in self._jobs.items():
            if job_id in self._started:
                waits[job.label].append(self._started[job_id] - job.arrival_s)
            else:
                never[job.label] += 1
        return {
            label: WaitTimes(
                jobs=len(waits[label]) + never[label],
                never_started=never[label],
                mean_s=sum(waits[label]) / len(waits[label]) if waits[label] else 0.0,
                p50_s=percentile(waits[label], 50),
                p95_s=percentile(waits[label], 95),
                p99_s=percentile(waits[label], 99),
                max_s=max(waits[label], default=0.0),
            )
            for label in sorted(waits.keys() | never.keys())
        }


@dataclass(slots=True)
class _Use:
    """What a queue held while it competed."""

    waiting: int = 0
    gpus: int = 0
    since_s: float = 0.0
    competed_s: float = 0.0
    held_gpu_s: float = 0.0


class _Competition:
    """A clock that runs only while jobs of two or more queues wait, and what each queue holds meanwhile."""

    def __init__(self) -> None:
        self._uses: defaultdict[str, _Use] = defaultdict(_Use)
        self._waiting = 0
        self._clock_s = 0.0
        self._now = 0.0

    def change(self, queue: str, now: float, *, waiting: int = 0, gpus: int = 0) -> None:
        if self._waiting > 1:
            self._clock_s += max(now - self._now, 0.0)
        self._now = max(now, self._now)
        use = self._uses[queue]
        if use.waiting:
            use.competed_s += self._clock_s - use.since_s
            use.held_gpu_s += use.gpus * (self._clock_s - use.since_s)
        use.since_s = self._clock_s
        self._waiting += bool(use.waiting + waiting) - bool(use.waiting)
        use.waiting += waiting
        use.gpus += gpus

    def evenness(self, queues: Mapping[str, JobQueue]) -> float | None:
        """Jain's index: the square of the sum over n times the sum of the squares."""
        shares = [
            use.held_gpu_s / use.competed_s / (queues[name].weight if name in queues else 1.0)
            for name, use in self._uses.items()
            if use.competed_s > 0
        ]
        squares = sum(share * share for share in shares)
        return sum(shares) ** 2 / (len(shares) * squares) if len(shares) > 1 and squares else None


def makespan_bound(trace: Trace) -> float:
    """A makespan that no schedule can beat, of the jobs that fit the cluster at all: the longest of each job's arrival
    and duration; and for the GPUs, each GPU type that is asked for, the cores, and each queue's quota, some arrival and
    all the work from then on over what there is to do it."""
    possible = _possible(trace.nodes)
    jobs = sorted((job for job in trace.jobs if possible(job.needs)), key=lambda job: job.arrival_s)
    if not jobs:
        return 0.0
    gpus = [gpu for node in trace.nodes for gpu in node.gpus]
    bounds = [
        max(job.arrival_s + min(job.duration_s, _limit_s(job)) for job in jobs),
        _work_bound(jobs, lambda job: job.gpus, len(gpus)),
        _work_bound(jobs, lambda job: job.cpu_cores, sum(node.cpu_cores for node in trace.nodes)),
    ]
    for wanted in {job.needs.gpu_type for job in jobs if job.needs.gpu_type is not None}:
        of_type = [job for job in jobs if job.needs.gpu_type == wanted]
        there = sum(same_gpu_type(wanted, gpu.type) for gpu in gpus)
        bounds.append(_work_bound(of_type, lambda job: job.gpus, there))
    by_queue: defaultdict[str, list[TraceJob]] = defaultdict(list)
    for job in jobs:
        by_queue[job.queue].append(job)
    quotas = {queue.name: queue.quota_gpus for queue in trace.queues if queue.quota_gpus is not None}
    bounds += [_work_bound(by_queue[name], lambda job: job.gpus, quota) for name, quota in quotas.items()]
    return max(bounds) - jobs[0].arrival_s


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all values do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _work_bound(jobs: Sequence[TraceJob], width: Callable[[TraceJob], int], capacity: int) -> float:
    """When all work can be done at the earliest, if it could be cut as one likes; jobs are in order of arrival."""
    bound, work = 0.0, 0.0
    for job in reversed(jobs):
        work += width(job) * min(job.duration_s, _limit_s(job))
        if work and capacity:
            bound = max(bound, job.arrival_s + work / capacity)
    return bound


def _limit_s(job: Job | TraceJob) -> float:
    return inf if job.max_runtime_s is None else job.max_runtime_s


def _possible(nodes: Sequence[Node]) -> Callable[[Needs], bool]:
    """Tells whether the empty cluster could hold a job."""
    empty = Pool(ClusterView().with_nodes(nodes))
    return functools.cache(lambda needs: empty.demand(BACKEND, needs).possible)


def simulate(
    trace: Trace, *, rules: Rules | None = None, check: bool = False, watchers: Iterable[Watcher] = ()
) -> Figures:
    """Run a trace to its end; with `check`, a BrokenPromiseError tells of the first promise that does not hold."""
    rules = rules or Rules()
    arrivals = {job.job_id: job for job in map(arriving, range(len(trace.jobs)), trace.jobs)}
    work = TrueWork(dict(zip(arrivals, trace.jobs, strict=True)))
    collector = MetricsCollector(trace, work.jobs)
    audit = [Audit(trace, punctual=not rules.charge)] if check else []
    cluster = VirtualCluster(
        ClusterView().with_nodes(trace.nodes).with_queues(trace.queues),
        now=0.0,
        work=work,
        rules=rules,
        arrivals=list(arrivals.values()),
        changes=trace.changes,
        watchers=(work, collector, *audit, *watchers),
    )
    while cluster.step():
        pass
    for each in audit:
        each.finish(cluster.view, cluster.now)
    return collector.figures(cluster.view)


class TrueWork(Watcher):
    """What the jobs of a trace really have to do, and how much of it is done and saved."""

    def __init__(self, jobs: Mapping[str, TraceJob]) -> None:
        self.jobs = jobs
        self.done_s = dict.fromkeys(jobs, 0.0)
        """Work that no preemption can take away any more."""

    def ends_at(self, job: Job) -> float | None:
        return (job.live.started_at or 0.0) + min(self._left_s(job), _limit_s(job))

    def ended(self, job: Job) -> Reason:
        return Reason.SUCCEEDED if self._left_s(job) <= _limit_s(job) else Reason.TIMEOUT

    def saves_in_s(self, job: Job) -> float:
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


def arriving(index: int, job: TraceJob) -> Job:
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
