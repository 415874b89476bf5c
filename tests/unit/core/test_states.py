"""The table of transitions, against the lifecycle as it is written down."""

from __future__ import annotations

import pytest

from trainmaster.protocol.reasons import REASON_OF_STOP, Reason, StopCause
from trainmaster.server.core.states import (
    ACTIVE,
    CONSEQUENCES,
    TERMINAL,
    TRANSITIONS,
    Action,
    AttemptOutcome,
    JobStatus,
    Trigger,
    allowed_from,
)

LIVE = {"PREPARING", "TRAINING", "CHECKPOINTING", "EVALUATING", "EXPORTING"}
WRITTEN = {
    (None, "PENDING"),
    ("PENDING", "QUEUED"),
    ("PENDING", "FAILED"),
    ("QUEUED", "SCHEDULING"),
    ("SCHEDULING", "QUEUED"),
    ("SCHEDULING", "PREPARING"),
    ("SCHEDULING", "FAILED"),
    ("PREPARING", "TRAINING"),
    ("PREPARING", "EVALUATING"),
    ("TRAINING", "CHECKPOINTING"),
    ("CHECKPOINTING", "TRAINING"),
    ("TRAINING", "EVALUATING"),
    ("EVALUATING", "TRAINING"),
    ("CHECKPOINTING", "EVALUATING"),
    *((phase, "EXPORTING") for phase in ("TRAINING", "CHECKPOINTING", "EVALUATING")),
    *((phase, "COMPLETED") for phase in LIVE),
    ("TRAINING", "PAUSED"),
    ("CHECKPOINTING", "PAUSED"),
    ("PAUSED", "QUEUED"),
    *((status, "CANCELLED") for status in {"PENDING", "QUEUED", "SCHEDULING", "PAUSED"} | LIVE),
    *((phase, "QUEUED") for phase in LIVE),
    *((phase, "FAILED") for phase in LIVE),
    *((phase, "PREEMPTED") for phase in LIVE),
    ("PAUSED", "FAILED"),
    *((end, "QUEUED") for end in ("FAILED", "CANCELLED", "COMPLETED", "PREEMPTED")),
}

MATRIX = {
    Action.CANCEL: {"PENDING", "QUEUED", "SCHEDULING", "PAUSED"} | LIVE,
    Action.PAUSE: {"TRAINING", "CHECKPOINTING", "EVALUATING"},
    Action.RESUME: {"PAUSED"},
    Action.RETRY: {"FAILED", "PREEMPTED", "CANCELLED"},
}


def test_transitions_are_those_of_the_lifecycle_and_no_others() -> None:
    assert {(source, edge.to) for (source, _), edge in TRANSITIONS.items()} == WRITTEN


def test_terminal_states_are_left_by_services_alone() -> None:
    leaving = [edge for (source, _), edge in TRANSITIONS.items() if source in TERMINAL]
    assert leaving
    assert all(edge.service_only for edge in leaving)


@pytest.mark.parametrize("action", MATRIX)
@pytest.mark.parametrize("status", JobStatus)
def test_action_is_allowed_exactly_where_the_matrix_says(action: Action, status: JobStatus) -> None:
    assert (status in allowed_from(action)) == (status in MATRIX[action])


def test_service_may_be_resumed_after_its_end() -> None:
    assert allowed_from(Action.RESUME, service=True) == TERMINAL | {JobStatus.PAUSED}


def test_every_active_state_can_be_cancelled_and_every_trigger_leads_somewhere() -> None:
    assert allowed_from(Action.CANCEL) >= ACTIVE
    assert {trigger for _, trigger in TRANSITIONS} == set(Trigger)


def test_every_reason_has_its_consequence_and_every_stop_its_reason() -> None:
    assert set(CONSEQUENCES) == set(Reason)
    assert set(REASON_OF_STOP) == set(StopCause)


def test_failures_that_another_try_may_mend_are_the_transient_ones() -> None:
    transient = {reason for reason, row in CONSEQUENCES.items() if row.outcome is AttemptOutcome.TRANSIENT}
    assert transient == {
        Reason.RETRYABLE_EXIT,
        Reason.KILLED_BY_SIGNAL,
        Reason.OUT_OF_MEMORY,
        Reason.WORKER_LOST,
        Reason.NODE_LOST,
        Reason.STALLED,
        Reason.DISK_FULL,
        Reason.STORAGE_UNAVAILABLE,
        Reason.ENGINE_UNAVAILABLE,
        Reason.EVICTED,
        Reason.ENGINE_CANCELLED,
    }


def test_every_failure_says_what_to_do() -> None:
    for reason, row in CONSEQUENCES.items():
        if row.outcome in (AttemptOutcome.TRANSIENT, AttemptOutcome.PERMANENT):
            assert row.advice, reason


def test_services_are_resumed_and_never_told_to_be_retried() -> None:
    for reason, row in CONSEQUENCES.items():
        advice = row.advice_for(service=True)
        assert "retry" not in advice, reason
        assert advice or not row.advice, reason
    assert "resume" in CONSEQUENCES[Reason.PREEMPTED].advice_for(service=True)
    assert "retry" in CONSEQUENCES[Reason.PREEMPTED].advice_for(service=False)
