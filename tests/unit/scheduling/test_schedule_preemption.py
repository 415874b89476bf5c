"""Who is stopped for whom: the cheapest set, of a lower priority, and only when that makes room."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from placement_rules import fit
from small_cluster import NOW, carried_out, ended, node, running, starts, stopped, victims, view_of, waiting

from trainmaster.protocol.reasons import StopCause
from trainmaster.server.core.commands import grace_s
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import JobQueue, Node
from trainmaster.server.scheduling.schedule import schedule
from trainmaster.server.scheduling.view import ClusterView


def prey(name: str, where: Mapping[str, Sequence[int]], **more: Any) -> Job:
    """A job that may be stopped for others."""
    return running(name, where, **{"priority": 2, "preemptible": True, "can_save": True, **more})


def stopped_for(view: ClusterView, **more: Any) -> dict[str, list[str]]:
    return victims(schedule(view, now=NOW, **more))


URGENT = waiting("urgent", 1, priority=8)


def test_lower_priority_makes_room_for_a_higher_one() -> None:
    view = view_of([node("n", 1)], prey("low", {"n": [0]}), URGENT)
    assert stopped_for(view) == {"urgent": ["low"]}


def test_same_priority_and_those_not_preemptible_are_safe() -> None:
    nodes = [node("n", 2)]
    same = prey("same", {"n": [0]}, priority=8)
    firm = running("firm", {"n": [1]}, priority=0)
    assert stopped_for(view_of(nodes, same, firm, URGENT)) == {}


def test_priority_is_as_it_was_given_and_not_as_it_aged() -> None:
    aged = waiting("aged", 1, priority=2, at=NOW - 100_000)
    assert stopped_for(view_of([node("n", 1)], prey("low", {"n": [0]}), aged)) == {}


def test_nobody_is_stopped_when_that_makes_no_room() -> None:
    nodes = [node("n", 2)]
    view = view_of(nodes, prey("low", {"n": [0]}), running("firm", {"n": [1]}), waiting("two", 2, priority=8))
    assert stopped_for(view) == {}


def test_nobody_is_stopped_for_a_job_that_fits_or_rests() -> None:
    view = view_of([node("n", 2)], prey("low", {"n": [0]}), URGENT)
    assert stopped_for(view) == {}
    resting = URGENT.evolve(not_before=NOW + 1)
    assert stopped_for(view_of([node("n", 1)], prey("low", {"n": [0]}), resting)) == {}


def test_what_is_free_counts_and_no_more_is_stopped_than_needed() -> None:
    held = [prey(f"low{index}", {"n": [index]}) for index in range(3)]
    assert stopped_for(view_of([node("n", 4)], *held, waiting("two", 2, priority=8))) == {"two": ["low0"]}


def test_what_is_being_given_back_is_waited_for() -> None:
    leaving = stopped(prey("leaving", {"n": [0]}))
    view = view_of([node("n", 2)], leaving, prey("low", {"n": [1]}), URGENT)
    assert stopped_for(view) == {}
    both = waiting("both", 2, priority=8)
    assert stopped_for(view_of([node("n", 2)], leaving, prey("low", {"n": [1]}), both)) == {"both": ["low"]}


def test_job_that_ends_sooner_than_it_could_be_stopped_is_left_to_end() -> None:
    ending = prey("ending", {"n": [0]}, now=NOW - 580, runtime=600.0)
    assert stopped_for(view_of([node("n", 2)], ending, prey("low", {"n": [1]}), URGENT)) == {}
    both = waiting("both", 2, priority=8)
    assert stopped_for(view_of([node("n", 2)], ending, prey("low", {"n": [1]}), both)) == {"both": ["low"]}


def test_what_is_being_given_back_is_promised_once() -> None:
    leaving = stopped(prey("leaving", {"n": [0]}))
    first = waiting("first", 1, priority=8, at=NOW - 5).evolve(room_at=NOW - 5)
    view = view_of([node("n", 2)], leaving, prey("low", {"n": [1]}), first, URGENT)
    assert stopped_for(view) == {"urgent": ["low"]}


def test_room_that_is_made_is_not_handed_to_others() -> None:
    held = [prey(f"low{index}", {"n": [index]}) for index in range(2)]
    large = waiting("large", 3, priority=8)
    small = waiting("small", 1, at=NOW - 50_000)
    view = view_of([node("n", 3)], *held, large)
    view = carried_out(view, schedule(view, now=NOW), now=NOW)
    assert view.jobs["large"].room_at == NOW
    view = view.with_jobs([small])
    assert starts(view, now=NOW + 1) == []
    view = view.with_jobs([ended(view.jobs["low0"])])
    assert starts(view, now=NOW + 2) == []
    assert stopped_for(view) == {}
    view = view.with_jobs([ended(view.jobs["low1"])])
    assert starts(view, now=NOW + 3) == ["large"]


def test_room_is_kept_in_the_very_pass_that_makes_it() -> None:
    view = view_of([node("n", 3)], prey("low", {"n": [0, 1]}), waiting("large", 3, priority=8), waiting("small", 1))
    plan = schedule(view, now=NOW)
    assert victims(plan) == {"large": ["low"]}
    assert plan.placements == []


def test_short_job_may_use_the_room_until_it_is_there() -> None:
    view = view_of([node("n", 2)], prey("low", {"n": [0]}), waiting("large", 2, priority=8))
    assert starts(view.with_jobs([waiting("short", 1, runtime=30.0)])) == ["short"]
    assert starts(view.with_jobs([waiting("short", 1, runtime=31.0)])) == []


def test_lowest_priority_is_stopped_first_even_where_it_loses_more() -> None:
    cheap = prey("cheap", {"a": [0]}, priority=3)
    dear = [prey(f"dear{index}", {"b": [index]}, priority=1, can_save=False, now=NOW - 9000) for index in range(2)]
    view = view_of([node("a", 1), node("b", 2)], cheap, *dear, URGENT)
    assert stopped_for(view) == {"urgent": ["dear0"]}


def test_least_work_is_lost() -> None:
    old = prey("old", {"a": [0]}, can_save=False, now=NOW - 3600)
    young = prey("young", {"b": [0]}, can_save=False, now=NOW - 600)
    saves = prey("saves", {"c": [0]}, now=NOW - 9999)
    nodes = [node("a", 1), node("b", 1), node("c", 1)]
    assert stopped_for(view_of(nodes, old, young, saves, URGENT)) == {"urgent": ["saves"]}
    assert stopped_for(view_of(nodes[:2], old, young, URGENT)) == {"urgent": ["young"]}


def test_gang_is_stopped_as_a_whole_and_costs_as_a_whole() -> None:
    gang = prey("gang", {"a": [0], "b": [0], "c": [0]})
    alone = prey("alone", {"d": [0, 1]})
    nodes = [node("a", 1), node("b", 1), node("c", 1), node("d", 2)]
    assert stopped_for(view_of(nodes, gang, alone, URGENT)) == {"urgent": ["alone"]}
    assert stopped_for(view_of(nodes[:3], gang, URGENT)) == {"urgent": ["gang"]}


def test_gang_gets_room_on_all_its_nodes_or_nobody_is_stopped() -> None:
    held = [prey("a", {"a": [0, 1]}), prey("b", {"b": [0, 1]}), prey("c", {"c": [0]})]
    nodes = [node("a", 2), node("b", 2), node("c", 2)]
    assert stopped_for(view_of(nodes, *held, waiting("pair", 2, count=2, priority=8))) == {"pair": ["a", "c"]}
    assert stopped_for(view_of(nodes, *held, waiting("four", 2, count=4, priority=8))) == {}


def test_room_that_a_gang_has_already_is_kept_while_the_rest_is_made() -> None:
    nodes = [node("a", cpu_cores=8, slots=2), node("b", cpu_cores=8, slots=1)]
    held = [running("firm", {"a": []}, runtime=9000.0), prey("low", {"a": []}, runtime=9000.0)]
    gang = waiting("gang", 0, count=2, priority=8)
    plan = schedule(view_of(nodes, *held, gang, waiting("rival", 0)), now=NOW)
    assert victims(plan) == {"gang": ["low"]}
    assert plan.placements == []
    assert plan.heads["gang"][1] == NOW + 30


def test_service_that_may_be_preempted_is() -> None:
    view = view_of([node("n", 1)], prey("service", {"n": [0]}, service=True), URGENT)
    assert stopped_for(view) == {"urgent": ["service"]}


def test_several_jobs_get_room_in_one_pass_from_different_victims() -> None:
    held = [prey(f"low{index}", {"n": [index]}) for index in range(3)]
    jobs = [waiting(f"u{index}", 1, priority=8, at=NOW + index) for index in range(4)]
    found = stopped_for(view_of([node("n", 3)], *held, *jobs))
    assert found == {"u0": ["low0"], "u1": ["low1"], "u2": ["low2"]}


def test_at_most_so_many_get_room_in_one_pass() -> None:
    held = [prey(f"low{index:02}", {"n": [index]}) for index in range(20)]
    jobs = [waiting(f"u{index:02}", 1, priority=8, at=NOW + index) for index in range(20)]
    assert len(stopped_for(view_of([node("n", 20, slots=64)], *held, *jobs))) == 16


def test_preemption_does_not_take_what_an_older_head_waits_for() -> None:
    ends = prey("ends", {"n": [0, 1]}, runtime=3600.0)
    head = waiting("head", 2, priority=2, at=NOW - 90_000)
    endless = waiting("urgent", 2, priority=8)
    assert stopped_for(view_of([node("n", 2)], ends, head, endless)) == {}
    assert stopped_for(view_of([node("n", 2)], ends, endless)) == {"urgent": ["ends"]}
    elsewhere = prey("elsewhere", {"m": [0, 1]}, runtime=7200.0)
    view = view_of([node("n", 2), node("m", 2)], ends, elsewhere, head, endless)
    assert stopped_for(view) == {"urgent": ["elsewhere"]}


def test_job_over_its_quota_preempts_within_its_own_queue_alone() -> None:
    own = prey("own", {"n": [0]}, queue="q")
    other = prey("other", {"n": [1]}, queue="o", priority=0)
    urgent = waiting("urgent", 1, priority=8, queue="q")
    view = view_of([node("n", 4)], own, other, urgent, queues=[JobQueue(name="q", quota_gpus=1)])
    assert stopped_for(view) == {"urgent": ["own"]}
    assert starts(view) == []
    later = carried_out(view, schedule(view, now=NOW), now=NOW)
    rival = waiting("rival", 1, queue="q", at=NOW - 80_000)
    assert starts(later.with_jobs([rival])) == []
    assert starts(later.with_jobs([rival, ended(later.jobs["own"])])) == ["urgent"]


def test_victims_of_the_own_queue_bring_both_quota_and_room() -> None:
    held = [prey("far", {"b": [0]}, queue="q"), prey("near", {"a": [0, 1]}, queue="q", can_save=False, now=NOW - 99)]
    firm = running("firm", {"b": [1]})
    urgent = waiting("urgent", 2, priority=8, queue="q")
    view = view_of([node("a", 2), node("b", 2)], *held, firm, urgent, queues=[JobQueue(name="q", quota_gpus=3)])
    assert stopped_for(view) == {"urgent": ["near"]}
    view = view.with_queues([JobQueue(name="q", quota_gpus=2)])
    assert stopped_for(view) == {"urgent": ["far", "near"]}


def test_many_victims_of_the_own_queue_are_chosen_without_waste() -> None:
    held = [prey(f"low{index:02}", {f"n{index // 4}": [index % 4]}, queue="q") for index in range(16)]
    urgent = waiting("urgent", 4, priority=8, queue="q")
    nodes = [node(f"n{index}", 4) for index in range(4)]
    view = view_of(nodes, *held, urgent, queues=[JobQueue(name="q", quota_gpus=16)])
    assert stopped_for(view) == {"urgent": ["low00", "low01", "low02", "low03"]}
    view = view.with_queues([JobQueue(name="q", quota_gpus=15)])
    assert len(stopped_for(view)["urgent"]) == 5


def test_plan_does_not_block_a_job_that_could_preempt() -> None:
    view = view_of([node("n", 2)], prey("low", {"n": [0]}), running("firm", {"n": [1]}), waiting("j", 1, priority=2))
    plan = schedule(view, now=NOW)
    assert plan.blocks(waiting("same", 1, priority=2))
    assert not plan.blocks(URGENT)


# -- against all subsets --

held = st.lists(
    st.tuples(
        st.integers(0, 3),  # node
        st.integers(0, 2),  # GPUs
        st.integers(0, 20),  # cores
        st.integers(0, 6),  # priority
        st.booleans(),  # preemptible
        st.booleans(),  # can save
        st.integers(1, 100),  # minutes
    ),
    max_size=9,
)


def cluster(found: Iterable[tuple[int, int, int, int, bool, bool, int]]) -> tuple[list[Node], list[Job]]:
    nodes = [node(f"n{index}", gpus, cpu_cores=32, slots=4) for index, gpus in enumerate((1, 2, 4, 4))]
    view = view_of(nodes)
    jobs: list[Job] = []
    for index, (at, gpus, cores, priority, preemptible, can_save, minutes) in enumerate(found):
        free = view.with_jobs(jobs).occupancy.left[f"n{at}"]
        if len(free.gpus) >= gpus and free.cpu_cores >= cores and free.slots:
            where = {f"n{at}": sorted(free.gpus)[:gpus]}
            began = NOW - 60 * minutes
            more = {"needs": {"cpu_cores": cores}, "preemptible": preemptible, "can_save": can_save}
            jobs.append(running(f"r{index}", where, now=began, priority=priority, **more))
    return nodes, jobs


def loss(job: Job) -> float:
    lost_s = grace_s(job, StopCause.PREEMPT) if job.can_save else NOW - job.live.created_at
    return lost_s * max(1, sum(len(share.gpus) for share in job.live.shares))


def cost(jobs: Collection[Job]) -> tuple[int, float, int, int]:
    gpus = sum(len(share.gpus) for job in jobs for share in job.live.shares)
    return max(job.priority for job in jobs), sum(map(loss, jobs)), len(jobs), gpus


@settings(max_examples=100)
@given(held, st.integers(0, 4), st.integers(0, 24), st.integers(1, 7))
def test_set_is_the_cheapest_of_all_sets(found: Any, gpus: int, cores: int, priority: int) -> None:
    nodes, jobs = cluster(found)
    urgent = waiting("urgent", gpus, priority=priority, needs={"cpu_cores": cores})
    view = view_of(nodes, *jobs, urgent)
    plan = schedule(view, now=NOW)
    able = [job for job in jobs if job.preemptible and job.priority < priority]
    sets = [
        chosen
        for count in range(len(able) + 1)
        for chosen in itertools.combinations(able, count)
        if fit(urgent.needs, nodes, view.with_jobs(map(ended, chosen)).occupancy.left) is not None
    ]
    chosen = [each.victim for each in plan.preemptions]
    if not sets or any(not each for each in sets):
        assert not chosen
    else:
        assert fit(urgent.needs, nodes, view.with_jobs(map(ended, chosen)).occupancy.left) is not None
        assert cost(chosen) == min(map(cost, sets))


@settings(max_examples=75)
@given(held, st.integers(1, 2), st.integers(2, 3), st.integers(0, 16))
def test_gang_gets_room_and_nobody_is_stopped_in_vain(found: Any, gpus: int, count: int, cores: int) -> None:
    nodes, jobs = cluster(found)
    gang = waiting("gang", gpus, count=count, priority=7, needs={"cpu_cores": cores})
    view = view_of(nodes, *jobs, gang)
    plan = schedule(view, now=NOW)
    able = [job for job in jobs if job.preemptible]

    def fits(gone: Iterable[Job]) -> bool:
        return fit(gang.needs, nodes, view.with_jobs(map(ended, gone)).occupancy.left) is not None

    chosen = [each.victim for each in plan.preemptions]
    if fits([]) or not fits(able):
        assert not chosen
    else:
        assert fits(chosen)
        assert not any(fits([job for job in chosen if job is not spared]) for spared in chosen)
