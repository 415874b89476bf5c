"""The view is the same however it came about, and every change of it finds what is free and who waits."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from small_cluster import NOW, carried_out, ended, node, stopped, view_of, waiting

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import JobQueue, Node, NodeState, whole
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.schedule import schedule
from trainmaster.server.scheduling.view import ClusterView, key_of

NODES = [node("a", 4, slots=4), node("b", 2, kind="A100", slots=3), node("c", 0, cpu_cores=4)]


def test_jobs_of_many_lots_are_in_one_order() -> None:
    jobs = [waiting(f"j{index:03}", index % 3, at=NOW - (index * 37) % 101, priority=index % 4) for index in range(200)]
    assert [job.job_id for job in view_of([], *jobs).queued()] == [job.job_id for job in sorted(jobs, key=key_of)]


def test_many_changes_at_once_are_as_many_one_by_one() -> None:
    jobs = [waiting(f"j{index:03}", 1, at=NOW + index % 7) for index in range(150)]
    at_once = (
        view_of(NODES, *jobs)
        .with_jobs(job.evolve(priority=6) for job in jobs[:100])
        .with_jobs(ended(job) for job in jobs[120:])
    )
    singly = view_of(NODES)
    for job in [*(job.evolve(priority=6) for job in jobs[:100]), *jobs[100:120]]:
        singly = singly.with_jobs([job])
    assert at_once == singly


def test_job_that_changes_twice_in_one_go_is_as_it_was_last() -> None:
    job = waiting("j", 1)
    assert view_of(NODES).with_jobs([job, ended(job)]) == view_of(NODES)


def test_what_runs_on_a_node_that_came_back_is_not_free_again() -> None:
    view = view_of(NODES, waiting("j", 4))
    view = carried_out(view, schedule(view, now=NOW), now=NOW)
    gone = view.with_nodes(NODES[1:])
    assert "a" not in gone.occupancy.left
    assert gone.with_nodes(NODES).occupancy.left["a"].gpus == frozenset()
    assert gone.with_nodes(NODES) == view


class Changes(RuleBasedStateMachine):
    """A view that is changed step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = NODES
        self.queues: list[JobQueue] = []
        self.view = ClusterView().with_nodes(self.nodes)
        self.count = 0

    def commit(self, jobs: Iterable[Job]) -> None:
        self.view = self.view.with_jobs(jobs)

    @rule(
        gpus=st.integers(0, 2),
        count=st.integers(1, 2),
        queue=st.sampled_from("pq"),
        priority=st.integers(0, 10),
        preemptible=st.booleans(),
        service=st.booleans(),
        runtime=st.sampled_from([None, 60.0]),
    )
    def submit(self, runtime: float | None, **more: object) -> None:
        self.count += 1
        job = waiting(f"j{self.count}", at=NOW + self.count, runtime=runtime, **more)  # type: ignore[arg-type]
        self.commit([job])

    @rule()
    def schedule(self) -> None:
        self.view = carried_out(self.view, schedule(self.view, now=NOW), now=NOW)

    @rule(pick=st.integers(0, 20), what=st.sampled_from(["end", "stop", "requeue", "move", "rush", "start", "park"]))
    def change(self, pick: int, what: str) -> None:
        ids = sorted(self.view.jobs)
        if not ids:
            return
        job = self.view.jobs[ids[pick % len(ids)]]
        match what:
            case "end":
                job = ended(job)
            case "stop" if job.attempt is not None:
                job = stopped(job)
            case "requeue":
                job = job.evolve(status=JobStatus.QUEUED, attempt=None, queued_at=NOW + 500)
            case "move":
                job = job.evolve(queue="q" if job.queue == "p" else "p")
            case "rush":
                job = job.evolve(priority=(job.priority + 3) % 11)
            case "start" if job.attempt is not None:
                job = job.evolve(attempt=job.attempt.evolve(started_at=NOW + 7))
            case "park":
                job = job.evolve(status=JobStatus.PAUSED, attempt=None)
        self.commit([job])

    @rule(pick=st.integers(0, 2), state=st.sampled_from(NodeState))
    def drain(self, pick: int, state: NodeState) -> None:
        changed = [*NODES]
        changed[pick] = node(NODES[pick].node_id, 1, state=state, slots=5)
        self.nodes = changed
        self.view = self.view.with_nodes(changed)

    @rule(quota=st.none() | st.integers(0, 3))
    def give_quota(self, quota: int | None) -> None:
        self.queues = [JobQueue(name="p", quota_gpus=quota)]
        self.view = self.view.with_queues(self.queues)

    @invariant()
    def view_is_as_if_made_anew(self) -> None:
        jobs = [*self.view.jobs.values()]
        anew = ClusterView().with_jobs(reversed(jobs)).with_nodes(reversed(self.nodes)).with_queues(self.queues)
        assert self.view == anew

    @invariant()
    def free_is_what_nobody_holds(self) -> None:
        for name, machine in self.view.nodes.items():
            left = whole(machine)
            for job in self.view.holding.values():
                for share in job.live.shares:
                    left = left.without(share) if share.node_id == name else left
            assert self.view.occupancy.left[name] == left


Changes.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestChanges = Changes.TestCase
