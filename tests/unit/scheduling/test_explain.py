"""Every waiting job says why, and what would let it run: whoever does exactly that sees it start."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placement_rules import fit

from trainmaster.protocol.reasons import StopCause
from trainmaster.server.core.job import Attempt, Job, JobProgress
from trainmaster.server.core.resources import Gpu, JobQueue, Needs, Node, NodeState
from trainmaster.server.core.states import JobStatus, PendingCode
from trainmaster.server.scheduling.explain import Explanation, explain
from trainmaster.server.scheduling.obstacles import Situation
from trainmaster.server.scheduling.schedule import schedule
from trainmaster.server.scheduling.view import ClusterView

NOW = 1_000_000.0
MIN = 60.0


def node(name: str = "n", gpus: int = 0, kind: str = "H100-80GB", **more: Any) -> Node:
    units = tuple(Gpu(index=index, device=str(index), type=kind, memory_mb=81920) for index in range(gpus))
    values = {"cpu_cores": 64, "ram_mb": 64_000, "storage_mb": 100_000, "gpus": units, **more}
    return Node(node_id=name, backend="local", hostname="h", **values)


def queued(job_id: str, gpus: int = 0, *, at: float = NOW - 1, **more: Any) -> Job:
    needs = Needs(gpus_per_node=gpus, **more.pop("needs", {}))
    values = {"status": JobStatus.QUEUED, "account_id": "a", "needs": needs, "queued_at": at, **more}
    return Job(
        job_id=job_id,
        name=job_id,
        root_job_id=job_id,
        created_at=at,
        spec_version=1,
        spec={},
        workload_kind="command",
        backend="local",
        updated_at=at,
        status_at=at,
        **values,
    )


def running(view: ClusterView, job: Job, *, since: float = NOW, **attempt: Any) -> ClusterView:
    shares = fit(job.needs, list(view.nodes.values()), view.occupancy.left)
    assert shares is not None
    live = Attempt(
        number=1, token="", backend="local", shares=tuple(shares), created_at=since, started_at=since, **attempt
    )
    return view.with_jobs([job.evolve(status=JobStatus.TRAINING, attempt=live, attempt_count=1)])


def cluster(*nodes: Node, queues: Collection[JobQueue] = ()) -> ClusterView:
    return ClusterView().with_nodes(nodes).with_queues(queues)


def asked(view: ClusterView, job: Job, visible: Callable[[str], bool] = bool) -> Explanation:
    explanation = explain(Situation(view, NOW), job, visible=visible)
    assert explanation is not None
    return explanation


def starts(view: ClusterView, job: Job, now: float = NOW) -> bool:
    plan = schedule(view, now=now, limit=1000)
    return any(placement.job.job_id == job.job_id for placement in plan.placements)


def without(view: ClusterView, explanation: Explanation) -> ClusterView:
    """The cluster after exactly those went that are named as being in the way."""
    gone = [view.jobs[blocker.job_id] for blocker in explanation.blockers if blocker.job_id is not None]
    return view.with_jobs(job.evolve(status=JobStatus.CANCELLED, attempt=None) for job in gone)


def test_job_that_runs_or_is_over_waits_for_nothing() -> None:
    view = running(cluster(node(gpus=1)), queued("j", 1))
    assert explain(Situation(view, NOW), view.jobs["j"]) is None


def test_new_job_is_being_admitted() -> None:
    assert asked(cluster(), queued("j", status=JobStatus.PENDING)).code is PendingCode.ADMITTING


def test_job_that_is_next_is_about_to_be_placed() -> None:
    job = queued("j", 1)
    assert asked(cluster(node(gpus=1)).with_jobs([job]), job).code is PendingCode.STARTING


def test_back_off_says_how_long_and_why() -> None:
    job = queued("j", not_before=NOW + 20, message="the node was lost")
    view = cluster(node()).with_jobs([job])
    explanation = asked(view, job)
    assert explanation.code is PendingCode.BACKOFF
    assert explanation.message == "waits 20 s more before its next try (the node was lost)"
    assert starts(view, job, now=NOW + 20)


def test_full_node_is_told_with_the_job_that_ends_first() -> None:
    view = cluster(node("a", 8), node("b", 4))
    view = running(view, queued("long", 4, max_runtime_s=300 * MIN))
    view = running(view, queued("short", 4, max_runtime_s=40 * MIN))
    job = queued("j", 8, needs={"gpu_type": "H100"})
    view = view.with_jobs([job])
    explanation = asked(view, job)
    assert explanation.code is PendingCode.ROOM
    assert "needs 8 × H100 on one node; the best node has 4 free" in explanation.message
    assert explanation.best_node is not None
    assert starts(without(view, explanation), job)


def test_what_is_in_the_way_is_no_more_than_needed_and_ends_first() -> None:
    view = cluster(node("a", 4), node("b", 4))
    for name, minutes in (("a1", 10), ("a2", 90), ("b1", 40), ("b2", 20)):
        view = running(view, queued(name, 2, max_runtime_s=minutes * MIN))
    job = queued("j", 2)
    explanation = asked(view.with_jobs([job]), job)
    assert [(blocker.job_id, blocker.ends_in_s) for blocker in explanation.blockers] == [("a1", 10 * MIN)]
    assert explanation.message.endswith("the best node has 0 free; job a1 ends in about 10 min")
    assert explanation.would_start_if == "job a1 ended"


def test_end_is_known_by_progress_too() -> None:
    holder = queued("holder", 1, progress=JobProgress(step=5, eta_s=600.0, step_at=NOW))
    view = running(cluster(node(gpus=1)), holder)
    job = queued("j", 1)
    assert asked(view.with_jobs([job]), job).blockers[0].ends_in_s == 600.0


def test_jobs_of_other_accounts_are_amounts_without_names() -> None:
    view = running(cluster(node(gpus=2)), queued("secret-name", 2, account_id="other"))
    job = queued("j", 1)
    explanation = asked(view.with_jobs([job]), job, visible=lambda account: account == "a")
    assert [(blocker.job_id, blocker.gpus) for blocker in explanation.blockers] == [(None, 2)]
    assert "secret-name" not in str(explanation)
    assert "a job of another account holds 2 GPUs" in explanation.message


def test_lack_of_cores_is_not_told_as_lack_of_gpus() -> None:
    view = running(cluster(node(gpus=4, cpu_cores=8)), queued("holder", needs={"cpu_cores": 6}))
    job = queued("j", 1, needs={"cpu_cores": 4})
    explanation = asked(view.with_jobs([job]), job)
    assert explanation.message.startswith("needs 1 × GPU, 4 cores on one node; the best node has 2 cores free")


def test_gang_says_how_many_of_its_nodes_fit() -> None:
    view = running(cluster(node("a", 2), node("b", 2)), queued("holder", 1))
    job = queued("j", 2, needs={"node_count": 2})
    explanation = asked(view.with_jobs([job]), job)
    assert "needs 2 × GPU on each of 2 nodes; 1 of its 2 nodes would fit now" in explanation.message


@pytest.mark.parametrize(
    ("needs", "gpus", "told"),
    [
        ({"gpu_type": "H100"}, 8, "no node has 8 × H100; the largest has 4"),
        ({"gpu_type": "B200"}, 1, "no node has a GPU of type B200; there are: A100-40GB, H100-80GB"),
        ({"capabilities": ("nvlink",)}, 1, "no node has the capability nvlink; there are: infiniband"),
        ({"gpu_memory_min_mb": 200_000}, 1, "the largest GPU has 81920 MB"),
        ({"cpu_cores": 128}, 0, "no node has 128 cores; the largest has 64"),
        ({"node_count": 3}, 4, "at most 2 of its 3 nodes fit at once"),
        ({"gpu_type": "A100", "capabilities": ("infiniband",)}, 1, "no node has all of that at once"),
    ],
)
def test_job_that_no_node_could_run_says_what_is_nearest(needs: dict[str, Any], gpus: int, told: str) -> None:
    job = queued("j", gpus, needs=needs)
    view = cluster(node("a", 4, capabilities=("infiniband",)), node("b", 4, kind="A100-40GB")).with_jobs([job])
    explanation = asked(view, job)
    assert explanation.code is PendingCode.IMPOSSIBLE
    assert told in explanation.message
    assert explanation.would_start_if


def test_cluster_without_nodes_is_told() -> None:
    job = queued("j")
    assert asked(cluster().with_jobs([job]), job).message.endswith("backend 'local' has no nodes")


def test_drained_node_that_could_run_it_is_named_with_the_reason() -> None:
    away = node("a", 4, state=NodeState.DRAINED, drain_reason="new disks")
    job = queued("j", 4)
    explanation = asked(cluster(away, node("b", 1)).with_jobs([job]), job)
    assert explanation.code is PendingCode.UNAVAILABLE
    assert "a (DRAINED: new disks)" in explanation.message
    assert explanation.would_start_if == "a were enabled"
    assert starts(cluster(replace(away, state=NodeState.READY), node("b", 1)).with_jobs([job]), job)


def test_broken_gpu_that_is_needed_is_named_with_its_problem() -> None:
    whole = node("a", 2)
    broken = replace(whole, gpus=(whole.gpus[0], replace(whole.gpus[1], healthy=False, problem="Xid 79")))
    job = queued("j", 2)
    explanation = asked(cluster(broken).with_jobs([job]), job)
    assert explanation.code is PendingCode.UNAVAILABLE
    assert "GPU 1 of a (Xid 79)" in explanation.message
    assert starts(cluster(whole).with_jobs([job]), job)


def test_job_that_asks_for_more_than_its_queue_may_hold_says_so() -> None:
    job = queued("j", 4, queue="night")
    view = cluster(node(gpus=4), queues=[JobQueue(name="night", quota_gpus=2)]).with_jobs([job])
    explanation = asked(view, job)
    assert explanation.code is PendingCode.QUOTA
    assert explanation.message == "asks for 4 GPUs, and queue night may hold 2"
    assert starts(view.with_queues([JobQueue(name="night", quota_gpus=4)]), job)


def test_job_that_is_being_made_room_for_says_how_long_that_takes() -> None:
    victim = queued("victim", 1, preemptible=True, priority=1)
    view = running(
        cluster(node(gpus=1)), victim, stop=StopCause.PREEMPT, stop_at=NOW - 5, stop_grace_s=30.0, since=NOW - 100
    )
    job = queued("j", 1, priority=9, room_at=NOW - 5)
    explanation = asked(view.with_jobs([job]), job)
    assert explanation.code is PendingCode.PREEMPTING
    assert [(blocker.job_id, blocker.ends_in_s) for blocker in explanation.blockers] == [("victim", 25.0)]


def test_job_that_counts_on_room_made_for_another_names_that_too() -> None:
    night = JobQueue(name="night", quota_gpus=2)
    view = cluster(node(gpus=4, slots=3), queues=[JobQueue(name="default"), night])
    gang = queued("gang", 1, queue="night", preemptible=True, priority=3, max_retries=1, needs={"node_count": 2})
    view = running(view, gang)
    view = running(view, queued("single", 1, preemptible=True, priority=3, max_retries=1))
    jobs = [queued("small", 1, queue="night", priority=4), queued("large", 3, priority=4)]
    view = view.with_jobs(jobs)
    for job in jobs:
        explanation = asked(view, job)
        assert explanation.code is PendingCode.PREEMPTING
        assert starts(without(view, explanation), job), explanation


def test_without_patience_everybody_before_it_is_named() -> None:
    view = running(cluster(node(gpus=1)), queued("holder", 1))
    others = [queued(f"before-{index}", 1, at=NOW - 100 + index) for index in range(3)]
    job = queued("j", 1)
    view = view.with_jobs([*others, job])
    explanation = explain(Situation(view, NOW), job, patience=lambda: False)
    assert explanation is not None
    assert [blocker.job_id for blocker in explanation.blockers] == ["holder", "before-0", "before-1", "before-2"]
    assert starts(without(view, explanation), job)


@st.composite
def situations(draw: st.DrawFn) -> ClusterView:
    """Small clusters in the middle of their work."""
    kinds = st.sampled_from(["H100", "A100"])
    states = st.sampled_from([NodeState.READY] * 5 + [NodeState.DRAINED])
    nodes = [
        node(f"n{index}", draw(st.integers(0, 4)), draw(kinds), slots=draw(st.integers(1, 4)), state=draw(states))
        for index in range(draw(st.integers(1, 3)))
    ]
    queues = [
        JobQueue(
            name=name, weight=draw(st.sampled_from([1.0, 3.0])), quota_gpus=draw(st.sampled_from([None, None, 2, 4]))
        )
        for name in ("default", "night")
    ]
    view = cluster(*nodes, queues=queues)

    def job(name: str) -> Job:
        return queued(
            name,
            draw(st.integers(0, 3)),
            at=NOW - draw(st.integers(0, 4000)),
            queue=draw(st.sampled_from(["default", "night"])),
            priority=draw(st.integers(3, 7)),
            preemptible=draw(st.booleans()),
            max_runtime_s=draw(st.sampled_from([None, 10 * MIN, 60 * MIN, 600 * MIN])),
            max_retries=1,
            needs={
                "node_count": draw(st.sampled_from([1, 1, 1, 2])),
                "gpu_type": draw(st.sampled_from([None, "H100"])),
            },
        )

    for index in range(draw(st.integers(0, 5))):
        holder = job(f"r{index}")
        held = sum(
            len(share.gpus)
            for other in view.holding.values()
            if other.queue == holder.queue
            for share in other.live.shares
        )
        quota = view.queues[holder.queue].quota_gpus
        fits = fit(holder.needs, list(view.nodes.values()), view.occupancy.left) is not None
        wanted = (holder.needs.gpus_per_node or 0) * holder.needs.node_count
        if fits and (quota is None or held + wanted <= quota):
            view = running(view, holder, since=NOW - draw(st.integers(0, 500)))
    return view.with_jobs([job(f"q{index}") for index in range(draw(st.integers(1, 5)))])


@settings(max_examples=75, suppress_health_check=[HealthCheck.too_slow])
@given(situations())
def test_whoever_does_what_the_explanation_says_sees_the_job_start(view: ClusterView) -> None:
    for job in view.queued():
        explanation = asked(view, job)
        assert explanation.message
        assert explanation.would_start_if
        match explanation.code:
            case PendingCode.STARTING:
                assert starts(view, job)
            case PendingCode.IMPOSSIBLE:
                assert fit(job.needs, list(view.nodes.values()), cluster(*view.nodes.values()).occupancy.left) is None
            case PendingCode.UNAVAILABLE:
                ready = view.with_nodes(replace(each, state=NodeState.READY) for each in view.nodes.values())
                assert asked(ready, job).code not in (PendingCode.UNAVAILABLE, PendingCode.IMPOSSIBLE)
            case PendingCode.QUOTA if not explanation.blockers:
                unlimited = view.with_queues(replace(queue, quota_gpus=None) for queue in view.queues.values())
                assert asked(unlimited, job).code is not PendingCode.QUOTA
            case _:
                assert not starts(view, job)
                assert explanation.blockers
                assert starts(without(view, explanation), job), explanation
        if explanation.runtime_s is not None:
            shorter = job.evolve(max_runtime_s=float(explanation.runtime_s))
            assert starts(view.with_jobs([shorter]), shorter)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(situations())
def test_brief_explanation_has_the_same_kind_of_reason(view: ClusterView) -> None:
    fits = {PendingCode.BEHIND, PendingCode.FAIR_SHARE}
    for job in view.queued():
        brief = explain(Situation(view, NOW), job, thorough=False)
        assert brief is not None
        whole = asked(view, job)
        assert brief.code is whole.code or {brief.code, whole.code} <= fits
        assert not brief.blockers or brief.code is PendingCode.PREEMPTING
