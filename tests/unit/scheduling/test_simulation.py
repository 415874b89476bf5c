"""The engine in virtual time, the figures, the books of the audit, and the look ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from virtual_diary import Diary, job, nodes, run

from trainmaster.protocol.reasons import StopCause
from trainmaster.server.core.job import Attempt, Job
from trainmaster.server.core.resources import JobQueue, NodeState, Share
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.audit import Audit, GuaranteeViolationError
from trainmaster.server.scheduling.schedule import Placement, Plan, Preemption
from trainmaster.server.scheduling.simulation import TrueWork, arriving, makespan_bound
from trainmaster.server.scheduling.traces import Trace, TraceJob
from trainmaster.server.scheduling.view import ClusterView, key_of
from trainmaster.server.scheduling.virtual_time import Rules, VirtualCluster, starts_ahead


def queued(name: str = "j", number: int = 0, **more: object) -> Job:
    return arriving(number, job(name, **more))  # type: ignore[arg-type]


def at_work(job: Job, *gpus: int, node_id: str = "node-0", since: float = 0.0) -> Job:
    share = Share(node_id=node_id, gpus=gpus)
    attempt = Attempt(number=1, token="", backend=job.backend, shares=(share,), created_at=since, started_at=since)
    return job.evolve(status=JobStatus.TRAINING, attempt=attempt, attempt_count=1)


# -- the engine --


def test_jobs_start_when_they_arrive_and_leave_when_their_work_is_done() -> None:
    diary = run(job("a", at=5.0, runs=10.0), job("b", at=7.0, runs=1.0), on=nodes(gpus=2))
    assert (diary.starts["a"], diary.starts["b"]) == ([5.0], [7.0])
    assert (diary.ends["a"], diary.ends["b"]) == ([(15.0, JobStatus.COMPLETED)], [(8.0, JobStatus.COMPLETED)])


def test_more_jobs_than_one_pass_may_place_all_start_at_their_time() -> None:
    trace = Trace(name="t", jobs=[job(str(index)) for index in range(10)], nodes=nodes(gpus=10))
    diary = Diary()
    cluster = cluster_of(trace, diary, Rules(limit=3))
    while cluster.step():
        pass
    assert list(diary.starts.values()) == [[0.0]] * 10


def test_time_of_the_scheduler_passes_when_it_is_charged() -> None:
    ticks = iter(range(1000))
    trace = Trace(name="t", jobs=[job("a", runs=10.0), job("b", at=0.5, runs=10.0)], nodes=nodes(gpus=1))
    diary = Diary()
    cluster = cluster_of(trace, diary, Rules(charge=True), stopwatch=lambda: float(next(ticks)))
    while cluster.step():
        pass
    assert diary.starts["a"] == [1.0]  # each pass takes a second by this watch
    assert diary.starts["b"][0] >= 12.0


def cluster_of(
    trace: Trace, diary: Diary, rules: Rules, stopwatch: Callable[[], float] = lambda: 0.0
) -> VirtualCluster:
    arrivals = [arriving(index, each) for index, each in enumerate(trace.jobs)]
    work = TrueWork({job.job_id: each for job, each in zip(arrivals, trace.jobs, strict=True)})
    return VirtualCluster(
        ClusterView().with_nodes(trace.nodes).with_queues(trace.queues),
        now=0.0,
        work=work,
        rules=rules,
        arrivals=arrivals,
        watchers=(work, diary),
        stopwatch=stopwatch,
    )


# -- the figures --


def test_figures_of_a_known_schedule_are_exact() -> None:
    diary = run(
        job("a", at=10.0, runs=100.0, gpus=2, class_name="big"),
        job("b", at=10.0, runs=50.0, gpus=1, priority=4),
        job("c", at=20.0, runs=50.0, gpus=2, class_name="big"),
        on=nodes(gpus=2, cpu_cores=4),
    )
    figures = diary.figures
    assert figures.makespan_s == 200.0
    assert figures.gpu_utilisation == pytest.approx((2 * 100 + 50 + 2 * 50) / (2 * 200))
    assert figures.waiting["big"].jobs == 2
    assert figures.waiting["big"].max_s == 90.0
    assert figures.waiting["priority 4"].mean_s == 150.0
    assert (figures.placements, figures.preemptions, figures.ended) == (3, 0, {"COMPLETED": 3})


def test_cores_are_what_counts_where_there_are_no_gpus() -> None:
    diary = run(job("a", runs=100.0, gpus=0, cpu_cores=3), on=nodes(gpus=0, cpu_cores=4))
    assert diary.figures.gpu_utilisation is None
    assert diary.figures.cpu_utilisation == pytest.approx(0.75)


def test_jobs_that_never_ended_are_counted_as_such() -> None:
    diary = run(job("a"), job("huge", gpus=9), on=nodes(gpus=8))
    assert diary.figures.ended == {"COMPLETED": 1, "unfinished": 1}
    assert diary.figures.impossible == 1
    assert diary.figures.waiting["priority 5"].never_started == 1


def test_fairness_is_one_for_even_shares_and_half_when_one_of_two_gets_all() -> None:
    even = [job(f"{queue}{index}", queue=queue) for index in range(8) for queue in "ab"]
    diary = run(*even, on=nodes(gpus=2), queues=[JobQueue(name="a"), JobQueue(name="b")])
    assert diary.figures.fairness == pytest.approx(1.0, abs=0.02)
    hog = [job("holder", runs=1000.0, gpus=2, queue="a"), job("more", at=1.0, queue="a"), job("b", at=1.0, queue="b")]
    diary = run(*hog, on=nodes(gpus=2), queues=[JobQueue(name="a"), JobQueue(name="b")])
    assert diary.figures.fairness == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("jobs", "queues", "bound"),
    [
        ([job("a", runs=100.0), job("b", runs=100.0)], [], 50.0 * 2),
        ([job("a", runs=30.0, gpus=4), job("b", runs=30.0, gpus=4)], [], 60.0),
        ([job("a", runs=1.0), job("late", at=500.0, runs=100.0)], [], 600.0),
        ([job("a", at=7.0, runs=1.0), job("b", at=100.0, gpus=4), job("c", at=100.0, gpus=4)], [], 293.0),
        ([job("a", gpu_type="A100", gpus=1), job("b", gpu_type="A100", gpus=1)], [], 200.0),
        ([job("a", queue="q"), job("b", queue="q")], [JobQueue(name="q", quota_gpus=1)], 200.0),
        ([job("a", runs=500.0, max_runtime_s=60.0)], [], 60.0),
        ([job("a", runs=10.0), job("impossible", runs=1e6, gpus=64)], [], 10.0),
        ([job("a", gpus=0, cpu_cores=8), job("b", gpus=0, cpu_cores=8)], [], 200.0),
    ],
)
def test_bound_of_the_makespan_sees_work_arrivals_types_quotas_and_limits(
    jobs: list[TraceJob], queues: list[JobQueue], bound: float
) -> None:
    cluster = [
        *nodes(gpus=3, cpu_cores=7, slots=8),
        *nodes(gpus=1, cpu_cores=1, gpu_type="A100", prefix="old", slots=8),
    ]
    if bound == 200.0 and jobs[0].needs.cpu_cores:
        cluster = nodes(gpus=0, cpu_cores=8)
    if any(each.gpus == 4 for each in jobs):
        cluster = nodes(gpus=4)
    assert makespan_bound(Trace(name="t", jobs=jobs, nodes=cluster, queues=queues)) == pytest.approx(bound)


# -- the audit --


def audit(**more: object) -> Audit:
    return Audit(Trace(name="t", jobs=[], nodes=nodes(2, gpus=2, cpu_cores=2), **more))  # type: ignore[arg-type]


def test_audit_finds_a_gpu_that_is_given_twice() -> None:
    books = audit()
    books.placed(at_work(queued(number=1), 0), 0.0)
    with pytest.raises(GuaranteeViolationError, match="from their holders"):
        books.placed(at_work(queued(number=2), 0), 0.0)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (at_work(queued(gpus=2), 0), "1 GPUs"),
        (at_work(queued(node_count=2), 0), "1 of 2 nodes"),
        (at_work(queued(gpu_type="A100"), 0), "wants A100"),
        (at_work(queued(), 7), "has not"),
        (at_work(queued(), 0, node_id="nowhere"), "does not exist"),
        (at_work(queued(capabilities=("x",)), 0), "without its tags"),
        (at_work(queued(cpu_cores=1), 0), "other amounts"),
        (at_work(queued(gpu_memory_min_mb=99_999), 0), "of 81920 MB"),
    ],
)
def test_audit_finds_a_share_that_is_not_what_was_asked_for(broken: Job, message: str) -> None:
    with pytest.raises(GuaranteeViolationError, match=message):
        audit().placed(broken, 0.0)


def test_audit_finds_a_quota_that_is_exceeded() -> None:
    books = audit(queues=[JobQueue(name="default", quota_gpus=1)])
    books.placed(at_work(queued(number=1), 0), 0.0)
    with pytest.raises(GuaranteeViolationError, match="quota"):
        books.placed(at_work(queued(number=2), 1), 0.0)


def test_audit_finds_what_is_given_back_twice() -> None:
    books = audit()
    held = at_work(queued(), 0)
    books.placed(held, 0.0)
    books.left(held, held, 1.0)
    with pytest.raises(GuaranteeViolationError, match="does not hold"):
        books.left(held, held, 1.0)


def test_audit_finds_a_drained_node_in_use() -> None:
    books = audit()
    drained = [replace(node, state=NodeState.DRAINED) for node in nodes(2, gpus=2)]
    books.nodes_changed(ClusterView().with_nodes(drained), 0.0)
    with pytest.raises(GuaranteeViolationError, match="DRAINED"):
        books.placed(at_work(queued(), 0), 0.0)


def test_audit_finds_a_job_that_was_left_waiting_for_nothing() -> None:
    view = ClusterView().with_nodes(nodes(gpus=2)).with_jobs([queued()])
    with pytest.raises(GuaranteeViolationError, match="left waiting"):
        audit().finish(view, 0.0)


@pytest.mark.parametrize(
    ("victim", "priority", "message"),
    [
        ({"preemptible": False, "priority": 1}, 5, "not preemptible"),
        ({"preemptible": True, "priority": 5}, 5, "no higher priority"),
    ],
)
def test_audit_finds_a_victim_that_must_be_spared(victim: dict[str, object], priority: int, message: str) -> None:
    held, waiting = at_work(queued("v", 1, **victim), 0), queued("w", 2, priority=priority)
    view = ClusterView().with_nodes(nodes(gpus=2)).with_jobs([held, waiting])
    with pytest.raises(GuaranteeViolationError, match=message):
        audit().passed(view, Plan(preemptions=[Preemption(victim=held, by=waiting)]), 0.0, 0.0)


def test_audit_finds_a_plan_about_a_job_that_does_not_wait() -> None:
    held = at_work(queued(), 0)
    view = ClusterView().with_nodes(nodes(gpus=2)).with_jobs([held])
    with pytest.raises(GuaranteeViolationError, match="does not wait"):
        audit().passed(view, Plan(placements=[Placement(job=held, shares=())]), 0.0, 0.0)


def test_audit_finds_a_head_that_starts_later_than_promised() -> None:
    books, head = audit(), queued("head", 1)
    view = ClusterView().with_nodes(nodes(gpus=2)).with_jobs([head])
    books.passed(view, Plan(heads={head.job_id: (key_of(head), 100.0)}), 0.0, 0.0)
    books.passed(view, Plan(), 100.0, 0.0)
    with pytest.raises(GuaranteeViolationError, match="promised to start by 100"):
        books.passed(view, Plan(), 101.0, 0.0)


@pytest.mark.parametrize("priority", [5, 6])
def test_promise_to_a_head_stands_unless_somebody_comes_who_goes_before_it(priority: int) -> None:
    books, head = audit(), queued("head", 1)
    view = ClusterView().with_nodes(nodes(gpus=2)).with_jobs([head])
    books.passed(view, Plan(heads={head.job_id: (key_of(head), 100.0)}), 0.0, 0.0)
    books.arrived(queued("comer", 2, at=50.0, priority=priority), 50.0)
    if priority > 5:
        books.passed(view, Plan(), 101.0, 0.0)
    else:
        with pytest.raises(GuaranteeViolationError):
            books.passed(view, Plan(), 101.0, 0.0)


def test_audit_finds_a_job_that_waited_for_longer_than_ageing_allows() -> None:
    books = audit()
    for number, since in ((1, 0.0), (2, 600.0)):
        each = at_work(queued(number=number, priority=10), 0, since=since)
        books.placed(each, since)
        books.left(each, each.evolve(status=JobStatus.COMPLETED), since + 60.0)
    with pytest.raises(GuaranteeViolationError, match="waited 600 s"):
        books.finish(ClusterView(), 1000.0)


# -- the look ahead --


def test_look_ahead_says_when_each_waiting_job_starts() -> None:
    view = ClusterView().with_nodes(nodes(gpus=2))
    running = at_work(queued("holder", 0, gpus=2), 0, 1)
    first, second = queued("first", 1, gpus=2), queued("second", 2, gpus=1)
    view = view.with_jobs([running, first, second])
    ends = {running.job_id: 100.0, first.job_id: 150.0}
    assert starts_ahead(view, now=10.0, ends_at=lambda job: ends.get(job.job_id)) == {
        first.job_id: 100.0,
        second.job_id: 150.0,
    }


def test_look_ahead_stops_at_the_jobs_that_are_wanted_and_after_so_many_passes() -> None:
    view = ClusterView().with_nodes(nodes(gpus=1))
    jobs = [at_work(queued("holder", 0), 0), *(queued(str(index), index) for index in range(1, 50))]
    view = view.with_jobs(jobs)

    def ends_at(job: Job) -> float:
        return (job.live.started_at or 0.0) + 10.0

    assert starts_ahead(view, now=0.0, ends_at=ends_at, wanted=["job-000001"]) == {"job-000001": 10.0}
    assert len(starts_ahead(view, now=0.0, ends_at=ends_at, max_passes=11)) == 10


def test_look_ahead_knows_no_start_behind_an_end_that_nobody_knows() -> None:
    view = ClusterView().with_nodes(nodes(gpus=1))
    view = view.with_jobs([at_work(queued("holder", 0), 0), queued("waiting", 1)])
    assert starts_ahead(view, now=0.0, ends_at=lambda job: None) == {}


def test_look_ahead_expects_a_job_that_is_being_stopped_to_leave_after_its_grace_period() -> None:
    view = ClusterView().with_nodes(nodes(gpus=1))
    holder = at_work(queued("holder", 0), 0)
    stopping = holder.evolve(attempt=holder.live.evolve(stop=StopCause.CANCEL, stop_at=5.0, stop_grace_s=30.0))
    view = view.with_jobs([stopping, queued("waiting", 1)])
    assert starts_ahead(view, now=10.0, ends_at=lambda job: None) == {"job-000001": 35.0}


def test_look_ahead_waits_for_the_end_of_a_back_off() -> None:
    view = ClusterView().with_nodes(nodes(gpus=1)).with_jobs([queued("again", 1).evolve(not_before=60.0)])
    assert starts_ahead(view, now=10.0, ends_at=lambda job: None) == {"job-000001": 60.0}
