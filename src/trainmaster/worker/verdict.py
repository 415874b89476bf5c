"""Why a node's processes ended: the evidence in their output, and the verdict on it. Pure but for `read_tail`."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainmaster.protocol.reasons import REASON_OF_STOP, REPORTABLE_REASONS, Reason, StopCause

MAX_LINES = 20
MAX_LINE_CHARACTERS = 500
MAX_ERROR_CHARACTERS = 200
"""Of an error that is quoted; the last lines have it whole."""
TAIL_BYTES = 64 << 10

# Prefixes that launchers and exception groups add to a traceback's lines.
_LINE_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?)?(?:\s*[|+] ?)?")
_HEADER = re.compile(r"Traceback \(most recent call last\):$")
_FRAME = re.compile(r'^\s*(File "[^"]*", line \d+(?:, in .+)?)$')
# Printed by Python's fault handler when the process crashes; the innermost frame comes first.
_CRASH = re.compile(r"^Fatal Python error: (.+)$")
_CRASH_FRAME = re.compile(r'^\s*(File "[^"]*", line \d+) in (.+)$')
# A syntax error of the script itself is printed without a header.
_HEADLESS_ERROR = re.compile(r"^(?:SyntaxError|IndentationError|TabError)(?::|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The end of a process's output, for people and for the verdict."""

    last_lines: tuple[str, ...] = ()
    frame: str | None = None
    """Where a Python process failed, with its error: `File "x.py", line 3, in f: ValueError: bad`."""
    error: str | None = None


def evidence_from(err: bytes, out: bytes) -> Evidence:
    """The evidence in a process's two outputs; the last lines end with a traceback, else with the error output."""
    first, second = _lines(err), _lines(out)
    frame, error = _last_traceback(first)
    if frame is None:
        frame, error = _last_traceback(second)
        if frame is not None:
            first, second = second, first
    last_lines = first[-MAX_LINES:]
    if room := MAX_LINES - len(last_lines):
        last_lines = second[-room:] + last_lines
    if error and len(error) > MAX_ERROR_CHARACTERS:
        error = f"{error[:MAX_ERROR_CHARACTERS]}…"
    return Evidence(
        last_lines=tuple(line[:MAX_LINE_CHARACTERS] for line in last_lines),
        frame=f"{frame}: {error}" if frame and error else frame,
        error=error,
    )


def read_tail(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES)
    return b""


def _lines(data: bytes) -> list[str]:
    """The non-blank lines as a terminal would finally show them: progress bars overwrite themselves."""
    shown = (line.rstrip().rpartition("\r")[2] for line in data.decode(errors="replace").split("\n"))
    return [line for line in shown if line.strip()]


def _last_traceback(lines: list[str]) -> tuple[str | None, str | None]:
    bare = [_LINE_PREFIX.sub("", line) for line in lines]
    crash = next((n for n in reversed(range(len(bare))) if _CRASH.match(bare[n])), None)
    start = next((n for n in reversed(range(len(bare))) if _HEADER.search(bare[n])), None)
    if crash is not None and (start is None or crash > start):
        return _crash(bare[crash:])
    if start is None:
        end = next((n for n in reversed(range(len(bare))) if _HEADLESS_ERROR.match(bare[n])), None)
        # The error follows the file, the line, its text and a marker.
        start = None if end is None else max(0, end - 4)
    if start is None:
        return None, None
    frame = None
    for line in bare[start:]:
        if match := _FRAME.match(line):
            frame = match[1]
        elif frame and not line[0].isspace():
            return frame, line
    return frame, None


def _crash(lines: list[str]) -> tuple[str | None, str]:
    """The innermost frame of a process that crashed, and the error."""
    # Other threads may be listed before the one that crashed.
    thread = next((n for n, line in enumerate(lines) if line.startswith("Current thread")), 0)
    frame = next((match for line in lines[thread:] if (match := _CRASH_FRAME.match(line))), None)
    return (f"{frame[1]}, in {frame[2]}" if frame else None), lines[0]


_STOP_MESSAGES: Mapping[StopCause, str] = {
    StopCause.CANCEL: "stopped: cancelled",
    StopCause.DELETE: "stopped: deleted",
    StopCause.PAUSE: "stopped: paused",
    StopCause.INACTIVE: "stopped: not used for too long",
    StopCause.PREEMPT: "stopped: preempted",
    StopCause.TIMEOUT: "stopped: it ran longer than it may",
    StopCause.STALL: "stopped: it made no progress",
    StopCause.PEER: "stopped: another node of its gang failed or was lost",
    StopCause.ENGINE: "stopped: the engine of the cluster asked for it",
}

_OUT_OF_MEMORY = re.compile(r"MemoryError\b|CUDA out of memory|CUDA error: out of memory|std::bad_alloc|\[Errno 12\]")
_DISK_FULL = re.compile(r"No space left on device|\[Errno 28\]|Disk quota exceeded|\[Errno 122\]")
# Launchers whose own traceback only says that a process below them failed.
_HEARSAY = re.compile(r"\b(?:ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException)\b")
# Raised by those who miss a process that was killed.
_BEREFT = re.compile(
    r"\b(?:BrokenProcessPool|BrokenPipeError|ConnectionResetError|EOFError|[Kk]illed|exited unexpectedly|SIGKILL)\b"
)

