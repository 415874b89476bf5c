"""One scenario in virtual time for everything that the scheduler promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
from virtual_diary import job, nodes, run

from trainmaster.server.core.resources import JobQueue, NodeState
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.traces import NodeChange

COMPLETED, PREEMPTED, QUEUED = JobStatus.COMPLETED, JobStatus.PREEMPTED, JobStatus.QUEUED


def test_queues_with_work_share_the_cluster_by_their_weights() -> None:
    queues = [JobQueue(name="heavy", weight=3.0), JobQueue(name="light", weight=1.0)]
    jobs = [job(f"{queue.name}-{index}", queue=queue.name) for queue in queues for index in range(60)]
    diary = run(*jobs, on=nodes(gpus=8), queues=queues)
    first_hundred = [name for name, starts in diary.starts.items() if starts[0] < 600.0]
    heavy = sum(name.startswith("heavy") for name in first_hundred)
    assert heavy == pytest.approx(0.75 * len(first_hundred), abs=2)
    assert diary.figures.fairness is not None
    assert diary.figures.fairness > 0.95


def test_queue_that_is_alone_gets_everything_whatever_its_weight() -> None:
    queues = [JobQueue(name="heavy", weight=9.0), JobQueue(name="light", weight=1.0)]
    diary = run(*(job(str(index), queue="light") for index in range(8)), on=nodes(gpus=8), queues=queues)
    assert {starts[0] for starts in diary.starts.values()} == {0.0}


def test_quota_is_the_most_that_a_queue_holds_even_when_the_rest_is_idle() -> None:
    diary = run(
        *(job(str(index), queue="capped") for index in range(8)),
        job("other", queue="free", gpus=4),
        on=nodes(gpus=8),
        queues=[JobQueue(name="capped", quota_gpus=4)],
    )
    assert sorted(starts[0] for name, starts in diary.starts.items() if name != "other") == [0.0] * 4 + [100.0] * 4
    assert diary.starts["other"] == [0.0]


@pytest.mark.parametrize(("comes_at", "first"), [(5000.0, "important"), (6000.0, "patient")])
def test_each_step_of_priority_is_worth_half_an_hour_of_waiting(comes_at: float, first: str) -> None:
    diary = run(
        job("holder", runs=10_000.0, priority=10),
        job("patient", at=1.0, priority=5),
        job("important", at=comes_at, priority=8),
        on=nodes(gpus=1),
    )
    assert min(("patient", "important"), key=lambda name: diary.starts[name][0]) == first


def test_job_that_waited_long_enough_is_overtaken_by_nobody_who_comes_later() -> None:
    stream = [job(f"s{index}", at=75.0 * index, runs=600.0, priority=10) for index in range(400)]
    diary = run(job("patient", at=1.0, gpus=8, priority=0), *stream, on=nodes(gpus=8))
    # Ten steps of priority are five hours; then it waits for those that run, and nobody else.
    assert diary.starts["patient"][0] <= 1.0 + 10 * 1800.0 + 2 * 600.0


def test_large_job_is_not_starved_by_another_queue_while_later_ones_of_its_own_run() -> None:
    own = [job(f"c{index}", at=500.0 * index, runs=1000.0, gpus=0, cpu_cores=64, queue="own") for index in range(80)]
    others = [
        job(f"o{index}", at=100.0 * index, runs=1000.0, max_runtime_s=1000.0, queue="other") for index in range(400)
    ]
    diary = run(
        job("large", at=50.0, gpus=8, queue="own"),
        *own,
        *others,
        on=[*nodes(gpus=8), *nodes(gpus=0, prefix="cpu")],
        queues=[JobQueue(name="own"), JobQueue(name="other")],
    )
    assert diary.starts["large"][0] <= 50.0 + 5 * 1800.0 + 2 * 1000.0


def test_gang_starts_on_all_of_its_nodes_at_once_or_waits() -> None:
    diary = run(
        job("one", runs=100.0, gpus=8),
        job("two", runs=250.0, gpus=8),
        job("gang", at=1.0, gpus=8, node_count=2),
        on=nodes(2),
    )
    assert diary.starts["gang"] == [250.0]
    assert sorted(diary.places["gang"][0]) == ["node-0", "node-1"]


def test_hard_needs_choose_the_node_and_what_fits_nowhere_holds_nobody_up() -> None:
    old = nodes(prefix="old", gpu_type="A100-40GB", gpu_memory_mb=40_960, cpu_cores=16, ram_mb=64_000, slots=8)
    new = nodes(prefix="new", gpu_type="H100-80GB", capabilities=("nvlink",), storage_mb=9_000_000)
    diary = run(
        job("impossible", gpu_type="B200", priority=10),
        job("too large", gpus=16, priority=10),
        job("type", gpu_type="h100"),
        job("memory", gpu_memory_min_mb=60_000),
        job("tag", capabilities=("nvlink",)),
        job("cores", cpu_cores=64),
        job("ram", ram_mb=100_000),
        job("disk", storage_mb=8_500_000),
        job("any A100", gpu_type="A100"),
        on=[*old, *new],
    )
    assert {name: places[0] for name, places in diary.places.items()} == {
        **{name: ["new-0"] for name in ("type", "memory", "tag", "cores", "ram", "disk")},
        "any A100": ["old-0"],
    }
    assert diary.figures.impossible == 2


def test_affinity_is_a_wish_that_is_granted_while_there_is_room() -> None:
    plain, liked = nodes(prefix="a", gpus=1)[0], replace(nodes(prefix="z", gpus=1)[0], labels=("rack=7",))
    diary = run(
        job("first", affinity=("rack=7",)),
        job("second", at=1.0, affinity=("rack=7",)),
        on=[plain, liked],
    )
    assert [diary.places["first"], diary.places["second"]] == [[["z-0"]], [["a-0"]]]
    avoiding = run(
        job("first", anti_affinity=("rack=7",)),
        job("second", at=1.0, anti_affinity=("rack=7",)),
        on=[liked, plain],
    )
    assert [avoiding.places["first"], avoiding.places["second"]] == [[["a-0"]], [["z-0"]]]


def test_small_jobs_fill_the_fullest_node_so_that_a_large_one_still_fits() -> None:
    diary = run(
        job("half", gpus=4, runs=1000.0),
        *(job(f"small-{index}", at=1.0, runs=1000.0) for index in range(4)),
        job("whole", at=2.0, gpus=8),
        on=nodes(2),
    )
    assert diary.starts["whole"] == [2.0]


@pytest.mark.parametrize("exact", [True, False])
def test_backfill_shortens_the_makespan_and_leaves_the_head_where_it_is(exact: bool) -> None:
    limit = 1.0 if exact else 1.5
    jobs = [
        job("long", gpus=4, runs=1000.0, max_runtime_s=1000.0 * limit),
        job("head", at=1.0, gpus=8, runs=500.0, max_runtime_s=500.0 * limit),
        *(job(f"short-{index}", at=2.0, gpus=4, runs=200.0, max_runtime_s=200.0 * limit) for index in range(4)),
        job("too long", at=2.0, gpus=4, runs=2000.0, max_runtime_s=2000.0 * limit),
    ]
    with_it = run(*jobs, on=nodes(gpus=8))
    without = run(*jobs, on=nodes(gpus=8), backfill=False)
    assert with_it.starts["head"] == without.starts["head"] == [1000.0]
    assert with_it.starts["short-0"] == [2.0]
    assert without.starts["short-0"][0] > 1000.0
    assert with_it.starts["too long"][0] > 1000.0
    assert with_it.figures.makespan_s < without.figures.makespan_s


def test_job_without_a_limit_does_not_run_before_the_head_on_what_the_head_needs() -> None:
    diary = run(
        job("long", gpus=4, runs=1000.0, max_runtime_s=1000.0),
        job("head", at=1.0, gpus=8),
        job("unknown", at=2.0, gpus=4, runs=5.0),
        on=nodes(gpus=8),
    )
    assert diary.starts["head"] == [1000.0]
    assert diary.starts["unknown"][0] >= 1100.0


@pytest.mark.parametrize("max_retries", [0, 1])
def test_preempted_job_saves_in_its_grace_period_and_goes_on_where_it_was_if_it_may(max_retries: int) -> None:
    diary = run(
        job("victim", runs=1000.0, priority=3, preemptible=True, max_retries=max_retries, save_s=20.0),
        job("urgent", at=400.0, runs=100.0, priority=8),
        on=nodes(gpus=1),
    )
    assert diary.stops["victim"] == [(400.0, "urgent")]
    assert diary.starts["urgent"] == [420.0]
    if max_retries:
        assert diary.ends["victim"] == [(420.0, QUEUED), (1120.0, COMPLETED)]
        assert diary.figures.lost_gpu_s == pytest.approx(20.0)
    else:
        assert diary.ends["victim"] == [(420.0, PREEMPTED)]


def test_preempted_job_that_saves_too_slowly_is_killed_and_starts_over() -> None:
    diary = run(
        job("victim", runs=1000.0, priority=3, preemptible=True, save_s=500.0),
        job("urgent", at=400.0, runs=100.0, priority=8),
        on=nodes(gpus=1),
    )
    assert diary.ends["victim"] == [(430.0, QUEUED), (1530.0, COMPLETED)]
    assert diary.figures.lost_gpu_s == pytest.approx(430.0)


def test_preemption_takes_the_cheapest_set_and_spares_equal_and_unpreemptible_jobs() -> None:
    cheap = {"priority": 3, "preemptible": True, "runs": 5000.0}
    diary = run(
        job("dear", gpus=4, priority=5, preemptible=True, runs=5000.0),
        job("equal", gpus=1, priority=8, preemptible=True, runs=5000.0),
        job("firm", gpus=1, priority=3, runs=5000.0),
        job("large", gpus=2, **cheap),
        job("urgent", at=100.0, gpus=2, priority=8),
        on=nodes(gpus=8),
    )
    assert {name: stops[0][1] for name, stops in diary.stops.items()} == {"large": "urgent"}


def test_nobody_is_preempted_when_that_would_not_make_enough_room() -> None:
    diary = run(
        job("firm", gpus=4, priority=3, runs=1000.0),
        job("soft", gpus=4, priority=3, preemptible=True, runs=1000.0),
        job("urgent", at=100.0, gpus=8, priority=8),
        on=nodes(gpus=8),
    )
    assert not diary.stops


def test_what_victims_leave_is_kept_for_the_job_that_they_were_stopped_for() -> None:
    diary = run(
        job("victim", gpus=8, runs=5000.0, priority=2, preemptible=True),
        job("urgent", at=100.0, gpus=8, priority=7),
        job("sneaky", at=105.0, gpus=1, runs=1000.0, priority=10),
        on=nodes(gpus=8),
    )
    assert diary.starts["urgent"] == [110.0]


def test_drained_node_takes_nothing_new_and_what_runs_there_ends_in_peace() -> None:
    (node,) = nodes(gpus=1)
    diary = run(
        job("running", runs=100.0),
        job("later", at=60.0),
        on=[node],
        changes=[
            NodeChange(at_s=50.0, node=replace(node, state=NodeState.DRAINING)),
            NodeChange(at_s=500.0, node=node),
        ],
    )
    assert diary.ends["running"] == [(100.0, COMPLETED)]
    assert diary.starts["later"] == [500.0]


def test_node_that_is_drained_by_force_is_left_and_its_job_goes_on_elsewhere() -> None:
    first, second = nodes(2, gpus=1)
    diary = run(
        job("moved", runs=100.0, save_s=5.0),
        job("other", at=1.0, runs=20.0),
        on=[first, second],
        changes=[NodeChange(at_s=50.0, node=replace(first, state=NodeState.DRAINING, drain_force=True))],
    )
    assert diary.stops["moved"] == [(50.0, None)]
    assert diary.starts["moved"] == [0.0, 55.0]
    assert diary.ends["moved"][-1] == (105.0, COMPLETED)


def test_job_that_reaches_its_limit_ends_there_in_a_time_out() -> None:
    diary = run(job("late", runs=500.0, max_runtime_s=300.0), job("next", at=1.0), on=nodes(gpus=1))
    assert diary.ends["late"] == [(300.0, JobStatus.FAILED)]
    assert diary.starts["next"] == [300.0]
    assert diary.figures.ended == {"COMPLETED": 1, "TIMEOUT": 1}
