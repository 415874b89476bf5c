"""Random commands and observations against the invariants of the lifecycle."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from job_factory import NOW, new_job

from trainmaster.protocol.reasons import Phase, Reason
from trainmaster.server.core import commands, endings, observations
from trainmaster.server.core.errors import ConflictError
from trainmaster.server.core.job import Change, Job, JobProgress
from trainmaster.server.core.reports import AttemptObservation, Liveness, NodeObservation
from trainmaster.server.core.resources import Share
from trainmaster.server.core.states import ACTIVE, TERMINAL, TRANSITIONS, Action, Desired, JobStatus, allowed_from

RECORDS = st.one_of(
    st.sampled_from(["claimed", "started", "ready", "grace_missed", "stacks", "strays_killed", "from_the_future"]).map(
        lambda kind: {"type": kind}
    ),
    st.sampled_from(list(Phase)).map(lambda phase: {"type": "phase", "phase": phase.value}),
    st.just({"type": "capable", "save": True}),
    st.integers(0, 50).map(
        lambda step: {
            "type": "checkpoint",
            "checkpoint_id": f"c{step}",
            "step": step,
            "root": "artifacts",
            "path": f"job-1/checkpoints/c{step}",
            "metrics": {"loss": float(step)},
        }
    ),
)
NODES = st.builds(
    lambda liveness, records, ended: NodeObservation(
        liveness=liveness, records=[{"t": NOW, **record} for record in records], exit=ended
    ),
    st.sampled_from(list(Liveness)),
    st.lists(RECORDS, max_size=4),
    st.one_of(
        st.none(),
        st.builds(
            lambda reason: {"reason": reason.value, "ended_at": NOW, "message": "m"}, st.sampled_from(list(Reason))
        ),
    ),
)


class Lifecycle(RuleBasedStateMachine):
    """One job's life, driven at random."""

    @initialize(
        service=st.booleans(), node_count=st.integers(1, 3), max_retries=st.integers(0, 2), preemptible=st.booleans()
    )
    def submit(self, service: bool, node_count: int, max_retries: int, preemptible: bool) -> None:
        self.now = NOW
        self.job = new_job(
            service=service,
            node_count=node_count,
            scheduling_config={"max_retries": max_retries, "preemptible": preemptible},
        )
        self.ended: list[int] = []
        self.seq = 1
        self.first_started: float | None = None
        self.deleted = False

    # -- what happens --

    @rule(s=st.floats(0, 2000))
    def time_passes(self, s: float) -> None:
        self.now += s

    @precondition(lambda self: self.job.status is JobStatus.PENDING)
    @rule(good=st.booleans())
    def admission(self, good: bool) -> None:
        self.take(
            observations.admit(self.job, now=self.now)
            if good
            else observations.reject(self.job, now=self.now, message="no")
        )

    @precondition(lambda self: self.job.status is JobStatus.QUEUED)
    @rule()
    def placement(self) -> None:
        shares = [Share(node_id=f"n{index}") for index in range(self.job.needs.node_count)]
        self.take(observations.place(self.job, now=self.now, shares=shares, token=str(self.job.attempt_count)))

    @precondition(lambda self: self.job.attempt is not None)
    @rule(data=st.data(), stale=st.booleans())
    def observation(self, data: st.DataObject, stale: bool) -> None:
        nodes = [data.draw(NODES) for _ in self.job.live.shares]
        number = self.job.live.number - stale
        change = observations.observe(self.job, AttemptObservation(attempt=number, nodes=nodes), now=self.now)
        if stale:
            assert change is None
        self.take(change)

    @precondition(lambda self: self.job.attempt is not None)
    @rule(step=st.integers(0, 100))
    def progress(self, step: int) -> None:
        nodes = [NodeObservation(liveness=Liveness.ALIVE) for _ in self.job.live.shares]
        told = JobProgress(step=step, step_at=self.now)
        self.take(
            observations.observe(
                self.job, AttemptObservation(attempt=self.job.live.number, nodes=nodes, progress=told), now=self.now
            )
        )

    @precondition(lambda self: self.job.status is JobStatus.SCHEDULING)
    @rule(reason=st.sampled_from([Reason.LAUNCH_REFUSED, Reason.ENGINE_UNAVAILABLE, Reason.STORAGE_UNAVAILABLE]))
    def launch_fails(self, reason: Reason) -> None:
        self.take(
            endings.refuse_launch(self.job, now=self.now, attempt=self.job.live.number, message="no", reason=reason)
        )

    @rule()
    def timers(self) -> None:
        self.take(endings.due(self.job, now=self.now))

    @precondition(lambda self: self.job.attempt is not None and self.job.status is not JobStatus.SCHEDULING)
    @rule()
    def preemption(self) -> None:
        self.take(commands.preempt(self.job, now=self.now, message="makes room for another"))

    @rule(action=st.sampled_from(list(Action)), flag=st.booleans())
    def command(self, action: Action, flag: bool) -> None:
        if self.deleted or action is Action.RETRY:
            return
        allowed = self.job.status in allowed_from(action, service=self.job.is_service)
        try:
            change = self.ask(action, flag)
        except ConflictError:
            # Legal in this state, and still refused: only a pause that cannot save or comes second.
            assert not allowed or action is Action.PAUSE
            return
        assert allowed
        self.take(change)

    def ask(self, action: Action, flag: bool) -> Change | None:
        match action:
            case Action.CANCEL:
                return commands.cancel(self.job, now=self.now)
            case Action.PAUSE:
                return commands.pause(self.job, now=self.now, save=flag)
            case Action.RESUME:
                return commands.resume(self.job, now=self.now)
            case Action.EDIT:
                return commands.edit(self.job, now=self.now, priority=9 if flag else 1)
            case _:
                return commands.delete(self.job, now=self.now, purge=flag)

    # -- what must hold of every change --

    def take(self, change: Change | None) -> None:
        if change is None:
            return
        before, after = self.job, change.job
        assert after.version == before.version + 1
        self.follow_the_edges(before, change)
        for event in change.events:
            self.seq += 1
            assert event.seq == self.seq
        assert after.event_count == self.seq
        if change.ended is not None:
            assert before.attempt is not None or any(e.to_status is JobStatus.SCHEDULING for e in change.events)
            assert change.ended.number not in self.ended, "released twice"
            self.ended.append(change.ended.number)
        self.job = after
        self.deleted = self.deleted or after.deleted_at is not None

    def follow_the_edges(self, before: Job, change: Change) -> None:
        status = before.status
        for event in change.events:
            if event.type != "status":
                continue
            assert event.from_status is status
            edges: list[Any] = [
                edge
                for (source, _), edge in TRANSITIONS.items()
                if source is status and edge.to is event.to_status and (before.is_service or not edge.service_only)
            ]
            assert edges, f"{status} -> {event.to_status} is not in the table"
            if status in TERMINAL:
                assert before.is_service
            assert event.to_status is not None
            status = event.to_status
        assert status is change.job.status

    # -- what must hold always --

    @invariant()
    def resources_are_held_exactly_while_active(self) -> None:
        assert (self.job.attempt is not None) == (self.job.status in ACTIVE)

    @invariant()
    def every_attempt_but_the_current_one_has_ended_once(self) -> None:
        current = {self.job.attempt.number} if self.job.attempt else set()
        assert sorted(self.ended + list(current)) == list(range(1, self.job.attempt_count + 1))

    @invariant()
    def an_end_has_a_time_and_only_an_end(self) -> None:
        assert (self.job.finished_at is not None) == (self.job.status in TERMINAL)

    @invariant()
    def the_first_start_is_kept(self) -> None:
        if self.first_started is None:
            self.first_started = self.job.started_at
        assert self.job.started_at == self.first_started

    @invariant()
    def a_paused_job_was_asked_to_pause(self) -> None:
        if self.job.status is JobStatus.PAUSED:
            assert self.job.paused_at is not None

    @invariant()
    def a_deleted_job_is_over(self) -> None:
        if self.job.deleted_at is not None:
            assert self.job.status in TERMINAL
            assert self.job.desired is Desired.DELETE

    @invariant()
    def budgets_are_kept(self) -> None:
        assert self.job.retries_used <= self.job.max_retries


Lifecycle.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestLifecycle = Lifecycle.TestCase