_MAX_MESSAGE = 2000
_SHELL_SAYS_SIGKILL = 128 + 9
_NO_EVIDENCE = Evidence()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    rank: int
    exit_code: int | None = None
    signal: str | None = None

    @property
    def failed(self) -> bool:
        return self.exit_code != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a process reported that it failed."""

    reason: Reason
    message: str

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Failure | None:
        """The failure of an event; None if it gives no reason that a process may give."""
        reason, message = document.get("reason"), document.get("message")
        if reason not in REPORTABLE_REASONS or not isinstance(message, str):
            return None
        return Failure(reason=Reason(reason), message=message[:_MAX_MESSAGE])

    @staticmethod
    def of_lead(answer: Mapping[str, Any]) -> Failure:
        """Why a container failed, as reported by the program that leads into it, which may give any reason."""
        return Failure(reason=Reason(answer["reason"]), message=str(answer["message"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    reason: Reason
    message: str
    end: ProcessEnd | None = None
    step: str | None = None
    stop_cause: StopCause | None = None
    evidence: Evidence = _NO_EVIDENCE
    oom_kills: int | None = None


def verdict_on_failure(
    end: ProcessEnd,
    *,
    answer: Failure | None = None,
    said: Failure | None = None,
    step: str,
    prepares: bool,
    evidence: Evidence,
    retry_exit_codes: Collection[int],
    oom_kills: int | None,
    disk_is_full: bool,
    memory_limit_mb: int | None = None,
) -> Verdict:
    """Why an attempt failed whose first failing process ended like this without being told to stop.

    Args:
        answer: from a program that leads into a container; its own exit code says nothing about the container.
        said: the reason that it, or another process of its step, reported.
        step, prepares: the step it ran, and whether that only prepares the workload.
        retry_exit_codes: exit codes of the workload that count as transient.
        oom_kills: the kernel's out-of-memory kills during this step, if known.
        disk_is_full: whether the process's logs could not grow any more.
        memory_limit_mb: the limit that the kernel enforces for the node, if any: then the kills are this node's own.
    """
    verdict = Verdict(
        reason=Reason.EXITED_NONZERO, message="", end=end, step=step, evidence=evidence, oom_kills=oom_kills
    )
    if answer is not None:
        return replace(verdict, reason=answer.reason, message=answer.message, oom_kills=None)
    subject = f"step {step}" if prepares else f"rank {end.rank}"
    how = f"was killed by {end.signal}" if end.signal else f"exited with code {end.exit_code}"
    limit = f" (the node's limit is {memory_limit_mb} MB)" if memory_limit_mb is not None else ""
    killed = end.signal == "SIGKILL" or end.exit_code == _SHELL_SAYS_SIGKILL
    if end.exit_code in retry_exit_codes and not prepares:
        reason, what = Reason.RETRYABLE_EXIT, f"{subject} {how}, which is among the job's retry_exit_codes"
    elif killed and oom_kills:
        reason, what = Reason.OUT_OF_MEMORY, f"{subject} was killed by the kernel: out of memory{limit}"
    elif said is not None:
        # What follows is guessed from the last output, which may be a row of data, and from the exit, which may be a
        # library that crashed on the way out.
        return replace(verdict, reason=said.reason, message=said.message)
    elif _shows(_OUT_OF_MEMORY, evidence):
        reason, what = Reason.OUT_OF_MEMORY, f"{subject} {how}, out of memory"
    elif _shows(_DISK_FULL, evidence) or disk_is_full:
        reason, what = Reason.DISK_FULL, f"{subject} {how}, the disk was full"
    elif oom_kills and memory_limit_mb is not None and not _is_own(evidence):
        reason = Reason.OUT_OF_MEMORY
        what = f"{subject} {how}, and the kernel had killed a process of its job: out of memory{limit}"
    elif end.signal:
        reason, what = Reason.KILLED_BY_SIGNAL, f"{subject} {how}"
    else:
        reason, what = verdict.reason, f"{subject} {how}"
    return replace(verdict, reason=reason, message=f"{what}: {evidence.error}" if evidence.error else what)


def verdict_on_stop(
    cause: StopCause, ends: Sequence[ProcessEnd], *, step: str | None, signalled: bool, finished: bool
) -> Verdict:
    """On a stopped attempt: ranks that all exit with 0 succeeded, unless signalled before one reported so."""
    if ends and not any(end.failed for end in ends) and (finished or not signalled):
        return verdict_of_success(ends, step=step)
    first_failed = next((end for end in ends if end.failed), None)
    return Verdict(
        reason=REASON_OF_STOP[cause],
        message=_STOP_MESSAGES[cause],
        end=first_failed or (ends[0] if ends else None),
        step=step,
        stop_cause=cause,
    )


def verdict_of_success(ends: Sequence[ProcessEnd], *, step: str | None) -> Verdict:
    return Verdict(reason=Reason.SUCCEEDED, message="finished", end=ends[0], step=step)


def _is_own(evidence: Evidence) -> bool:
    """Whether the process failed by an error of its own, and not because another one ended."""
    error = evidence.error
    return error is not None and not _HEARSAY.search(error) and not _BEREFT.search(error)


def _shows(pattern: re.Pattern[str], evidence: Evidence) -> bool:
    """Whether the process failed by this: its last error decides; without a telling error, its last lines."""
    if evidence.error is not None:
        if pattern.search(evidence.error):
            return True
        if not _HEARSAY.search(evidence.error):
            return False
    return any(pattern.search(line) for line in evidence.last_lines)
