"""How attempts end: when, for which reason, and where that leaves their jobs."""

from __future__ import annotations

from typing import Any

import pytest
from job_factory import NOW, new_job, observation, placed, seen, settled, training

from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.server.core import commands, observations
from trainmaster.server.core.endings import unclaimed_launches
from trainmaster.server.core.job import Change, Job
from trainmaster.server.core.reports import Liveness, NodeObservation
from trainmaster.server.core.resources import Share
from trainmaster.server.core.states import JobStatus

PEER = {"reason": Reason.WORKER_LOST, "stop_cause": "peer", "message": "peer"}
SUCCEEDED = {"reason": Reason.SUCCEEDED, "message": "done"}
NEVER_STARTED = {"reason": Reason.NEVER_STARTED, "message": "withdrawn before it began"}
FAILED = {"reason": Reason.EXITED_NONZERO, "message": "exited with 3", "exit_code": 3}


def record(kind: str, at: float, **more: Any) -> dict[str, Any]:
    return {"type": kind, "t": at, **more}


def observed(job: Job, *nodes: NodeObservation, now: float = NOW) -> Change:
    change = observations.observe(job, observation(job, *nodes), now=now)
    assert change is not None
    return change


def ends(job: Job, *exits: dict[str, Any] | None, now: float = NOW) -> Change:
    """Nodes that end so; None: withdrawn before anybody claimed it."""
    nodes = [
        NodeObservation(liveness=Liveness.REVOKED)
        if ended is None
        else NodeObservation(liveness=Liveness.GONE, exit=ended)
        for ended in exits
    ]
    return observed(job, *nodes, now=now)


# -- when --


def ran(job: Job, *, noticed_at: float, **ended: Any) -> Change:
    """A job of two GPUs that ran from 5 s to 7 s after its placement, by its worker's clock."""
    job = job.evolve(attempt=job.live.evolve(shares=(Share(node_id="n", gpus=(0, 1)),)))
    said = [record("claimed", NOW + 4), record("started", NOW + 5)]
    document = {"reason": Reason.SUCCEEDED, "message": "done", "started_at": NOW + 5, "ended_at": NOW + 7, **ended}
    return observed(job, NodeObservation(liveness=Liveness.GONE, records=said, exit=document), now=noticed_at)


def test_attempt_noticed_late_has_the_times_of_its_worker() -> None:
    change = ran(placed(new_job()), noticed_at=NOW + 60)
    assert change.ended is not None
    assert (change.ended.started_at, change.ended.ended_at) == (NOW + 5, NOW + 7)
    job = change.job
    assert (job.started_at, job.runtime_s, job.gpu_s, job.finished_at) == (NOW + 5, 2.0, 4.0, NOW + 60)


def test_attempt_whose_clock_is_wrong_stays_within_its_life() -> None:
    job = placed(new_job())
    said = [record("claimed", 0.0), record("started", 1e300)]
    document = {**SUCCEEDED, "ended_at": -1e300}
    change = observed(job, NodeObservation(liveness=Liveness.GONE, records=said, exit=document), now=NOW + 9)
    assert change.ended is not None
    assert (change.ended.started_at, change.ended.ended_at) == (NOW + 9, NOW + 9)
    assert (change.job.started_at, change.job.runtime_s) == (NOW + 9, 0.0)


def test_attempt_without_a_word_of_its_start_takes_it_from_its_exit() -> None:
    change = ends(placed(new_job()), {**SUCCEEDED, "started_at": NOW + 1, "ended_at": NOW + 4}, now=NOW + 9)
    assert change.ended is not None
    assert change.ended.started_at == NOW + 1
    assert change.job.runtime_s == 3.0


def test_gang_has_ended_when_its_last_node_has() -> None:
    job = training(new_job(node_count=2))
    change = ends(job, {**SUCCEEDED, "ended_at": NOW + 5}, {**SUCCEEDED, "ended_at": NOW + 3}, now=NOW + 60)
    assert change.ended is not None
    assert change.ended.ended_at == NOW + 5


def test_lost_worker_ended_when_that_was_noticed() -> None:
    change = observed(training(new_job()), seen(liveness=Liveness.GONE), now=NOW + 60)
    assert change.ended is not None
    assert change.ended.ended_at == NOW + 60


def test_first_phase_says_when_the_job_started() -> None:
    job = placed(new_job())
    said = [
        record("claimed", NOW + 1),
        record("started", NOW + 2, reports_phases=True),
        record("phase", NOW + 8, phase="training"),
    ]
    job = observed(job, NodeObservation(liveness=Liveness.ALIVE, records=said), now=NOW + 60).job
    assert (job.started_at, job.live.started_at, job.status_at) == (NOW + 8, NOW + 2, NOW + 60)


def test_checkpoint_is_as_old_as_its_rank_says_within_reason() -> None:
    job = training(new_job())
    saved = {"root": "artifacts", "path": "p"}
    said = [record("checkpoint", at, checkpoint_id=str(at), **saved) for at in (NOW + 3, 1e300, float("nan"), 10**400)]
    change = observed(job, NodeObservation(liveness=Liveness.ALIVE, records=said), now=NOW + 9)
    assert [checkpoint.created_at for checkpoint in change.checkpoints] == [NOW + 3, NOW + 9, NOW + 9, NOW + 9]


