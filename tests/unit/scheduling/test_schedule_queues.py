"""Order within a queue, fairness between queues, quotas."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from small_cluster import NOW, carried_out, ended, node, over_allocated, running, starts, view_of, waiting

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import JobQueue
from trainmaster.server.core.states import Desired
from trainmaster.server.scheduling.schedule import schedule


def test_queue_is_in_order_of_priority_and_age_and_then_of_ids() -> None:
    jobs = [waiting("c", 1), waiting("b", 1), waiting("a", 1, at=NOW + 1), waiting("urgent", 1, priority=6, at=NOW + 2)]
    assert starts(view_of([node("n", 4)], *jobs)) == ["urgent", "b", "c", "a"]


def test_job_that_room_was_made_for_goes_before_everybody() -> None:
    old, urgent = waiting("old", 1, at=NOW - 8000), waiting("urgent", 1, priority=10)
    roomy = waiting("roomy", 1, at=NOW + 50, priority=3).evolve(room_at=NOW - 1)
    roomier = waiting("roomier", 1, at=NOW - 50, priority=3).evolve(room_at=NOW)
    jobs = view_of([node("n", 3)], old, urgent, roomy, roomier)
    assert starts(jobs) == ["roomy", "roomier", "urgent"]


def test_jobs_in_back_off_or_unwanted_are_passed_over() -> None:
    resting = waiting("resting", 1, at=NOW - 9).evolve(not_before=NOW + 1)
    paused = waiting("paused", 1, at=NOW - 9).evolve(desired=Desired.PAUSE)
    view = view_of([node("n", 4)], resting, paused, waiting("j", 1))
    assert starts(view) == ["j"]
    assert starts(view, now=NOW + 1) == ["resting", "j"]


def test_limit_is_kept() -> None:
    view = view_of([node("n", 4)], *(waiting(f"j{index}", 1) for index in range(4)))
    assert starts(view, limit=3) == ["j0", "j1", "j2"]


def test_queue_that_holds_less_for_its_weight_goes_first() -> None:
    jobs = [waiting(f"{queue}{index}", 1, at=NOW + index, queue=queue) for queue in "ab" for index in range(6)]
    view = view_of([node("n", 6)], *jobs, queues=[JobQueue(name="a", weight=2.0)])
    assert sorted(starts(view)) == ["a0", "a1", "a2", "a3", "b0", "b1"]


def test_what_a_queue_holds_already_counts() -> None:
    held = [running(f"r{index}", {"n": [index]}, queue="a") for index in range(2)]
    jobs = [waiting("a0", 1, at=NOW - 60, queue="a"), *(waiting(f"b{index}", 1, queue="b") for index in range(3))]
    assert starts(view_of([node("n", 5)], *held, *jobs)) == ["b0", "b1", "a0"]


def test_share_is_of_what_a_queue_uses_most_of() -> None:
    cores = [waiting(f"c{index}", 0, queue="cores", needs={"cpu_cores": 32}) for index in range(2)]
    gpus = [waiting(f"g{index}", 1, queue="gpus", at=NOW + 1) for index in range(3)]
    assert starts(view_of([node("n", 8, cpu_cores=64)], *cores, *gpus), limit=4) == ["c0", "g0", "g1", "g2"]


def test_queues_that_hold_as_much_take_turns_by_age() -> None:
    jobs = [waiting("x", 1, queue="b"), waiting("y", 1, queue="a", at=NOW + 1)]
    assert starts(view_of([node("n", 1)], *jobs)) == ["x"]


def test_older_job_of_a_queue_that_holds_much_is_a_head_for_the_others() -> None:
    held = running("r", {"n": range(4)}, queue="big")
    old = waiting("old", 8, at=NOW - 500, queue="big")
    young = waiting("young", 2, queue="small")
    assert starts(view_of([node("n", 8)], held, old, young)) == []


def test_smaller_job_of_another_queue_does_not_take_the_place_of_an_older_larger_one() -> None:
    held = running("r", {"other": [0]}, queue="big")
    old = waiting("old", 6, at=NOW - 500, queue="big", needs={"gpu_type": "H100"})
    young = [waiting(f"young{index}", 2, at=NOW + index, queue="small") for index in range(3)]
    nodes = [node("n", 8), node("other", 1, kind="A100")]
    assert starts(view_of(nodes, held, old, *young)) == ["young0", "old"]
    tight = [node("n", 7), node("other", 1, kind="A100")]
    assert starts(view_of(tight, held, old, *young)) == ["old"]


def test_job_that_another_queue_just_crowded_out_is_a_head_at_once() -> None:
    held = running("r", {"other": [0]}, queue="big")
    old = waiting("old", 4, at=NOW - 500, queue="big", needs={"gpu_type": "H100"})
    young = [waiting("same", 4, queue="small"), waiting("small", 1, at=NOW + 1, queue="small")]
    nodes = [node("n", 7), node("other", 1, kind="A100")]
    assert starts(view_of(nodes, held, old, *young)) == ["same"]


def test_quota_is_kept_and_the_queue_waits_in_order() -> None:
    held = running("r", {"n": range(2)}, queue="q")
    jobs = [
        waiting("fits", 1, at=NOW, queue="q"),
        waiting("too-much", 2, at=NOW + 1, queue="q"),
        waiting("would-fit", 1, at=NOW + 2, queue="q"),
        waiting("cpu", 0, at=NOW + 3, queue="q"),
        waiting("elsewhere", 2, at=NOW + 4, queue="other"),
    ]
    view = view_of([node("n", 8)], held, *jobs, queues=[JobQueue(name="q", quota_gpus=4)])
    assert sorted(starts(view)) == ["cpu", "elsewhere", "fits"]


def test_job_that_asks_for_more_than_the_whole_quota_holds_nobody_up() -> None:
    jobs = [waiting("never", 5, queue="q"), waiting("fits", 4, at=NOW + 1, queue="q")]
    assert starts(view_of([node("n", 8)], *jobs, queues=[JobQueue(name="q", quota_gpus=4)])) == ["fits"]


def test_job_that_waits_for_its_quota_is_no_head() -> None:
    held = running("r", {"n": range(4)}, queue="q")
    view = view_of([node("n", 8)], held, waiting("big", 8, at=NOW - 9, queue="q"), waiting("other", 4, queue="o"))
    assert starts(view) == []
    assert starts(view.with_queues([JobQueue(name="q", quota_gpus=8)])) == ["other"]


def test_head_whose_quota_is_used_up_in_the_same_pass_gives_way_to_the_next() -> None:
    held = running("r", {"n": range(4)}, queue="q")
    first = waiting("first", 1, at=NOW - 20, queue="q")
    first_untraversable = waiting("barred", 8, at=NOW - 10, queue="q")
    head = waiting("head", 8, at=NOW - 5, queue="o")
    view = view_of([node("n", 8)], held, first, first_untraversable, head, waiting("small", 1, queue="o"))
    assert starts(view.with_queues([JobQueue(name="q", quota_gpus=12)])) == ["first"]


def test_job_gets_another_chance_when_the_head_before_it_was_over_its_quota() -> None:
    held = [running("r", {"n": range(4)}, queue="q"), running("s", {"m": [0]}, queue="o")]
    jobs = [
        waiting("first", 1, at=NOW - 30, queue="q", needs={"gpu_type": "A100"}),
        waiting("barred", 8, at=NOW - 20, queue="q"),
        waiting("late", 1, at=NOW - 10, queue="o", runtime=60.0),
        waiting("later", 1, at=NOW - 9, queue="o"),
    ]
    nodes = [node("n", 8), node("m", 4, kind="A100")]
    view = view_of(nodes, *held, *jobs, queues=[JobQueue(name="q", quota_gpus=12), JobQueue(name="o", weight=100.0)])
    assert sorted(starts(view)) == ["first", "late", "later"]


def test_job_behind_a_head_does_not_use_up_its_quota() -> None:
    held = running("r", {"a": range(4)}, queue="q", runtime=3600.0)
    head = waiting("head", 8, at=NOW - 9, queue="q", needs={"gpu_type": "H100"})
    nodes = [node("a", 8), node("b", 8, kind="A100")]
    view = view_of(nodes, held, head, queues=[JobQueue(name="q", quota_gpus=14)])
    assert starts(view.with_jobs([waiting("two", 2, queue="q", needs={"gpu_type": "A100"})])) == ["two"]
    assert starts(view.with_jobs([waiting("three", 3, queue="q", needs={"gpu_type": "A100"})])) == []
    short = waiting("three", 3, queue="q", runtime=60.0, needs={"gpu_type": "A100"})
    assert starts(view.with_jobs([short])) == ["three"]


def test_quota_of_nothing_holds_gpu_jobs_back_and_lets_others_run() -> None:
    view = view_of([node("n", 8)], waiting("gpu", 1), waiting("open", None), waiting("cpu", 0))
    assert starts(view.with_queues([JobQueue(name="default", quota_gpus=0)])) == ["cpu"]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 2), st.sampled_from("abc"), st.integers(0, 10), st.booleans()),
        max_size=14,
    ),
    st.integers(0, 6),
    st.integers(0, 6),
)
def test_quotas_hold_and_nothing_is_over_allocated_until_all_is_done(
    wishes: list[tuple[int, int, str, int, bool]], quota_a: int, quota_b: int
) -> None:
    queues = [JobQueue(name="a", quota_gpus=quota_a), JobQueue(name="b", quota_gpus=quota_b, weight=3.0)]
    jobs = [
        waiting(
            f"j{index:02}",
            gpus,
            count=count,
            queue=queue,
            priority=priority,
            preemptible=preemptible,
            runtime=60.0 * (1 + index % 5) if index % 3 else None,
            needs={"cpu_cores": index % 20},
        )
        for index, (gpus, count, queue, priority, preemptible) in enumerate(wishes)
    ]
    view = view_of([node("n0", 4, slots=5), node("n1", 4, slots=5)], *jobs, queues=queues)
    now = NOW
    for _ in range(60):
        plan = schedule(view, now=now)
        for each in plan.preemptions:
            assert each.victim.preemptible
            assert each.victim.priority < each.by.priority
        view = carried_out(view, plan, now=now)
        assert over_allocated(view) == []
        for queue in queues:
            held = [job for job in view.holding.values() if job.queue == queue.name]
            assert sum(len(share.gpus) for job in held for share in job.live.shares) <= (queue.quota_gpus or 0)
        if not view.holding:
            break
        now += 60
        gone = min(view.holding.values(), key=lambda job: (job.live.stop is None, job.job_id))
        view = view.with_jobs([ended(gone)])
    assert all(_never(job, {"a": quota_a, "b": quota_b}) for job in view.jobs.values())


def _never(job: Job, quotas: dict[str, int]) -> bool:
    """It cannot start: the nodes or its quota have too little."""
    return job.needs.node_count * (job.needs.gpus_per_node or 0) > min(8, quotas.get(job.queue, 8))
