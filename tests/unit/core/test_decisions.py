"""What commands and observations make of a job, case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from job_factory import NOW, new_job, observation, placed, seen, settled, training

from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.server.core import commands, endings, observations
from trainmaster.server.core.errors import ConflictError, InvalidTransitionError
from trainmaster.server.core.job import Change, Job, JobProgress
from trainmaster.server.core.reports import AttemptObservation, Liveness, NodeObservation
from trainmaster.server.core.states import Desired, JobStatus


def checkpoint(step: int, **metrics: float) -> dict[str, Any]:
    return {
        "type": "checkpoint",
        "t": NOW,
        "checkpoint_id": f"c{step}",
        "step": step,
        "root": "artifacts",
        "path": f"job-1/checkpoints/c{step}",
        "metrics": metrics,
        "duration_s": 20.0,
    }


def told(job: Job, *records: dict[str, Any], now: float = NOW) -> Job:
    return settled(
        observations.observe(job, observation(job, NodeObservation(liveness=Liveness.ALIVE, records=records)), now=now)
    )


def ended(job: Job, reason: Reason, *, now: float = NOW, **more: Any) -> Change:
    document = {"reason": reason, "message": "m", "ended_at": now, **more}
    nodes = [NodeObservation(liveness=Liveness.GONE, exit=document) for _ in job.live.shares]
    change = observations.observe(job, observation(job, *nodes), now=now)
    assert change is not None
    return change


def path_of(change: Change) -> list[str]:
    return [event.to_status for event in change.events if event.to_status]


def test_short_command_takes_all_edges_in_one_change() -> None:
    job = placed(new_job())
    document = {"reason": Reason.SUCCEEDED, "message": "done", "ended_at": NOW}
    change = observations.observe(job, observation(job, seen("claimed", "started", ended=document)), now=NOW + 1)
    assert change is not None
    assert path_of(change) == ["PREPARING", "TRAINING", "COMPLETED"]
    assert change.ended is not None
    assert change.ended.number == 1


def test_gang_trains_only_when_every_node_has_started() -> None:
    job = placed(new_job(node_count=2))
    job = settled(observations.observe(job, observation(job, seen("claimed", "started"), seen()), now=NOW))
    assert job.status is JobStatus.SCHEDULING
    job = settled(observations.observe(job, observation(job, seen(), seen("claimed", "started")), now=NOW))
    assert job.status is JobStatus.TRAINING


def test_gang_with_a_failing_node_is_stopped_and_blames_that_node() -> None:
    job = training(new_job(node_count=2))
    failed = {"reason": Reason.EXITED_NONZERO, "message": "rank 1 exited with 3", "exit_code": 3, "ended_at": NOW}
    job = settled(observations.observe(job, observation(job, seen(), seen(ended=failed)), now=NOW))
    assert job.status is JobStatus.TRAINING
    assert job.live.stop is StopCause.PEER
    stopped = {"reason": Reason.WORKER_LOST, "stop_cause": "peer", "message": "peer", "ended_at": NOW + 1}
    change = observations.observe(job, observation(job, seen(ended=stopped), seen()), now=NOW + 1)
    job = settled(change)
    assert (job.status, job.reason, job.message) == (JobStatus.FAILED, Reason.EXITED_NONZERO, "rank 1 exited with 3")


def test_service_trains_when_it_is_ready() -> None:
    job = placed(new_job(service=True))
    job = settled(observations.observe(job, observation(job, seen("claimed", "started")), now=NOW))
    assert job.status is JobStatus.PREPARING
    job = settled(observations.observe(job, observation(job, seen("ready")), now=NOW))
    assert job.status is JobStatus.TRAINING


def test_service_that_the_gateway_cannot_reach_yet_does_not_train() -> None:
    job = placed(new_job(service=True))
    ready = replace(seen("claimed", "started", "ready"), endpoint=None)
    job = settled(observations.observe(job, observation(job, ready), now=NOW))
    assert job.status is JobStatus.PREPARING
    job = settled(observations.observe(job, observation(job, replace(seen(), endpoint="10.0.0.1:80")), now=NOW))
    assert (job.status, job.endpoint) == (JobStatus.TRAINING, "10.0.0.1:80")


@pytest.mark.parametrize(
    ("reason", "max_retries", "status"),
    [
        (Reason.WORKER_LOST, 0, JobStatus.FAILED),
        (Reason.WORKER_LOST, 1, JobStatus.QUEUED),
        (Reason.OUT_OF_MEMORY, 1, JobStatus.QUEUED),
        (Reason.EXITED_NONZERO, 1, JobStatus.FAILED),
        (Reason.TIMEOUT, 1, JobStatus.FAILED),
        (Reason.PREEMPTED, 0, JobStatus.PREEMPTED),
        (Reason.PREEMPTED, 1, JobStatus.QUEUED),
        (Reason.SUCCEEDED, 0, JobStatus.COMPLETED),
    ],
)
def test_end_of_an_attempt_leads_where_reason_and_budget_say(reason: Reason, max_retries: int, status: str) -> None:
    job = training(new_job(max_retries=max_retries))
    assert ended(job, reason).job.status == status


def test_retries_back_off_and_run_out() -> None:
    job = new_job(max_retries=2)
    waits = []
    for _ in range(2):
        job = ended(training(job), Reason.WORKER_LOST).job
        waits.append(job.not_before - NOW)
    assert waits == [5.0, 10.0]
    assert ended(training(job), Reason.WORKER_LOST).job.status is JobStatus.FAILED


def test_preemption_is_not_charged_to_the_retries() -> None:
    job = training(new_job(max_retries=1))
    job = settled(commands.preempt(job, now=NOW, message="makes room for job-2"))
    assert job.live.stop is StopCause.PREEMPT
    job = ended(job, Reason.PREEMPTED).job
    assert (job.retries_used, job.preemptions_used) == (0, 1)


def test_next_attempt_resumes_from_the_latest_checkpoint_and_says_so() -> None:
    job = told(training(new_job(max_retries=1)), checkpoint(10), checkpoint(20))
    job = ended(job, Reason.WORKER_LOST).job
    job = settled(observations.place(job, now=NOW + 10, shares=[], token="t2"))
    assert job.live.resume_checkpoint_id == "c20"
    change = observations.observe(
        job.evolve(attempt=job.live.evolve(shares=training(new_job()).live.shares)),
        AttemptObservation(attempt=2, nodes=[seen("claimed")]),
        now=NOW + 11,
    )
    assert change is not None
    assert "c20" in " ".join(event.message for event in change.events)


def test_best_checkpoint_follows_the_metric() -> None:
    output = {"checkpoint": {"metric_for_best_model": "loss"}}
    job = told(
        training(new_job(output_config=output)), checkpoint(1, loss=3), checkpoint(2, loss=1), checkpoint(3, loss=2)
    )
    assert (job.best_checkpoint_id, job.latest_checkpoint_id) == ("c2", "c3")


def test_best_checkpoint_is_the_jobs_own_word_where_no_metric_was_named() -> None:
    said = [checkpoint(1), {**checkpoint(2, loss=9), "is_best": True}, checkpoint(3)]
    assert told(training(new_job()), *said).best_checkpoint_id == "c2"
    once_more = {**checkpoint(3), "is_best": True}  # it was evaluated after it was registered
    assert told(training(new_job()), *said, once_more).best_checkpoint_id == "c3"
    output = {"checkpoint": {"metric_for_best_model": "loss"}}
    job = told(training(new_job(output_config=output)), checkpoint(1, loss=3), *said[1:])
    assert job.best_checkpoint_id == "c1"


def test_pause_waits_for_the_attempt_to_stop_and_resume_queues_it() -> None:
    job = told(training(new_job()), checkpoint(10))
    job = settled(commands.pause(job, now=NOW))
    assert (job.status, job.desired, job.live.stop_save) == (JobStatus.TRAINING, Desired.PAUSE, True)
    job = ended(job, Reason.PAUSED).job
    assert (job.status, job.paused_at, job.attempt) == (JobStatus.PAUSED, NOW, None)
    change = commands.resume(job, now=NOW + 5)
    job = settled(change)
    assert (job.status, job.desired, job.queued_at) == (JobStatus.QUEUED, Desired.RUN, NOW + 5)
    assert "c10" in str(job.message)


def test_pause_of_a_workload_that_cannot_save_needs_to_be_told_so() -> None:
    job = training(new_job())
    with pytest.raises(ConflictError, match="save_checkpoint=false"):
        commands.pause(job, now=NOW)
    job = settled(commands.pause(job, now=NOW, save=False))
    job = ended(job, Reason.PAUSED).job
    job = settled(commands.resume(job, now=NOW))
    assert "step 0" in str(job.message)


def test_second_pause_is_refused() -> None:
    job = settled(commands.pause(training(new_job()), now=NOW, save=False))
    with pytest.raises(InvalidTransitionError):
        commands.pause(job, now=NOW, save=False)


def test_pause_during_an_evaluation_parks_by_way_of_training() -> None:
    job = told(training(new_job()), {"type": "phase", "phase": "evaluating", "t": NOW})
    job = settled(commands.pause(job, now=NOW, save=False))
    assert path_of(ended(job, Reason.PAUSED)) == ["TRAINING", "PAUSED"]


def test_pause_that_comes_too_late_for_an_export_queues_the_job_again() -> None:
    job = settled(commands.pause(training(new_job()), now=NOW, save=False))
    job = told(job, {"type": "phase", "phase": "exporting", "t": NOW})
    job = ended(job, Reason.PAUSED).job
    assert (job.status, job.desired) == (JobStatus.QUEUED, Desired.RUN)


def test_job_that_completes_while_it_is_being_paused_is_completed() -> None:
    job = settled(commands.pause(training(new_job()), now=NOW, save=False))
    assert ended(job, Reason.SUCCEEDED).job.status is JobStatus.COMPLETED


def test_worker_lost_while_it_is_being_paused_leaves_the_job_paused() -> None:
    job = settled(commands.pause(training(new_job()), now=NOW, save=False))
    assert ended(job, Reason.WORKER_LOST).job.status is JobStatus.PAUSED


def test_cancel_of_a_waiting_job_is_immediate() -> None:
    job = settled(commands.cancel(new_job(), now=NOW, message="not needed"))
    assert (job.status, job.reason, job.message) == (JobStatus.CANCELLED, Reason.CANCELLED, "not needed")


@pytest.mark.parametrize("reason", [Reason.CANCELLED, Reason.WORKER_LOST, Reason.NEVER_STARTED])
def test_reason_of_a_cancel_stays_with_the_job_until_and_after_its_end(reason: Reason) -> None:
    job = settled(commands.cancel(training(new_job()), now=NOW, message="not needed"))
    assert (job.status, job.message) == (JobStatus.TRAINING, "not needed")
    job = ended(job.evolve(message="says something else"), reason).job
    assert (job.status, job.message) == (JobStatus.CANCELLED, "not needed")


def test_cancel_without_a_reason_leaves_what_the_end_says() -> None:
    job = settled(commands.cancel(training(new_job()), now=NOW))
    assert ended(job, Reason.CANCELLED).job.message != "not needed"


def test_cancel_of_a_running_job_overrides_a_pause_and_may_be_repeated() -> None:
    job = settled(commands.pause(training(new_job()), now=NOW, save=False))
    job = settled(commands.cancel(job, now=NOW))
    assert (job.status, job.live.stop) == (JobStatus.TRAINING, StopCause.CANCEL)
    assert commands.cancel(job, now=NOW) is None
    assert ended(job, Reason.WORKER_LOST).job.status is JobStatus.CANCELLED


def test_cancel_of_an_ended_job_is_refused_with_the_states_that_allow_it() -> None:
    job = settled(commands.cancel(new_job(), now=NOW))
    with pytest.raises(InvalidTransitionError) as caught:
        commands.cancel(job, now=NOW)
    assert caught.value.status == "CANCELLED"
    assert "TRAINING" in caught.value.allowed_from


def test_delete_of_a_running_job_stops_it_first() -> None:
    job = settled(commands.delete(training(new_job()), now=NOW, purge=True))
    assert (job.deleted_at, job.live.stop) == (None, StopCause.DELETE)
    job = ended(job, Reason.DELETED).job
    assert (job.status, job.deleted_at, job.purge) == (JobStatus.CANCELLED, NOW, True)


def test_delete_of_a_waiting_job_cancels_and_hides_it() -> None:
    change = commands.delete(new_job(), now=NOW)
    job = settled(change)
    assert (job.status, job.deleted_at) == (JobStatus.CANCELLED, NOW)


def test_delete_of_a_deleted_job_can_still_purge_it() -> None:
    job = settled(commands.delete(new_job(), now=NOW))
    assert commands.delete(job, now=NOW + 1) is None
    purged = settled(commands.delete(job, now=NOW + 1, purge=True))
    assert (purged.deleted_at, purged.status, purged.purge) == (NOW, JobStatus.CANCELLED, True)
    assert commands.delete(purged, now=NOW + 2, purge=True) is None


def test_edit_changes_the_record_and_the_spec_that_is_shown() -> None:
    job = settled(commands.edit(new_job(), now=NOW, priority=9, queue="night", labels={"a": "b"}))
    assert (job.priority, job.queue, job.labels) == (9, "night", {"a": "b"})
    assert job.spec["scheduling_config"]["priority"] == 9
    assert job.spec["labels"] == {"a": "b"}
    assert commands.edit(job, now=NOW, priority=9) is None


def test_service_ends_failed_at_once_and_resumes_under_its_id() -> None:
    job = training(new_job(service=True, max_retries=3))
    job = ended(job, Reason.WORKER_LOST).job
    assert job.status is JobStatus.FAILED
    job = settled(commands.resume(job, now=NOW + 1))
    assert (job.status, job.finished_at, job.endpoint) == (JobStatus.QUEUED, None, None)
    job = training(job, now=NOW + 2)
    assert job.live.number == 2


def test_batch_job_cannot_be_resumed_after_its_end() -> None:
    job = ended(training(new_job()), Reason.EXITED_NONZERO).job
    with pytest.raises(InvalidTransitionError):
        commands.resume(job, now=NOW)


@pytest.mark.parametrize("end", [Reason.INACTIVE, Reason.WORKER_LOST])
def test_unused_service_is_parked_as_unused_however_it_ended(end: Reason) -> None:
    job = training(new_job(service=True))
    assert endings.due(job, now=NOW + 3500) is None
    assert endings.due(job, now=NOW + 3700, last_activity_at=NOW + 3000) is None
    job = settled(endings.due(job, now=NOW + 3700))
    assert job.live.stop is StopCause.INACTIVE
    job = ended(job, end).job
    assert (job.status, job.reason) == (JobStatus.PAUSED, Reason.INACTIVE)


def test_trainer_that_nobody_ever_used_is_parked_sooner() -> None:
    """Its client has probably failed. It is counted from when it answers, as a large model takes long to load."""
    workload = {"kind": "trainer_service", "base_model": "m", "model_path": "/m"}

    def ready(**fields: float) -> Job:
        job = placed(new_job(service=True, workload={**workload, **fields}))
        job = settled(observations.observe(job, observation(job, seen("claimed", "started")), now=NOW))
        assert endings.due(job, now=NOW + 1000) is None
        return settled(observations.observe(job, observation(job, seen("ready")), now=NOW + 1000))

    job = ready()
    assert endings.due(job, now=NOW + 1590) is None
    assert endings.due(job, now=NOW + 1610, last_activity_at=NOW + 1001) is None
    assert settled(endings.due(job, now=NOW + 1610)).live.stop is StopCause.INACTIVE
    assert endings.due(ready(inactivity_timeout_s=3000.0), now=NOW + 1610) is None


def test_pace_is_counted_from_the_first_step_of_each_attempt() -> None:
    def told(job: Job, step: int, at: float) -> Job:
        progress = JobProgress(step=step, total_steps=100, step_at=NOW + at)
        return settled(
            observations.observe(job, AttemptObservation(attempt=1, nodes=[seen()], progress=progress), now=NOW + at)
        )

    job = told(training(new_job()), 40, 10)
    assert job.progress.remaining_s is None
    job = told(told(job, 41, 12), 60, 50)
    assert job.progress.remaining_s == 40 * 2.0
    job = told(job, 20, 60)  # it went back: what it did before says nothing
    assert job.progress.remaining_s is None


def test_stall_is_shown_never_before_the_first_step_and_retried_if_the_budget_allows() -> None:
    job = training(new_job(max_retries=1))
    assert endings.due(job, now=NOW + 10_000) is None
    job = settled(
        observations.observe(
            job,
            AttemptObservation(attempt=1, nodes=[seen()], progress=JobProgress(step=5, step_at=NOW + 1)),
            now=NOW + 1,
        )
    )
    assert endings.due(job, now=NOW + 800) is None
    assert endings.due(job, now=NOW + 800, stalled_after_s=700) is not None
    job = settled(endings.due(job, now=NOW + 1000))
    assert (job.stalled_at, job.live.stack_dump, job.live.stop) == (NOW + 1000, True, None)
    job = settled(endings.due(job, now=NOW + 1020))
    assert job.live.stop is StopCause.STALL
    assert ended(job, Reason.STALLED).job.status is JobStatus.QUEUED


def test_unused_service_is_parked_counting_from_when_it_could_be_used() -> None:
    job = placed(new_job(service=True, workload={"kind": "service", "argv": ["x"], "inactivity_timeout_s": 60.0}))
    job = settled(observations.observe(job, observation(job, seen("claimed", "started")), now=NOW))
    job = settled(observations.observe(job, observation(job, seen("ready")), now=NOW + 600))
    assert endings.due(job, now=NOW + 650) is None
    assert endings.due(job, now=NOW + 700, last_activity_at=NOW + 690) is None
    parked = settled(endings.due(job, now=NOW + 700))
    assert (parked.desired, parked.live.stop) == (Desired.PAUSE, StopCause.INACTIVE)


def test_service_that_says_it_runs_is_neither_running_nor_unused_before_it_answers() -> None:
    workload = {"kind": "service", "argv": ["x"], "inactivity_timeout_s": 60.0}
    job = placed(new_job(service=True, workload=workload))
    job = settled(observations.observe(job, observation(job, seen("claimed", "started")), now=NOW))
    assert observations.observe(job, observation(job, seen("phase", phase="training")), now=NOW + 600) is None
    assert (job.status, endings.due(job, now=NOW + 600)) == (JobStatus.PREPARING, None)
    job = settled(observations.observe(job, observation(job, seen("ready")), now=NOW + 601))
    assert (job.status, endings.due(job, now=NOW + 601)) == (JobStatus.TRAINING, None)


def test_stalled_job_without_a_budget_is_left_running_and_recovers() -> None:
    job = training(new_job())
    told_step = AttemptObservation(attempt=1, nodes=[seen()], progress=JobProgress(step=5, step_at=NOW + 1))
    job = settled(observations.observe(job, told_step, now=NOW + 1))
    job = settled(endings.due(job, now=NOW + 1000))
    assert endings.due(job, now=NOW + 2000) is None
    assert commands.control_for(job) is not None
    job = told(job, {"type": "stacks", "t": NOW, "stacks": {"0": "where it is"}})
    assert commands.control_for(job) is None
    moved = AttemptObservation(attempt=1, nodes=[seen()], progress=JobProgress(step=6, step_at=NOW + 2001))
    job = settled(observations.observe(job, moved, now=NOW + 2001))
    assert job.stalled_at is None


def test_lost_worker_is_told_from_a_rebooted_machine() -> None:
    for liveness, reason in ((Liveness.GONE, Reason.WORKER_LOST), (Liveness.REBOOTED, Reason.NODE_LOST)):
        job = training(new_job())
        job = settled(observations.observe(job, observation(job, seen(liveness=liveness)), now=NOW))
        assert (job.status, job.reason) == (JobStatus.FAILED, reason)


def test_unknown_is_not_gone() -> None:
    job = training(new_job())
    assert observations.observe(job, observation(job, seen(liveness=Liveness.UNKNOWN)), now=NOW) is None


def test_revoked_attempt_goes_back_to_the_queue_without_using_a_retry() -> None:
    job = placed(new_job())
    change = observations.observe(job, observation(job, seen(liveness=Liveness.REVOKED)), now=NOW)
    job = settled(change)
    assert (job.status, job.retries_used) == (JobStatus.QUEUED, 0)


@pytest.mark.parametrize(
    ("reason", "status"), [(Reason.ENGINE_UNAVAILABLE, "QUEUED"), (Reason.LAUNCH_REFUSED, "FAILED")]
)
def test_launch_that_fails_is_tried_again_or_final(reason: Reason, status: str) -> None:
    job = placed(new_job())
    change = endings.refuse_launch(job, now=NOW, attempt=1, message="no", reason=reason)
    assert settled(change).status == status


def test_launches_that_are_refused_in_a_row_are_tried_again_later_and_later_up_to_a_minute() -> None:
    def wait_s(before: int, again_in_s: float | None = None) -> float:
        reason = Reason.ENGINE_UNAVAILABLE
        change = endings.refuse_launch(
            placed(new_job()), now=NOW, attempt=1, message="no", reason=reason, before=before, again_in_s=again_in_s
        )
        return settled(change).not_before - NOW

    assert [wait_s(before) for before in (0, 1, 2, 3, 4, 5, 2000)] == [5, 10, 20, 40, 60, 60, 60]
    assert wait_s(3, again_in_s=7.0) == 7


def test_what_a_launch_waits_for_is_told_until_it_starts_or_is_to_stop() -> None:
    job = settled(endings.record_launch_wait(placed(new_job()), now=NOW, message="pulling it"))
    assert (job.status, job.message) == (JobStatus.SCHEDULING, "pulling it")
    assert endings.record_launch_wait(job, now=NOW, message="pulling it") is None
    stopping_job = settled(commands.cancel(job, now=NOW))
    assert endings.record_launch_wait(stopping_job, now=NOW, message="pulling more of it") is None
    started = settled(observations.observe(job, observation(job, seen("claimed", "started")), now=NOW))
    assert (started.status, started.message) == (JobStatus.TRAINING, None)
    assert endings.record_launch_wait(started, now=NOW, message="pulling more of it") is None


def test_observation_of_an_older_attempt_is_ignored() -> None:
    job = ended(training(new_job(max_retries=1)), Reason.WORKER_LOST).job
    job = training(job)
    stale = AttemptObservation(attempt=1, nodes=[NodeObservation(liveness=Liveness.GONE)])
    assert observations.observe(job, stale, now=NOW) is None


def test_grace_is_longer_for_a_job_that_takes_long_to_save() -> None:
    job = told(training(new_job()), checkpoint(1))
    assert commands.grace_s(job, StopCause.PAUSE) == 60.0
    assert commands.grace_s(job, StopCause.CANCEL) == 10.0


def test_control_says_nothing_until_something_is_wanted() -> None:
    job = training(new_job())
    assert commands.control_for(job) is None
    job = settled(commands.cancel(job, now=NOW))
    control = commands.control_for(job)
    assert control is not None
    assert (control.stop, control.grace_s) == (StopCause.CANCEL, 10.0)


def test_job_says_what_it_prepares_until_it_trains() -> None:
    job = told(placed(new_job()), {"type": "claimed", "t": NOW}, {"type": "doing", "t": NOW, "message": "fetching"})
    assert (job.status, job.message) == (JobStatus.PREPARING, "fetching")
    job = told(job, {"type": "doing", "t": NOW, "message": "asked again"})
    assert job.message == "asked again"
    job = told(job, {"type": "started", "t": NOW}, {"type": "doing", "t": NOW, "message": "too late"})
    assert (job.status, job.message) == (JobStatus.TRAINING, None)


def test_illegal_phase_is_noted_and_changes_nothing() -> None:
    job = told(training(new_job()), {"type": "phase", "phase": "exporting", "t": NOW})
    job = told(job, {"type": "phase", "phase": "training", "t": NOW})
    assert job.status is JobStatus.EXPORTING


@pytest.mark.parametrize(
    "record",
    [
        {"type": "checkpoint", "step": "many"},
        {"type": "checkpoint", "checkpoint_id": "c", "step": 2**70, "root": "r", "path": "p"},
        {"type": "checkpoint", "checkpoint_id": "c", "metrics": 3, "root": "r", "path": "p"},
        {"type": "stacks", "stacks": 7},
        {"type": ["unhashable"]},
    ],
)
def test_report_that_makes_no_sense_is_noted_and_the_rest_is_taken(record: dict[str, Any]) -> None:
    job = told(training(new_job()), record, checkpoint(3))
    assert job.latest_checkpoint_id == "c3"


def test_text_of_a_report_can_be_stored_whatever_it_holds() -> None:
    job = training(new_job())
    seen_note = NodeObservation(
        liveness=Liveness.ALIVE, records=[{"type": "note", "message": "a\ud800b\0" + "x" * 9999}]
    )
    change = observations.observe(job, observation(job, seen_note), now=NOW)
    assert change is not None
    message = change.events[0].message
    assert "\0" not in message
    assert len(message.encode()) <= 4000


def test_unknown_reason_of_a_newer_worker_is_a_lost_worker() -> None:
    job = training(new_job())
    change = observations.observe(job, observation(job, seen(ended={"reason": "FROM_THE_FUTURE"})), now=NOW)
    assert settled(change).reason is Reason.WORKER_LOST


def test_resume_of_a_retry_that_saved_nothing_goes_on_from_what_it_was_given() -> None:
    job = training(new_job().evolve(resume_checkpoint_id="parents"))
    job = settled(commands.pause(job, now=NOW, save=False))
    job = settled(commands.resume(ended(job, Reason.PAUSED).job, now=NOW))
    job = placed(job)
    assert job.live.resume_checkpoint_id == "parents"


def test_phase_that_is_reported_again_changes_nothing() -> None:
    job = told(training(new_job()), {"type": "phase", "phase": "checkpointing", "t": NOW})
    again = observation(
        job, NodeObservation(liveness=Liveness.ALIVE, records=[{"type": "phase", "phase": "checkpointing"}])
    )
    assert observations.observe(job, again, now=NOW) is None


def test_checkpoint_with_odd_details_is_registered_without_them() -> None:
    odd = {"t": float("nan"), "epoch": "x", "metrics": 3, "size_bytes": -1, "duration_s": float("nan")}
    job = training(new_job())
    record = {**checkpoint(3), **odd}
    change = observations.observe(
        job, observation(job, NodeObservation(liveness=Liveness.ALIVE, records=[record])), now=NOW
    )
    job = settled(change)
    assert (job.latest_checkpoint_id, job.last_save_s) == ("c3", 0.0)
    assert change is not None
    (kept,) = change.checkpoints
    assert (kept.step, kept.created_at, kept.epoch, kept.metrics, kept.size_bytes) == (3, NOW, None, {}, 0)


@pytest.mark.parametrize("field", ["checkpoint_id", "path"])
def test_checkpoint_whose_name_cannot_be_kept_is_not_registered(field: str) -> None:
    job = told(training(new_job()), {**checkpoint(3), field: "a\ud800"})
    assert job.latest_checkpoint_id is None


def test_save_that_took_for_ever_lengthens_no_grace() -> None:
    job = told(training(new_job()), {**checkpoint(1), "duration_s": 1e300})
    assert commands.grace_s(job, StopCause.PAUSE) == commands.SAVE_GRACE_S


def test_step_from_the_future_does_not_hide_a_stall() -> None:
    job = training(new_job())
    future = AttemptObservation(attempt=1, nodes=[seen()], progress=JobProgress(step=5, step_at=1e300))
    job = settled(observations.observe(job, future, now=NOW + 1))
    assert settled(endings.due(job, now=NOW + 1000)).stalled_at == NOW + 1000


@pytest.mark.parametrize(
    "record",
    [
        {"type": "grace_missed", "grace_s": "\ud800"},
        {"type": "strays_killed", "count": "\ud800"},
        {"type": "note", "message": {"\ud800": 1}},
        {"type": "stacks", "stacks": {"\ud800": "\0", "1": 3}},
        {"type": "phase", "phase": "\ud800"},
    ],
)
def test_event_of_a_report_holds_only_what_can_be_stored(record: dict[str, Any]) -> None:
    job = training(new_job())
    change = observations.observe(
        job, observation(job, NodeObservation(liveness=Liveness.ALIVE, records=[record])), now=NOW
    )
    for event in change.events if change else ():
        for text in (event.message, *event.data, *event.data.values()):
            assert "\0" not in text
            text.encode()
