"""Where a gang goes: hard needs, soft demands, tight packing, and the same answer from the index as from the rules."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from placement_rules import fit, gpus_wanted
from small_cluster import NOW, carried_out, node, over_allocated, running, starts, view_of, waiting

from trainmaster.server.core.resources import Gpu, Needs, Node, NodeState
from trainmaster.server.scheduling.pool import Pool
from trainmaster.server.scheduling.schedule import schedule
from trainmaster.server.scheduling.view import ClusterView


def where(view: ClusterView) -> dict[str, list[str]]:
    return {
        placement.job.job_id: sorted(share.node_id for share in placement.shares)
        for placement in schedule(view, now=NOW).placements
    }


def sliced(name: str = "sliced", slices: int = 2, whole: int = 0) -> Node:
    units = [Gpu(index=index, device=f"MIG-{index}", type="mig-1g.5gb", memory_mb=4864) for index in range(slices)]
    units += [Gpu(index=slices + index, device=str(index), type="A100-40GB", memory_mb=40960) for index in range(whole)]
    return replace(node(name), gpus=tuple(units))


def test_slice_of_a_gpu_is_for_those_who_ask_for_it_by_name() -> None:
    machine = replace(node(), gpus=sliced(slices=2, whole=1).gpus)
    by_name = waiting("by-name", 1, needs={"gpu_type": "mig-1g.5gb"})
    plan = schedule(
        view_of([machine], by_name, waiting("whole", 1, at=NOW + 1), waiting("more", 1, at=NOW + 2)), now=NOW
    )
    given = {placement.job.job_id: placement.shares[0].gpus for placement in plan.placements}
    assert given == {"by-name": (0,), "whole": (2,)}


def test_name_of_a_gpu_does_not_find_its_slices() -> None:
    units = (Gpu(index=0, device="0", type="NVIDIA A100 MIG 1g.5gb", memory_mb=4864),)
    machine = replace(node(), gpus=units)
    assert starts(view_of([machine], waiting("a100", 1, needs={"gpu_type": "A100"}))) == []
    assert starts(view_of([machine], waiting("slice", 1, needs={"gpu_type": "MIG 1g.5gb"}))) == ["slice"]


def test_gpus_left_open_on_a_backend_of_slices_runs_on_the_cpu() -> None:
    machine = replace(node(), gpus=sliced(slices=2).gpus)
    plan = schedule(view_of([machine], waiting("open", None)), now=NOW)
    assert plan.placements[0].shares[0].gpus == ()


def test_unhealthy_gpu_is_never_given() -> None:
    machine = node(gpus=2)
    ill = replace(machine, gpus=(replace(machine.gpus[0], healthy=False), machine.gpus[1]))
    plan = schedule(view_of([ill], waiting("one", 1), waiting("two", 1, at=NOW + 1)), now=NOW)
    assert [placement.shares[0].gpus for placement in plan.placements] == [(1,)]


def test_minima_and_capabilities_rule_nodes_out() -> None:
    nodes = [
        node("small", 1, cpu_cores=2),
        node("full", 1, given_capabilities=("nvlink",), storage_mb=500),
        node("no-tag", 1),
        node("good", 1, given_capabilities=("nvlink",)),
        node("drained", 1, capabilities=("nvlink",), state=NodeState.DRAINED),
    ]
    needs = {"cpu_cores": 4, "storage_mb": 1000, "capabilities": ("nvlink",)}
    view = view_of(nodes, waiting("one", 1, needs=needs), waiting("two", 1, at=NOW + 1, needs=needs))
    assert where(view) == {"one": ["good"]}


def test_region_of_a_node_can_be_required() -> None:
    nodes = [
        node("plain", 1),
        node("far", 1, labels=("region=us-1",)),
        node("here", 1, given_labels=("region=eu-1", "rack-3")),
    ]
    needs = {"capabilities": ("region=eu-1",)}
    view = view_of(nodes, waiting("one", 1, needs=needs), waiting("two", 1, at=NOW + 1, needs=needs))
    assert where(view) == {"one": ["here"]}
    assert where(view_of(nodes, waiting("one", 1, needs={"capabilities": ("rack-3",)}))) == {}


def test_gpu_memory_is_a_hard_need_and_the_smallest_good_gpu_is_given() -> None:
    units = tuple(
        Gpu(index=index, device=str(index), type="X", memory_mb=memory) for index, memory in enumerate([80, 24, 40])
    )
    machine = replace(node(), gpus=units)
    plan = schedule(view_of([machine], waiting("j", 1, needs={"gpu_memory_min_mb": 30})), now=NOW)
    assert plan.placements[0].shares[0].gpus == (2,)


def test_labels_are_preferred_and_avoided_but_never_required() -> None:
    nodes = [node("plain", 1), node("liked", 1, labels=("zone=b",)), node("bad", 1, given_labels=("old",))]
    needs = {"affinity": ("zone=b",), "anti_affinity": ("old",)}
    jobs = [waiting(f"j{index}", 1, at=NOW + index, needs=needs) for index in range(3)]
    assert where(view_of(nodes, *jobs)) == {"j0": ["liked"], "j1": ["plain"], "j2": ["bad"]}


def test_tightest_node_is_filled_and_whole_nodes_stay_whole() -> None:
    nodes = [node("empty", 8), node("half", 8)]
    view = view_of(nodes, running("r", {"half": range(4)}), waiting("small", 2), waiting("large", 8, at=NOW + 1))
    assert where(view) == {"small": ["half"], "large": ["empty"]}


def test_gang_spreads_over_machines_before_it_shares_one() -> None:
    nodes = [node("a", 4), node("b", 4)]
    assert where(view_of(nodes, waiting("gang", 1, count=2))) == {"gang": ["a", "b"]}
    assert where(view_of(nodes, waiting("gang", 1, count=3))) == {"gang": ["a", "a", "b"]}


machines = st.builds(
    lambda gpus, kind, cores, slots, label, state: {
        "gpus": gpus,
        "kind": kind,
        "cpu_cores": cores,
        "slots": slots,
        "labels": label,
        "state": state,
    },
    st.integers(0, 4),
    st.sampled_from(["H100", "A100", "mig-1g.5gb"]),
    st.integers(1, 8),
    st.integers(0, 4),
    st.sampled_from([(), ("x",), ("x", "y")]),
    st.sampled_from([NodeState.READY, NodeState.READY, NodeState.READY, NodeState.DRAINING]),
)
demands = st.builds(
    Needs,
    node_count=st.integers(1, 3),
    gpus_per_node=st.none() | st.integers(0, 3),
    gpu_type=st.sampled_from([None, None, "H100", "mig-1g.5gb"]),
    gpu_memory_min_mb=st.sampled_from([0, 0, 1]),
    cpu_cores=st.integers(0, 4),
    affinity=st.sampled_from([(), ("x",)]),
    anti_affinity=st.sampled_from([(), ("y",)]),
)


@given(st.lists(machines, max_size=5), st.lists(demands, min_size=1, max_size=8))
def test_index_finds_the_place_that_the_rules_say(found: list[dict[str, object]], asked: list[Needs]) -> None:
    nodes = [node(f"n{index}", **each) for index, each in enumerate(found)]  # type: ignore[arg-type]
    view = view_of(nodes)
    for number, needs in enumerate(asked):
        pool = Pool(view)
        demand = pool.demand("local", needs)
        shares = pool.find(demand)
        assert demand.gpus == gpus_wanted(needs, nodes)
        assert shares == fit(needs, nodes, view.occupancy.left)
        plan = schedule(view.with_jobs([waiting(f"j{number}").evolve(needs=needs)]), now=NOW)
        view = carried_out(view, plan, now=NOW)
    assert over_allocated(view) == []
