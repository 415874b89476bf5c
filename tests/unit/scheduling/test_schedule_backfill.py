"""The head of the queue keeps what it waits for; what starts behind it never delays it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_cluster import (
    NOW,
    carried_out,
    ended,
    node,
    over_allocated,
    running,
    starts,
    stopped,
    view_of,
    waiting,
)

from trainmaster.server.core.job import Job
from trainmaster.server.scheduling.schedule import schedule
from trainmaster.server.scheduling.view import ClusterView


def half_full(**more: Any) -> Job:
    """Holds four of the eight GPUs of node a, for an hour."""
    return running("holder", {"a": range(4)}, **{"runtime": 3600.0, **more})


HEAD = waiting("head", 8, at=NOW - 100)


def test_short_job_starts_in_front_of_a_head_that_is_known_to_start_later() -> None:
    view = view_of([node("a", 8)], half_full(), HEAD)
    assert starts(view.with_jobs([waiting("short", 4, runtime=3600.0)])) == ["short"]
    assert starts(view.with_jobs([waiting("long", 4, runtime=3601.0)])) == []
    assert starts(view.with_jobs([waiting("endless", 4)])) == []
    assert starts(view.with_jobs([waiting("service", 4, runtime=60.0, service=True)])) == []


def test_without_backfill_nothing_behind_the_head_starts_where_it_could_run() -> None:
    nodes = [node("a", 8), node("b", 8, kind="A100")]
    head = waiting("head", 8, at=NOW - 100, needs={"gpu_type": "H100"})
    jobs = [waiting("short", 4, runtime=60.0, needs={"gpu_type": "H100"}), waiting("other", 4, at=NOW + 1)]
    view = view_of(nodes, half_full(), head, *jobs)
    assert starts(view, backfill=False) == ["other"]
    assert starts(view) == ["short", "other"]


def test_long_job_starts_beside_the_head_on_what_is_left_then() -> None:
    head = waiting("head", 6, at=NOW - 100)
    view = view_of([node("a", 8)], half_full(), head)
    assert starts(view.with_jobs([waiting("two", 2)])) == ["two"]
    assert starts(view.with_jobs([waiting("three", 3)])) == []


def test_jobs_beside_the_head_do_not_add_up_to_more_than_is_left() -> None:
    view = view_of([node("a", 8)], half_full(), waiting("head", 6, at=NOW - 100))
    assert starts(view.with_jobs([waiting("one", 1), waiting("two", 1), waiting("three", 1)])) == ["one", "three"]


def test_gang_beside_the_head_counts_all_its_nodes() -> None:
    head = waiting("head", 8, at=NOW - 100, needs={"cpu_cores": 60})
    view = view_of([node("a", 8)], half_full(), head)
    assert starts(view.with_jobs([waiting("pair", 0, count=2, needs={"cpu_cores": 4})])) == []
    assert starts(view.with_jobs([waiting("pair", 0, count=2, needs={"cpu_cores": 2})])) == ["pair"]


def test_where_the_head_is_not_expected_anybody_starts() -> None:
    nodes = [node("a", 8), node("b", 8)]
    view = view_of(nodes, half_full(), running("later", {"b": range(4)}, runtime=7200.0), HEAD)
    plan = schedule(view.with_jobs([waiting("endless", 4)]), now=NOW)
    assert [(each.job.job_id, each.shares[0].node_id) for each in plan.placements] == [("endless", "b")]
    assert plan.heads["head"][1] == NOW + 3600


def test_head_that_waits_for_what_has_no_limit_keeps_what_it_could_use() -> None:
    view = view_of([node("a", 8), node("b", 8)], half_full(runtime=None), running("r", {"b": range(2)}), HEAD)
    assert starts(view.with_jobs([waiting("short", 1, runtime=1.0)])) == []
    assert starts(view.with_jobs([waiting("cpu", 0, needs={"cpu_cores": 4})])) == ["cpu"]


def test_cores_that_a_head_without_a_date_needs_are_kept_and_the_rest_is_not() -> None:
    head = waiting("head", 8, at=NOW - 100, needs={"cpu_cores": 60})
    view = view_of([node("a", 8)], half_full(runtime=None), head)
    assert starts(view.with_jobs([waiting("four", 0, needs={"cpu_cores": 4})])) == ["four"]
    assert starts(view.with_jobs([waiting("five", 0, needs={"cpu_cores": 5})])) == []


def test_more_than_the_head_needs_of_the_gpus_is_free_for_others() -> None:
    head = waiting("head", 2, at=NOW - 100, needs={"cpu_cores": 32})
    holder = running("holder", {"a": range(4)}, needs={"cpu_cores": 40})
    view = view_of([node("a", 8)], holder, head)
    assert starts(view.with_jobs([waiting("two", 2), waiting("more", 1, at=NOW + 1)])) == ["two"]


def test_node_that_a_service_blocks_for_good_is_free_for_all() -> None:
    service = running("service", {"b": [0]}, service=True)
    view = view_of([node("a", 8), node("b", 8)], half_full(runtime=None), service, HEAD)
    plan = schedule(view.with_jobs([waiting("small", 4)]), now=NOW)
    assert [each.shares[0].node_id for each in plan.placements] == ["b"]


def test_service_that_is_being_stopped_ends() -> None:
    service = stopped(running("service", {"a": [0]}, service=True), grace_s=30.0)
    view = view_of([node("a", 8)], service, HEAD, waiting("small", 1, runtime=31.0))
    assert starts(view) == []
    assert starts(view.with_jobs([waiting("small", 1, runtime=30.0)])) == ["small"]


def test_heads_of_different_kinds_of_node_are_protected_each() -> None:
    nodes = [node("a", 8), node("b", 8, kind="A100")]
    jobs = [
        half_full(runtime=None),
        running("r", {"b": range(4)}),
        waiting("h100", 8, at=NOW - 100, needs={"gpu_type": "H100"}),
        waiting("a100", 8, at=NOW - 50, needs={"gpu_type": "A100"}),
        waiting("small-a100", 1, needs={"gpu_type": "A100"}),
    ]
    assert starts(view_of(nodes, *jobs)) == []
    older = waiting("older", 1, at=NOW - 70, needs={"gpu_type": "A100"})
    assert starts(view_of(nodes, *jobs, older)) == ["older"]


def test_second_in_line_for_the_same_nodes_is_not_protected() -> None:
    second = waiting("second", 2, at=NOW - 50, needs={"cpu_cores": 60})
    view = view_of([node("a", 8)], half_full(needs={"cpu_cores": 20}), HEAD, second, waiting("short", 4, runtime=60.0))
    assert starts(view) == ["short"]


def test_job_that_no_longer_fits_after_a_start_in_the_same_pass_is_a_head() -> None:
    first, second = waiting("first", 5, at=NOW - 3), waiting("second", 5, at=NOW - 2)
    assert starts(view_of([node("a", 8)], first, second, waiting("small", 1))) == ["first"]


def test_head_in_back_off_or_unwanted_keeps_nothing() -> None:
    resting = HEAD.evolve(not_before=NOW + 5)
    assert starts(view_of([node("a", 8)], half_full(runtime=None), resting, waiting("small", 4))) == ["small"]


def test_overdue_job_is_expected_to_go_at_any_moment() -> None:
    late = running("late", {"a": range(4)}, now=NOW - 7200, runtime=3600.0)
    plan = schedule(view_of([node("a", 8)], late, HEAD, waiting("short", 4, runtime=1.0)), now=NOW)
    assert plan.placements == []
    assert plan.heads["head"][1] == NOW


def test_plan_blocks_those_behind_the_head_that_are_no_shorter() -> None:
    view = view_of([node("a", 8)], half_full(), HEAD, waiting("long", 2, runtime=4000.0))
    plan = schedule(view, now=NOW)
    assert plan.blocks(waiting("longer", 2, runtime=5000.0))
    assert plan.blocks(waiting("another-head", 8))
    assert not plan.blocks(waiting("short", 2, runtime=60.0))
    assert not plan.blocks(waiting("older", 2, at=NOW - 200))
    assert not plan.blocks(waiting("unknown", 3))


# -- over time --

Runs = list[tuple[int, int, int, int]]


def trace(before: Runs, queue: Runs, kinds: list[tuple[int, str]]) -> ClusterView:
    """Some jobs that run, and some that wait; every job takes exactly as long as its limit says."""
    view = view_of([node(f"n{index}", gpus, kind=kind, slots=6) for index, (gpus, kind) in enumerate(kinds)])
    first = [_job(f"r{index}", index, each) for index, each in enumerate(before)]
    view = carried_out(view, plan := schedule(view.with_jobs(first), now=NOW), now=NOW)
    assert not plan.preemptions
    return view.with_jobs(_job(f"j{index}", index, each) for index, each in enumerate(queue))


def _job(name: str, index: int, each: tuple[int, int, int, int]) -> Job:
    gpus, count, minutes, cores = each
    return waiting(name, gpus, count=count, runtime=minutes * 60.0, at=NOW - 1000 + index, needs={"cpu_cores": cores})


def play(view: ClusterView, *, backfill: bool) -> tuple[dict[str, float], float]:
    """When each job starts, and when the last one ends."""
    now, began = NOW, dict.fromkeys(view.holding, NOW)
    reserved: dict[str, float] = {}
    while True:
        over = [job for job in view.holding.values() if job.live.created_at + (job.max_runtime_s or 0) <= now]
        view = view.with_jobs(map(ended, over))
        plan = schedule(view, now=now, backfill=backfill)
        for job_id, (_, start) in plan.heads.items():
            assert start <= reserved.get(job_id, math.inf)
        first = next(iter(plan.heads), None)
        reserved = {first: plan.heads[first][1]} if first else {}
        view = carried_out(view, plan, now=now)
        assert over_allocated(view) == []
        began.update((each.job.job_id, now) for each in plan.placements)
        if not view.holding:
            return began, now
        now = min(job.live.created_at + (job.max_runtime_s or 0) for job in view.holding.values())


runs = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2), st.integers(1, 12), st.integers(0, 40)), max_size=10)
clusters = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["H100", "A100"])), min_size=1, max_size=3)


@settings(max_examples=150)
@given(runs, runs, clusters)
def test_head_starts_at_the_same_time_with_backfill_and_without(before: Runs, queue: Runs, kinds: Any) -> None:
    view = trace(before, queue, kinds)
    with_it, _ = play(view, backfill=True)
    without, _ = play(view, backfill=False)
    first = next((job.job_id for job in view.queued() if without.get(job.job_id, NOW) > NOW), None)
    if first is not None:
        assert with_it[first] == without[first]
    assert with_it.keys() == without.keys()


def test_backfill_makes_the_whole_shorter() -> None:
    queue = [(8, 1, 60, 0), (4, 1, 30, 0), (4, 1, 30, 0)]
    view = trace([(4, 1, 60, 0)], queue, [(8, "H100")])
    with_it, end = play(view, backfill=True)
    without, later = play(view, backfill=False)
    assert with_it["j0"] == without["j0"] == NOW + 3600
    assert end < later


@pytest.mark.parametrize("backfill", [True, False])
def test_large_job_is_not_starved_by_a_stream_of_small_ones(backfill: bool) -> None:
    view = view_of([node("a", 4)], *(running(f"r{index}", {"a": [index]}) for index in range(4)))
    view = view.with_jobs([waiting("large", 4, at=NOW)])
    now = NOW
    for index in range(4):
        now += 60
        view = view.with_jobs([ended(view.jobs[f"r{index}"]), waiting(f"small{index}", 1, at=now)])
        plan = schedule(view, now=now, backfill=backfill)
        view = carried_out(view, plan, now=now)
    assert "large" in view.holding
