"""The scheduler at scale: one pass over a large cluster, and Kueue's public mixes in virtual time.

Passes and rebuilds are told in processor time: they wait for nothing.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Figure, Peer, Progress, WrongResultError, percentile
from trainmaster.server.core.job import Attempt, Job
from trainmaster.server.core.resources import JobQueue, Needs, Node, Share
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling import synthetic
from trainmaster.server.scheduling.schedule import schedule
from trainmaster.server.scheduling.simulation import Figures, simulate
from trainmaster.server.scheduling.traces import BACKEND, Trace, uniform_nodes
from trainmaster.server.scheduling.view import ClusterView
from trainmaster.server.scheduling.virtual_time import Rules

NODES = 10_000
QUEUED = (1_000, 10_000, 100_000)
QUEUES = 100
PASSES = 7
CHURN = 20
"""Jobs that end, and as many that come, between two passes."""
NOW = 1_000_000.0

KUEUE_LARGE_PER_S = 42.4
KUEUE_BASELINE_S = 351.0
"""Published by Kueue with its mixes; it pays for an API server, which a simulation does not."""


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:  # noqa: ARG001 - nothing is written
    """Passes, admissions and makespan."""
    gc.freeze()
    gc.set_threshold(10_000)  # as in the server: a collection looks at every job there is
    return [*_passes(progress), *_admissions(progress), _makespan(progress)]


def _passes(progress: Progress) -> list[Figure]:
    nodes = uniform_nodes(NODES)
    queues = [JobQueue(name=f"team-{index}", weight=1 + index % 4, quota_gpus=4000) for index in range(QUEUES)]
    passes, rebuilds, told = [], [], []
    for count in QUEUED:
        progress(f"passes over {NODES:,} nodes and {count:,} queued jobs")
        chance = random.Random(count)
        jobs = [*_running(nodes, chance), *(_queued(index, chance) for index in range(count))]
        began = time.thread_time()
        view = ClusterView().with_nodes(nodes).with_queues(queues).with_jobs(jobs)
        rebuilds.append(time.thread_time() - began)
        times = _pass_times(view, chance, first_new=count)
        passes.append(max(times))
        told.append(f"{count // 1000}k: {percentile(times, 50) * 1000:.0f} ms")
    return [
        Figure(
            name=f"pass, {NODES:,} nodes, {QUEUED[-1]:,} queued",
            measured=passes[-1],
            unit="s",
            target=1.0,
            note=f"processor time, slowest of {PASSES}; medians at {', '.join(told)}",
        ),
        Figure(
            name="rebuild of the view",
            measured=rebuilds[-1],
            unit="s",
            target=5.0,
            note=f"with {QUEUED[-1]:,} queued; {', '.join(f'{each:.2f} s' for each in rebuilds)}",
        ),
    ]


def _pass_times(view: ClusterView, chance: random.Random, *, first_new: int) -> list[float]:
    """Each pass finds some jobs gone and some new, as the coordinator's do."""
    times = []
    for number in range(PASSES):
        over = chance.sample(sorted(view.holding), CHURN)
        came = [_queued(first_new + number * CHURN + index, chance) for index in range(CHURN)]
        ended = [view.jobs[job_id].evolve(status=JobStatus.COMPLETED, attempt=None) for job_id in over]
        view = view.with_jobs([*ended, *came])
        began = time.thread_time()
        plan = schedule(view, now=NOW + number)
        times.append(time.thread_time() - began)
        if not plan.placements:
            raise WrongResultError("a pass over a cluster with free GPUs started nothing")
        view = view.with_jobs(_run(placement.job, placement.shares) for placement in plan.placements)
    return times


