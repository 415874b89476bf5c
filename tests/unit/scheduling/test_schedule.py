"""The first scheduler: priority, age, gangs, and a head of the queue that is never overtaken."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainmaster.server.core import observations
from trainmaster.server.core.commands import submit
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Gpu, Node, NodeState, whole
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.scheduling.schedule import schedule
from trainmaster.server.scheduling.view import ClusterView

NOW = 1_000_000.0


def node(name: str = "n", gpus: int = 0, kind: str = "H100-80GB", **more: Any) -> Node:
    units = tuple(Gpu(index=index, device=str(index), type=kind, memory_mb=81920) for index in range(gpus))
    values = {"cpu_cores": 8, "ram_mb": 64_000, "storage_mb": 100_000, **more}
    return Node(node_id=name, backend="local", hostname="h", gpus=units, **values)


def queued(job_id: str, *, at: float = NOW, priority: int = 5, **resources: Any) -> Job:
    request = parse_submit(
        {
            "name": job_id,
            "workload": {"kind": "command", "argv": ["true"]},
            "resource_config": {"gpu_count": 0, **resources},
            "scheduling_config": {"priority": priority},
        }
    )
    job = submit(
        compile_job(request),
        account_id="a",
        job_id=job_id,
        created_by="k",
        now=at,
        default_backend="local",
    ).job
    change = observations.admit(job, now=at)
    assert change is not None
    return change.job


def running(job: Job, view: ClusterView) -> Job:
    plan = schedule(view.with_jobs([job]), now=NOW)
    placement = next(placement for placement in plan.placements if placement.job.job_id == job.job_id)
    change = observations.place(job, now=NOW, shares=placement.shares, token="t")
    assert change is not None
    return change.job


def names(view: ClusterView, now: float = NOW) -> list[str]:
    return [placement.job.job_id for placement in schedule(view, now=now).placements]


def test_higher_priority_goes_first_and_age_makes_up_for_it() -> None:
    view = ClusterView().with_nodes([node(slots=1)])
    low, high = queued("low", priority=4), queued("high", priority=5)
    assert names(view.with_jobs([low, high])) == ["high"]
    old = queued("old", priority=4, at=NOW - 1801)
    assert names(view.with_jobs([old, high])) == ["old"]


def test_gang_is_placed_whole_or_not_at_all() -> None:
    view = ClusterView().with_nodes([node("a", gpus=2), node("b", gpus=2)])
    gang = queued("gang", gpu_count=4, node_count=2)
    plan = schedule(view.with_jobs([gang]), now=NOW)
    assert sorted(share.node_id for share in plan.placements[0].shares) == ["a", "b"]
    assert names(view.with_jobs([queued("too-big", gpu_count=6, node_count=2)])) == []


def test_gang_shares_one_machine_when_there_is_only_one() -> None:
    view = ClusterView().with_nodes([node("a", gpus=2)])
    plan = schedule(view.with_jobs([queued("gang", gpu_count=2, node_count=2)]), now=NOW)
    assert sorted(share.gpus for share in plan.placements[0].shares) == [(0,), (1,)]


def test_job_that_waits_for_gpus_is_not_overtaken_for_them_but_cpu_jobs_pass() -> None:
    view = ClusterView().with_nodes([node("a", gpus=2)])
    view = view.with_jobs([running(queued("holder", gpu_count=1), view)])
    head = queued("head", gpu_count=2, at=NOW - 10)
    small, cpu = queued("small", gpu_count=1), queued("cpu")
    assert names(view.with_jobs([head, small, cpu])) == ["cpu"]


def test_job_that_no_node_could_hold_holds_nobody_up() -> None:
    view = ClusterView().with_nodes([node("a", gpus=1)])
    impossible = queued("impossible", gpu_count=8, at=NOW - 100)
    assert names(view.with_jobs([impossible, queued("small", gpu_count=1)])) == ["small"]


def test_back_off_is_waited_for() -> None:
    view = ClusterView().with_nodes([node()])
    job = queued("j").evolve(not_before=NOW + 5)
    assert names(view.with_jobs([job])) == []
    assert names(view.with_jobs([job]), now=NOW + 5) == ["j"]


def test_gpu_count_left_out_means_one_where_there_are_gpus() -> None:
    job = queued("j", gpu_count=None)
    with_gpus = schedule(ClusterView().with_nodes([node(gpus=2)]).with_jobs([job]), now=NOW)
    assert len(with_gpus.placements[0].shares[0].gpus) == 1
    without = schedule(ClusterView().with_nodes([node()]).with_jobs([job]), now=NOW)
    assert without.placements[0].shares[0].gpus == ()


def test_hard_needs_rule_nodes_out_and_soft_ones_choose_among_the_rest() -> None:
    nodes = [
        node("plain", gpus=1, kind="A100-40GB", labels=("zone=a",)),
        node("good", gpus=1, capabilities=("nvlink",)),
        node("better", gpus=1, capabilities=("nvlink",), labels=("zone=b",)),
    ]
    view = ClusterView().with_nodes(nodes)
    plan = schedule(view.with_jobs([queued("j", gpu_count=1, gpu_type="h100", node_affinity=["zone=b"])]), now=NOW)
    assert plan.placements[0].shares[0].node_id == "better"


def test_drained_node_takes_no_work() -> None:
    view = ClusterView().with_nodes([node(state=NodeState.DRAINING)])
    assert names(view.with_jobs([queued("j")])) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(0, 10)), max_size=25))
def test_what_is_placed_never_exceeds_a_node(wishes: list[tuple[int, int, int]]) -> None:
    view = ClusterView().with_nodes([node("a", gpus=4, slots=6), node("b", gpus=3, slots=6)])
    jobs = [
        queued(f"j{index}", gpu_count=gpus * count, node_count=count, cpu_cores=1 + index % 3, priority=priority)
        for index, (gpus, count, priority) in enumerate(wishes)
    ]
    plan = schedule(view.with_jobs(jobs), now=NOW)
    for name, machine in view.nodes.items():
        shares = [share for placement in plan.placements for share in placement.shares if share.node_id == name]
        gpus = [index for share in shares for index in share.gpus]
        assert len(gpus) == len(set(gpus)) <= len(machine.gpus)
        assert sum(share.cpu_cores for share in shares) <= machine.cpu_cores
        assert len(shares) <= machine.slots
    for placement in plan.placements:
        assert len(placement.shares) == placement.job.needs.node_count


def test_free_and_taken_add_up() -> None:
    view = ClusterView().with_nodes([node("a", gpus=2)])
    job = running(queued("j", gpu_count=1, cpu_cores=3), view)
    left = view.with_jobs([job]).occupancy.left["a"]
    everything = whole(view.nodes["a"])
    assert len(left.gpus) == len(everything.gpus) - 1
    assert left.cpu_cores == everything.cpu_cores - 3


def test_head_that_needs_more_than_is_free_keeps_what_is_free_for_itself() -> None:
    view = ClusterView().with_nodes([node("a", gpus=4)])
    view = view.with_jobs([running(queued("holder", gpu_count=3), view)])
    head, small = queued("head", gpu_count=2, at=NOW - 10), queued("small", gpu_count=1)
    assert names(view.with_jobs([head, small])) == []


def test_plan_says_which_jobs_need_not_be_tried_until_something_is_freed() -> None:
    view = ClusterView().with_nodes([node("a", gpus=1)])
    impossible = queued("impossible", gpu_count=8)
    plan = schedule(view.with_jobs([impossible]), now=NOW)
    assert plan.blocks(queued("another", gpu_count=8))
    assert not plan.blocks(queued("small", gpu_count=1))
    full = schedule(
        ClusterView().with_nodes([node("a", slots=0)]).with_jobs([queued("j")]),
        now=NOW,
    )
    assert full.blocks(queued("anything"))