# -- why --


@pytest.mark.parametrize("other", [PEER, SUCCEEDED])
def test_gang_of_which_a_node_was_never_started_is_placed_again_uncharged(other: dict[str, Any]) -> None:
    job = ends(placed(new_job(node_count=2, max_retries=1)), other, None).job
    assert (job.status, job.reason, job.retries_used) == (JobStatus.QUEUED, Reason.NEVER_STARTED, 0)
    assert job.not_before > NOW


@pytest.mark.parametrize("other", [PEER, SUCCEEDED])
@pytest.mark.parametrize("service", [False, True])
def test_gang_that_had_launched_without_a_node_is_queued_again_uncharged(other: dict[str, Any], service: bool) -> None:
    job = ends(training(new_job(node_count=2, service=service)), other, NEVER_STARTED).job
    assert (job.status, job.reason, job.retries_used) == (JobStatus.QUEUED, Reason.NEVER_STARTED, 0)


def test_gang_of_which_a_node_was_never_started_has_the_others_stopped() -> None:
    job = placed(new_job(node_count=2))
    job = observed(job, seen("claimed", "started"), seen(liveness=Liveness.REVOKED)).job
    assert (job.status, job.live.stop) == (JobStatus.SCHEDULING, StopCause.PEER)
    job = ends(job, PEER, None).job
    assert (job.status, job.reason) == (JobStatus.QUEUED, Reason.NEVER_STARTED)


def test_gang_that_failed_for_itself_is_not_placed_again_for_a_node_that_never_started() -> None:
    job = ends(placed(new_job(node_count=3)), PEER, None, FAILED).job
    assert (job.status, job.reason, job.message) == (JobStatus.FAILED, Reason.EXITED_NONZERO, "exited with 3")


def test_launches_that_nobody_claimed_are_counted_in_a_row_from_the_attempts() -> None:
    job = placed(new_job(node_count=2)).evolve(queued_at=NOW)
    never = {"reason": Reason.NEVER_STARTED}
    refused, withdrawn, ran = (
        {"reason": Reason.ENGINE_UNAVAILABLE},
        {"reason": Reason.NEVER_STARTED, "stop": StopCause.PREEMPT},
        {"reason": Reason.EXITED_NONZERO, "claimed": frozenset({0, 1})},
    )
    half = {"reason": Reason.NEVER_STARTED, "stop": StopCause.PEER, "claimed": frozenset({0})}

    def count(*earlier: dict[str, Any]) -> int:
        attempts = [job.live.evolve(number=number, **fields) for number, fields in enumerate(earlier)]
        live = job.live.evolve(number=len(attempts))
        return unclaimed_launches(job.evolve(attempt=live), [*attempts, live])

    assert count() == 1
    assert count(never, half) == 3
    assert count(never, ran, never) == 2
    assert count(never, refused, withdrawn, never) == 3
    assert count({**never, "created_at": NOW - 1}, never) == 2  # it was resumed in between
    assert unclaimed_launches(job.evolve(attempt=job.live.evolve(stop=StopCause.PREEMPT)), []) == 0


def test_paused_gang_that_lost_a_start_is_paused() -> None:
    job = settled(commands.pause(training(new_job(node_count=2)), now=NOW, save=False))
    assert ends(job, PEER, NEVER_STARTED).job.status is JobStatus.PAUSED


@pytest.mark.parametrize(("command", "reason"), [("cancel", Reason.CANCELLED), ("delete", Reason.DELETED)])
def test_job_that_is_unwanted_before_it_began_says_so(command: str, reason: Reason) -> None:
    job = settled(getattr(commands, command)(placed(new_job()), now=NOW))
    change = ends(job, None)
    assert (change.job.status, change.job.reason) == (JobStatus.CANCELLED, reason)
    assert change.ended is not None
    assert change.ended.reason is reason
    assert [event.to_status for event in change.events if event.to_status] == [JobStatus.CANCELLED]


# -- whatever it says --


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"reason": ["SUCCEEDED"]},
        {"reason": 3, "message": {"a": 1}, "ended_at": [], "evidence": 7, "exit_code": [1]},
        {"reason": None, "ended_at": float("nan"), "stop_cause": []},
    ],
)
def test_exit_that_makes_no_sense_is_a_lost_worker(document: dict[str, Any]) -> None:
    change = ends(training(new_job()), document, now=NOW + 3)
    assert (change.job.status, change.job.reason) == (JobStatus.FAILED, Reason.WORKER_LOST)
    assert change.ended is not None
    assert change.ended.ended_at == NOW + 3


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (Reason.STORAGE_UNAVAILABLE, JobStatus.QUEUED),
        (Reason.BAD_INPUT, JobStatus.FAILED),
        (Reason.CREDENTIALS_REFUSED, JobStatus.FAILED),
    ],
)
def test_preparing_step_that_fails_is_tried_again_where_that_may_help(reason: Reason, status: JobStatus) -> None:
    job = placed(new_job(max_retries=1))
    ended = {"reason": reason, "message": "why", "step": "prepare", "started_at": None, "ended_at": NOW}
    job = ends(job, ended).job
    assert (job.status, job.reason, job.retries_used) == (status, reason, int(status is JobStatus.QUEUED))
    if status is JobStatus.FAILED:
        assert job.message == "why"
