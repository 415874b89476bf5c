"""What the end of processes means."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.protocol.reasons import EXIT_STOPPED, REASON_OF_STOP, Reason, StopCause
from trainmaster.worker.verdict import (
    Evidence,
    Failure,
    ProcessEnd,
    Verdict,
    evidence_from,
    verdict_of_success,
    verdict_on_failure,
    verdict_on_stop,
)

TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    f()\n{error}\n'


def failure(end: ProcessEnd, evidence: Evidence | None = None, **facts: Any) -> Verdict:
    given: dict[str, Any] = {
        "step": "run",
        "prepares": False,
        "evidence": evidence or Evidence(),
        "retry_exit_codes": (),
        "oom_kills": None,
        "disk_is_full": False,
    }
    return verdict_on_failure(end, **{**given, **facts})


def exited(code: int, rank: int = 0) -> ProcessEnd:
    return ProcessEnd(rank=rank, exit_code=code)


def raised(error: str) -> Evidence:
    return evidence_from(TRACEBACK.format(error=error).encode(), b"")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("ValueError: bad", Reason.EXITED_NONZERO),
        ("MemoryError", Reason.OUT_OF_MEMORY),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", Reason.OUT_OF_MEMORY),
        ("RuntimeError: CUDA error: out of memory", Reason.OUT_OF_MEMORY),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate", Reason.OUT_OF_MEMORY),
        ("OSError: [Errno 28] No space left on device: 'x'", Reason.DISK_FULL),
        ("OSError: [Errno 122] Disk quota exceeded", Reason.DISK_FULL),
    ],
)
def test_verdict_python_error_is_classified_by_its_last_line(error: str, reason: Reason) -> None:
    verdict = failure(exited(1), raised(error))
    assert verdict.reason == reason
    assert verdict.message.endswith(error)


def test_verdict_earlier_trouble_that_was_overcome_does_not_count() -> None:
    err = b"CUDA out of memory, trying a smaller batch\n" + TRACEBACK.format(error="KeyError: 'x'").encode()
    assert failure(exited(1), evidence_from(err, b"")).reason == Reason.EXITED_NONZERO


def test_verdict_launcher_that_only_heard_of_the_error_is_looked_behind() -> None:
    err = TRACEBACK.format(error="torch.OutOfMemoryError: CUDA out of memory")
    err += TRACEBACK.format(error="torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ")
    assert failure(exited(1), evidence_from(err.encode(), b"")).reason == Reason.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"dd: error writing 'x': No space left on device\n1+0 records out\n", Reason.DISK_FULL),
        (b"terminate called after throwing an instance of 'std::bad_alloc'\n", Reason.OUT_OF_MEMORY),
        (b"segmentation fault\n", Reason.EXITED_NONZERO),
    ],
)
def test_verdict_other_programs_are_classified_by_their_last_lines(line: bytes, reason: Reason) -> None:
    assert failure(exited(1), evidence_from(line, b"")).reason == reason


@pytest.mark.parametrize(
    ("end", "oom_kills", "reason"),
    [
        (ProcessEnd(rank=0, signal="SIGKILL"), 1, Reason.OUT_OF_MEMORY),
        (ProcessEnd(rank=0, signal="SIGKILL"), 0, Reason.KILLED_BY_SIGNAL),
        (ProcessEnd(rank=0, signal="SIGKILL"), None, Reason.KILLED_BY_SIGNAL),
        (ProcessEnd(rank=0, signal="SIGSEGV"), 1, Reason.KILLED_BY_SIGNAL),
        (exited(137), 1, Reason.OUT_OF_MEMORY),
        (exited(137), 0, Reason.EXITED_NONZERO),
        (exited(1), 1, Reason.EXITED_NONZERO),
    ],
)
def test_verdict_kill_counts_as_out_of_memory_only_when_the_kernel_says_so(
    end: ProcessEnd, oom_kills: int | None, reason: Reason
) -> None:
    assert failure(end, oom_kills=oom_kills).reason == reason


def test_verdict_kills_of_a_group_with_a_limit_explain_a_failure() -> None:
    missed = raised("RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly")
    verdict = failure(exited(1), missed, oom_kills=1, memory_limit_mb=512)
    assert verdict.reason is Reason.OUT_OF_MEMORY
    assert "out of memory (the node's limit is 512 MB): RuntimeError" in verdict.message
    assert failure(exited(1), oom_kills=1, memory_limit_mb=512).reason is Reason.OUT_OF_MEMORY
    # One that was survived does not explain an error of the rank's own.
    own = failure(exited(1), raised("ValueError: bad"), oom_kills=1, memory_limit_mb=512)
    assert own.reason is Reason.EXITED_NONZERO
    assert failure(exited(1), oom_kills=0, memory_limit_mb=512).reason is Reason.EXITED_NONZERO
    # Where others are counted too, a kill may have been anybody's.
    assert failure(exited(1), oom_kills=1).reason is Reason.EXITED_NONZERO


def test_verdict_exit_code_to_retry_wins_over_what_the_output_says() -> None:
    assert failure(exited(75), raised("MemoryError"), retry_exit_codes=(75,)).reason == Reason.RETRYABLE_EXIT
    assert failure(exited(75), retry_exit_codes=(75,), prepares=True).reason == Reason.EXITED_NONZERO


def test_verdict_failure_on_a_full_disk_is_disk_full_without_a_word() -> None:
    assert failure(exited(1), disk_is_full=True).reason == Reason.DISK_FULL


@pytest.mark.parametrize("end", [exited(1), ProcessEnd(rank=0, signal="SIGABRT")])
def test_verdict_what_a_process_says_of_itself_wins_over_what_its_output_and_its_end_look_like(end: ProcessEnd) -> None:
    said = Failure(reason=Reason.BAD_INPUT, message="row 3: 'MemoryError' is no number")
    printed = evidence_from(f"BAD_INPUT: {said.message}\n".encode(), b"")
    assert failure(end, printed).reason in (Reason.OUT_OF_MEMORY, Reason.KILLED_BY_SIGNAL)
    verdict = failure(end, printed, said=said)
    assert (verdict.reason, verdict.message) == (Reason.BAD_INPUT, said.message)


def test_verdict_what_a_process_says_does_not_hide_that_the_kernel_killed_it() -> None:
    said = Failure(reason=Reason.BAD_INPUT, message="bad")
    assert failure(ProcessEnd(rank=0, signal="SIGKILL"), said=said, oom_kills=1).reason == Reason.OUT_OF_MEMORY


def test_verdict_message_names_rank_or_step() -> None:
    assert failure(exited(3, rank=5)).message == "rank 5 exited with code 3"
    assert failure(exited(3), step="fetch", prepares=True).message == "step fetch exited with code 3"
    assert failure(ProcessEnd(rank=1, signal="SIGSEGV")).message == "rank 1 was killed by SIGSEGV"


@pytest.mark.parametrize("cause", StopCause)
def test_verdict_every_stop_has_its_reason_and_says_so(cause: StopCause) -> None:
    verdict = verdict_on_stop(cause, [exited(EXIT_STOPPED)], step="run", signalled=True, finished=False)
    assert verdict.reason is REASON_OF_STOP[cause]
    assert verdict.message.startswith("stopped: ")


@pytest.mark.parametrize(
    ("codes", "signalled", "finished", "reason"),
    [
        ((0, 0), False, False, Reason.SUCCEEDED),
        ((0, 0), True, False, Reason.PAUSED),
        ((0, 0), True, True, Reason.SUCCEEDED),
        ((0, EXIT_STOPPED), False, False, Reason.PAUSED),
        ((0, EXIT_STOPPED), False, True, Reason.PAUSED),
        ((1, 0), False, False, Reason.PAUSED),
        ((), False, False, Reason.PAUSED),
    ],
)
def test_verdict_on_stop_is_the_stops_reason_unless_the_work_was_complete(
    codes: tuple[int, ...], signalled: bool, finished: bool, reason: Reason
) -> None:
    ends = [exited(code, rank) for rank, code in enumerate(codes)]
    verdict = verdict_on_stop(StopCause.PAUSE, ends, step="run", signalled=signalled, finished=finished)
    assert verdict.reason == reason
    assert verdict.stop_cause == (None if reason is Reason.SUCCEEDED else StopCause.PAUSE)


def test_verdict_of_success_has_no_blame() -> None:
    verdict = verdict_of_success([exited(0)], step="run")
    assert (verdict.reason, verdict.stop_cause, verdict.evidence) == (Reason.SUCCEEDED, None, Evidence())
