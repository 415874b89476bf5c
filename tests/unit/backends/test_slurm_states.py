"""What Slurm's words for jobs mean."""

from __future__ import annotations

import pytest

from trainmaster.backends.cluster.engine import EnginePhase
from trainmaster.backends.slurm.states import NEVER, STATES, exit_of, loss_of, never_starts, state_of, why_it_waits
from trainmaster.protocol.reasons import Reason

BASE_STATES = (
    *("PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"),
    *("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
)
FLAGS = (
    *("COMPLETING", "STAGE_OUT", "CONFIGURING", "EXPEDITING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING"),
)


def test_every_state_that_squeue_prints_is_known() -> None:
    assert set(BASE_STATES + FLAGS) <= set(STATES)


def test_only_ended_states_have_a_reason() -> None:
    for word, state in STATES.items():
        assert (state.reason is not None) == (state.phase is EnginePhase.ENDED), word
        assert state.meaning or state.reason is None, word


def test_unknown_state_is_not_gone() -> None:
    assert state_of("WHATEVER").phase is EnginePhase.RUNNING


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("PREEMPTED", Reason.PREEMPTED),
        ("CANCELLED", Reason.ENGINE_CANCELLED),
        ("REVOKED", Reason.ENGINE_CANCELLED),
        ("TIMEOUT", Reason.TIMEOUT),
        ("DEADLINE", Reason.TIMEOUT),
        ("OUT_OF_MEMORY", Reason.OUT_OF_MEMORY),
        ("NODE_FAIL", Reason.NODE_LOST),
        ("BOOT_FAIL", Reason.NODE_LOST),
        ("COMPLETED", Reason.WORKER_LOST),
        ("FAILED", Reason.WORKER_LOST),
    ],
)
def test_end_has_a_reason_and_names_the_state(state: str, reason: Reason) -> None:
    loss = loss_of(state, "None", "0:0")
    assert loss.reason is reason
    assert f"(Slurm: {state})" in loss.message


@pytest.mark.parametrize(
    ("was_preempted", "time_left_s", "reason"),
    [
        (True, None, Reason.PREEMPTED),
        (True, 30, Reason.PREEMPTED),
        (False, 30, Reason.TIMEOUT),
        (False, -30, Reason.TIMEOUT),
        (False, 7200, Reason.PREEMPTED),
        (False, None, Reason.PREEMPTED),
    ],
)
def test_job_that_ended_after_a_signal_was_preempted_or_out_of_time(
    was_preempted: bool, time_left_s: int | None, reason: Reason
) -> None:
    loss = loss_of("COMPLETED", "None", "0:0", was_preempted=was_preempted, time_left_s=time_left_s)
    assert loss.reason is Reason.WORKER_LOST
    assert loss.if_stopped is not None
    assert loss.if_stopped.reason is reason
    assert ("does not say why" in loss.if_stopped.message) == (not was_preempted and time_left_s in (None, 7200))
    assert loss_of("PREEMPTED", "None", "0:0", was_preempted=was_preempted).if_stopped is None


@pytest.mark.parametrize(
    ("code", "reason", "says"),
    [
        (71, Reason.LAUNCH_REFUSED, "older than 3.11"),
        (72, Reason.ENGINE_UNAVAILABLE, "server_url"),
        (73, Reason.ENGINE_UNAVAILABLE, "refused the worker"),
        (74, Reason.LAUNCH_REFUSED, "work_dir"),
        (126, Reason.LAUNCH_REFUSED, "cannot be executed"),
        (127, Reason.LAUNCH_REFUSED, "no Python"),
        (5, Reason.WORKER_LOST, "did not report"),
        (137, Reason.WORKER_LOST, "SIGKILL, as when its node is out of memory"),
        (143, Reason.WORKER_LOST, "SIGTERM"),
    ],
)
@pytest.mark.parametrize("new", [True, False])
def test_exit_code_says_what_to_do(code: int, reason: Reason, says: str, new: bool) -> None:
    loss = loss_of("FAILED", "NonZeroExitCode", f"{code}:0" if new else str(code << 8), output="/tmp/x on n1")
    assert loss.reason is reason
    assert says in loss.message
    assert f"exit code {code}" in loss.message
    assert loss.message.endswith("its output is in /tmp/x on n1")


def test_launch_failure_is_slurms() -> None:
    loss = loss_of("FAILED", "JobLaunchFailure", "256")
    assert (loss.reason, "JobLaunchFailure" in loss.message) == (Reason.ENGINE_UNAVAILABLE, True)


def test_failure_for_want_of_memory_is_one() -> None:
    assert loss_of("FAILED", "OutOfMemory", "125:0").reason is Reason.OUT_OF_MEMORY


def test_signal_of_a_job_is_named() -> None:
    assert exit_of("0:9") == exit_of("9") == (0, 9)
    assert "SIGKILL" in loss_of("FAILED", "None", "9").message
    assert "signal 99" in loss_of("FAILED", "None", "0:99").message


def test_who_cancelled_and_which_node_failed_is_said() -> None:
    assert "cancelled on Slurm by root" in loss_of("CANCELLED", "None", "0:15", cancelled_by="root").message
    assert "failed: n7 (" in loss_of("NODE_FAIL", "NodeDown", "0:0", failed_nodes="n7").message


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("Priority", "jobs of a higher priority"),
        ("Resources", "others hold"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "down, drained or reserved (Slurm: ReqNodeNotAvail, Unavail"),
        ("QOSMaxJobsPerUserLimit", "its user has as much"),
        ("QOSGrpGRES", "of its quality of service have as much"),
        ("AssocGrpCpuLimit", "of its account have as much"),
        ("MaxGRESPerAccount", "of its account have as much"),
        ("JobHeldUser", "scontrol release"),
        ("Dependency", "another job of the same attempt"),
        ("BrandNewReason", "waits (Slurm: BrandNewReason)"),
    ],
)
def test_waiting_job_says_why_in_plain_words_and_in_slurms(reason: str, sentence: str) -> None:
    message = why_it_waits("PENDING", reason)
    assert sentence in message
    assert message.startswith("waits")
    assert reason in message


@pytest.mark.parametrize("reason", [*sorted(NEVER), "QOSMaxNodePerJobLimit", "AssocMaxGRESPerJob", "QOSMinGRES"])
def test_job_that_never_starts_is_told_apart(reason: str) -> None:
    assert never_starts(reason)
    assert why_it_waits("PENDING", reason).startswith("cannot start as it is: ")


def test_requeued_job_says_so() -> None:
    assert "held on Slurm" in why_it_waits("REQUEUE_HOLD", "None")
    assert why_it_waits("PENDING", "None") == "waits: Slurm has not looked at it yet (Slurm: PENDING)"