def _running(nodes: Sequence[Node], chance: random.Random) -> list[Job]:
    """Nine of ten GPUs are held: most nodes by one job, some by several with a gap."""
    jobs: list[Job] = []
    for node in nodes:
        first = 0
        for gpus in chance.choices(((8,), (4, 2), (4,), (2, 2, 1, 1)), (75, 10, 5, 10))[0]:
            share = Share(node_id=node.node_id, gpus=tuple(range(first, first + gpus)), cpu_cores=gpus, ram_mb=gpus)
            first += gpus
            needs = Needs(gpus_per_node=gpus, cpu_cores=gpus, ram_mb=gpus)
            jobs.append(_run(_job(f"running-{len(jobs)}", needs, chance), [share]))
    return jobs


def _queued(index: int, chance: random.Random) -> Job:
    gpus = chance.choice((1, 1, 1, 2, 4, 8))
    gang = chance.choice((2, 4, 8, 16)) if gpus == 8 else 1
    needs = Needs(node_count=gang, gpus_per_node=gpus, cpu_cores=gpus * chance.choice((1, 2, 4)), ram_mb=gpus * 1024)
    return _job(f"queued-{index}", needs, chance)


def _job(job_id: str, needs: Needs, chance: random.Random) -> Job:
    at = NOW - chance.random() * 86_400
    return Job(
        account_id="bench",
        job_id=job_id,
        root_job_id=job_id,
        name=job_id,
        created_at=at,
        spec_version=0,
        spec={},
        workload_kind="simulated",
        backend=BACKEND,
        queue=f"team-{chance.randrange(QUEUES)}",
        priority=chance.randrange(11),
        needs=needs,
        preemptible=chance.random() < 0.3,
        max_runtime_s=chance.choice((None, 3600.0, 14_400.0, 86_400.0)),
        status=JobStatus.QUEUED,
        queued_at=at,
        updated_at=at,
        status_at=at,
    )


def _run(job: Job, shares: Sequence[Share]) -> Job:
    attempt = Attempt(number=1, token="", backend=BACKEND, shares=tuple(shares), created_at=NOW, started_at=NOW)
    return job.evolve(status=JobStatus.TRAINING, attempt=attempt, attempt_count=1)


def _admissions(progress: Progress) -> list[Figure]:
    trace = synthetic.kueue_large()
    progress(f"Kueue's large mix: {len(trace.jobs):,} jobs, {len(trace.queues):,} queues")
    began = time.perf_counter()
    figures = _simulated(trace)
    wall_s = time.perf_counter() - began
    rate = figures.placements / wall_s
    return [
        Figure(
            name="Kueue's large mix, admissions",
            measured=rate,
            unit="/s",
            target=850.0,
            at_least=True,
            peer=Peer(name="Kueue, published", value=KUEUE_LARGE_PER_S, ours=rate),
            note=f"{figures.jobs:,} jobs in {wall_s:.1f} s, {figures.scheduler_s:.1f} s of it in the scheduler",
        ),
        Figure(
            name="Kueue's large mix, pass p99",
            measured=figures.pass_p99_s * 1000,
            unit="ms",
            target=100.0,
            note=f"{figures.passes:,} passes, median {figures.pass_p50_s * 1000:.1f} ms",
        ),
    ]


def _makespan(progress: Progress) -> Figure:
    trace = synthetic.kueue_baseline()
    progress(f"Kueue's baseline mix: {len(trace.jobs):,} jobs, {len(trace.queues):,} queues")
    figures = _simulated(trace)
    bound_s = figures.makespan_bound_s
    return Figure(
        name="Kueue's baseline mix, makespan over its bound",
        measured=figures.stretch,
        unit="x",
        target=1.3,
        peer=Peer(name="Kueue, published", value=KUEUE_BASELINE_S / bound_s, ours=figures.stretch),
        note=f"{figures.makespan_s:.1f} s of virtual time, scheduling included; bound {bound_s:.0f} s",
    )


def _simulated(trace: Trace) -> Figures:
    figures = simulate(trace, rules=Rules(charge=True))
    if figures.ended.get("COMPLETED") != figures.jobs:
        raise WrongResultError(f"of {figures.jobs} jobs, {dict(figures.ended)}")
    return figures
