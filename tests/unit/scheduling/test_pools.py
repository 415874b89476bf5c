"""Pools: what the engine of a cluster places is placed by us in its pool, as long as a node there could hold it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from small_cluster import NOW, node, started, starts, victims, view_of, waiting

from trainmaster.server.core.job import Job
from trainmaster.server.core.reports import EngineOutage
from trainmaster.server.core.resources import JobQueue, Node, NodeState
from trainmaster.server.core.states import PendingCode
from trainmaster.server.scheduling.explain import Explanation, explain
from trainmaster.server.scheduling.obstacles import Situation
from trainmaster.server.scheduling.pool import Pool
from trainmaster.server.scheduling.preemption import drain
from trainmaster.server.scheduling.schedule import schedule
from trainmaster.server.scheduling.shortage import why_never
from trainmaster.server.scheduling.view import ClusterView


def member(name: str, gpus: int = 4, **more: Any) -> Node:
    return replace(node(f"hpc:{name}", gpus, **more), backend="hpc", pool="hpc")


def job(job_id: str, gpus: int = 0, **more: Any) -> Any:
    return waiting(job_id, gpus, **more).evolve(backend="hpc")


def test_a_pool_has_what_its_ready_nodes_have() -> None:
    away = member("n3", state=NodeState.DRAINED)
    view = view_of([member("n1"), member("n2", 2), away, node("here", 1)])
    pool = view.nodes["hpc"]
    assert (len(pool.gpus), pool.cpu_cores, pool.is_pool, pool.state) == (6, 128, True, NodeState.READY)
    assert set(view.nodes) == {"hpc", "hpc:n1", "hpc:n2", "hpc:n3", "here"}
    assert view_of([away]).nodes["hpc"].state is NodeState.OFFLINE


def test_when_a_node_of_a_pool_is_empty_is_for_its_engine_to_say() -> None:
    draining = [member("n1", state=NodeState.DRAINING), replace(member("n2", state=NodeState.DRAINING), pool="")]
    assert drain(view_of([*draining, member("n3")])).empty == ("hpc:n2",)


def test_jobs_are_placed_in_the_pool_until_it_is_full_and_not_on_its_nodes() -> None:
    view = view_of([member("n1"), member("n2")], *(job(f"j{number}", 3, at=NOW - number) for number in range(3)))
    plan = schedule(view, now=NOW)
    shares = [share for placement in plan.placements for share in placement.shares]
    # Which node has room for them is the engine's business: of 8 GPUs, 2 are left.
    assert [(share.node_id, len(share.gpus)) for share in shares] == [("hpc", 3), ("hpc", 3)]
    assert len({gpu for share in shares for gpu in share.gpus}) == 6


def test_a_gang_has_a_share_of_the_pool_for_each_of_its_nodes() -> None:
    view = view_of([member("n1"), member("n2")], job("gang", 4, count=2))
    (placement,) = schedule(view, now=NOW).placements
    assert [(share.node_id, len(share.gpus)) for share in placement.shares] == [("hpc", 4), ("hpc", 4)]


def test_what_no_node_of_the_pool_could_hold_never_starts_though_the_pool_is_large_enough() -> None:
    nodes = [member("n1"), member("n2")]
    assert starts(view_of(nodes, job("wide", 8))) == []
    assert starts(view_of(nodes, job("gang", 4, count=3))) == []
    why, remedy = why_never(job("wide", 8).needs, nodes, "hpc")
    assert (why, remedy) == ("no node has 8 × GPU; the largest has 4", "it asked for at most 4 on each node")
    assert not Pool(view_of(nodes)).demand("hpc", job("wide", 8).needs).possible


def test_what_a_node_must_have_all_at_once_is_not_put_together_from_several() -> None:
    tagged = member("n1", 0, capabilities=("infiniband",))
    assert starts(view_of([tagged, member("n2")], job("both", 4, needs={"capabilities": ("infiniband",)}))) == []
    both = member("n3", capabilities=("infiniband",))
    assert starts(view_of([tagged, both], job("both", 4, needs={"capabilities": ("infiniband",)}))) == ["both"]


def test_types_of_gpus_are_told_apart_within_a_pool() -> None:
    nodes = [member("n1", 2), member("n2", 4, kind="A100-40GB")]
    jobs = [job(f"j{number}", 2, needs={"gpu_type": "A100"}, at=NOW - number) for number in range(3)]
    assert sorted(starts(view_of(nodes, *jobs))) == ["j1", "j2"]  # the oldest two


def test_quotas_and_preemption_hold_in_pools() -> None:
    nodes = [member("n1"), member("n2")]
    limited = view_of(nodes, job("a", 4, at=NOW - 2), job("b", 4), queues=[JobQueue(name="default", quota_gpus=4)])
    assert starts(limited) == ["a"]

    low = job("low", 4, count=2, priority=1).evolve(preemptible=True)
    (placement,) = schedule(view_of(nodes, low), now=NOW).placements
    view = view_of(nodes, started(low, placement.shares), job("high", 4, priority=9))
    assert victims(schedule(view, now=NOW)) == {"high": ["low"]}


def test_a_view_of_a_pool_alone_keeps_what_is_known_of_it() -> None:
    pool = view_of([member("n1"), member("n2")]).nodes["hpc"]
    assert starts(ClusterView().with_nodes([pool]).with_jobs([job("j", 4)])) == ["j"]


def test_every_node_of_a_pool_that_could_hold_a_node_of_a_gang_is_counted_once() -> None:
    pool = Pool(view_of([member("n1"), member("n2"), member("n3", 1), member("n4", state=NodeState.DRAINED)]))
    four, two = (pool.demand("hpc", job("gang", gpus, count=3).needs) for gpus in (4, 2))
    assert (four.possible, pool.hosts(four)) == (False, 2)
    assert (two.possible, pool.hosts(two)) == (True, 2)  # four would fit, two on each
    assert pool.hosts(pool.demand("hpc", job("gang", 1).needs)) == 3


def told(view: ClusterView, waits: Job, outage: EngineOutage | None = None) -> Explanation:
    outages = {} if outage is None else {"hpc": outage}
    explanation = explain(Situation(view.with_jobs([waits]), NOW, outages), waits)
    assert explanation is not None
    return explanation


def test_nodes_of_a_pool_that_take_no_work_are_named() -> None:
    away = [member("n1", state=NodeState.DRAINED, drain_reason="new disks"), member("n2", state=NodeState.OFFLINE)]
    why = told(view_of([*away, member("n3", 1)]), job("j", 4))
    assert why.code is PendingCode.UNAVAILABLE
    assert "hpc:n1 (DRAINED: new disks), hpc:n2 (OFFLINE)" in why.message
    assert why.would_start_if == "hpc:n1, hpc:n2 were enabled"


def test_gpus_of_a_pool_that_are_not_schedulable_are_named() -> None:
    whole = member("n1", 2)
    broken = replace(whole, gpus=(whole.gpus[0], replace(whole.gpus[1], healthy=False, problem="Xid 79")))
    assert "GPU 1 of hpc:n1 (Xid 79)" in told(view_of([broken]), job("j", 2)).message


OUTAGE = EngineOutage(since=NOW - 300.0, problem="its controller is down")
SILENT = "hpc has not answered for 5 min (its controller is down), and the job waits until it does"


def test_job_for_a_cluster_that_has_not_answered_yet_waits_until_it_does() -> None:
    why = told(view_of([node("here")]), job("j"), OUTAGE)
    assert why.code is PendingCode.UNAVAILABLE
    assert why.message == f"needs a slot on one node; {SILENT}"
    assert why.would_start_if == "hpc answered"


def test_job_for_a_cluster_whose_nodes_were_not_reported_for_long_waits_until_it_answers() -> None:
    why = told(view_of([member("n1", state=NodeState.OFFLINE)]), job("j", 4), OUTAGE)
    assert why.message.endswith(f"nodes that could run it take no work: hpc:n1 (OFFLINE); {SILENT}")
    assert why.would_start_if == "hpc answered"


def test_what_the_known_nodes_of_a_cluster_could_never_run_is_told_while_it_does_not_answer() -> None:
    why = told(view_of([member("n1")]), job("j", 8), OUTAGE)
    assert why.code is PendingCode.IMPOSSIBLE
    assert "the largest has 4" in why.message
