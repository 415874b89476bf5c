"""What Slurm's words for jobs mean: the only place that knows its states, its reasons and its exit codes."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from trainmaster.backends.base import Loss
from trainmaster.backends.cluster import worker_start
from trainmaster.backends.cluster.engine import EnginePhase
from trainmaster.protocol.reasons import Reason


@dataclass(frozen=True, slots=True)
class JobState:
    """What a state of a Slurm job means here."""

    phase: EnginePhase
    meaning: str = ""
    reason: Reason | None = None
    """Of ended jobs: why a worker is gone that did not report its own end."""


_QUEUED, _RUNNING, _ENDED = EnginePhase.QUEUED, EnginePhase.RUNNING, EnginePhase.ENDED

STATES: Mapping[str, JobState] = MappingProxyType({
    # Not started; those that were requeued would start again.
    "PENDING": JobState(_QUEUED),
    "CONFIGURING": JobState(_QUEUED, "its nodes are booting"),
    "EXPEDITING": JobState(_QUEUED, "it is requeued at a higher priority"),
    "REQUEUED": JobState(_QUEUED, "it was requeued on Slurm"),
    "REQUEUE_FED": JobState(_QUEUED, "it was requeued by the federation"),
    "REQUEUE_HOLD": JobState(_QUEUED, "it was requeued and is held on Slurm; `scontrol release` lets it start"),
    "SPECIAL_EXIT": JobState(_QUEUED, "it was requeued and is held on Slurm; `scontrol release` lets it start"),
    "RESV_DEL_HOLD": JobState(_QUEUED, "it is held because its reservation was deleted"),
    # On its nodes.
    "RUNNING": JobState(_RUNNING),
    "RESIZING": JobState(_RUNNING),
    "SIGNALING": JobState(_RUNNING),
    "STAGE_OUT": JobState(_RUNNING, "it is copying data out of its burst buffer"),
    "COMPLETING": JobState(_RUNNING, "its last processes are ending"),
    "SUSPENDED": JobState(_RUNNING, "it is suspended on Slurm; `scontrol resume` continues it"),
    "STOPPED": JobState(_RUNNING, "it is stopped by a signal on Slurm"),
    # Ended for good.
    "COMPLETED": JobState(_ENDED, "its worker ended and did not report how", Reason.WORKER_LOST),
    "FAILED": JobState(_ENDED, "its worker failed and did not report how", Reason.WORKER_LOST),
    "TIMEOUT": JobState(
        _ENDED,
        "it reached its time limit on Slurm; max_runtime_seconds or the option time set a longer one, if the partition "
        "allows it",
        Reason.TIMEOUT,
    ),
    "DEADLINE": JobState(_ENDED, "it reached its deadline on Slurm", Reason.TIMEOUT),
    "OUT_OF_MEMORY": JobState(
        _ENDED, "a node used more memory than the job asked Slurm for", Reason.OUT_OF_MEMORY
    ),
    "NODE_FAIL": JobState(_ENDED, "a node of the job failed", Reason.NODE_LOST),
    "BOOT_FAIL": JobState(_ENDED, "a node of the job failed to boot", Reason.NODE_LOST),
    "PREEMPTED": JobState(_ENDED, "Slurm gave its nodes to a job of a higher priority", Reason.PREEMPTED),
    "CANCELLED": JobState(_ENDED, "it was cancelled on Slurm", Reason.ENGINE_CANCELLED),
    "REVOKED": JobState(_ENDED, "another cluster of the federation took it over", Reason.ENGINE_CANCELLED),
    "LAUNCH_FAILED": JobState(_ENDED, "Slurm could not launch it on its nodes", Reason.ENGINE_UNAVAILABLE),
    "RECONFIG_FAIL": JobState(_ENDED, "Slurm could not configure its nodes", Reason.ENGINE_UNAVAILABLE),
})  # fmt: skip

_UNKNOWN = JobState(_RUNNING, "it is in a state that Trainmaster does not know")
"""Unknown is not gone."""


def state_of(words: str) -> JobState:
    """The meaning of a state as squeue or sacct writes it, such as `CANCELLED by 1000` or `RUNNING`."""
    return STATES.get(words.split(" ")[0].rstrip("+"), _UNKNOWN)


# -- why a job waits --

_WAITS: Mapping[str, str] = MappingProxyType({
    "None": "Slurm has not looked at it yet",
    "Priority": "jobs of a higher priority come first",
    "Resources": "others hold the resources that it needs",
    "Dependency": "another job of the same attempt is still there",
    "BeginTime": "its start time has not come",
    "JobHeldAdmin": "an administrator holds it; `scontrol release` lets it start",
    "JobHeldUser": "it is held; `scontrol release` lets it start",
    "JobHoldMaxRequeue": "it was requeued too often and is held; `scontrol release` lets it start",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows, or has in service",
    "PartitionTimeLimit": "its time limit exceeds the partition's; submit it with a lower max_runtime_seconds",
    "Reservation": "its reservation has not begun",
    "ReservationDeleted": "its reservation was deleted; change the option reservation",
    "ReservationInvalid": "there is no such reservation; change the option reservation",
    "Licenses": "others hold the licenses that it needs",
    "Prolog": "its nodes run their prolog",
    "Cleaning": "an earlier run of it is being cleaned up",
    "SchedDefer": "Slurm starts jobs later, all at once",
    "InvalidAccount": "the account is not valid; change the option account",
    "AccountNotAllowed": "the account may not use the partition; change the option account",
    "InvalidQOS": "the quality of service is not valid; change the option qos",
    "QOSNotAllowed": "the quality of service is not allowed here; change the option qos",
    "QOSTimeLimit": "its time limit exceeds the quality of service's; lower max_runtime_seconds or the option time",
    "AssociationTimeLimit": "its time limit exceeds the account's; lower max_runtime_seconds or the option time",
    "PartitionConfig": "the partition does not allow what it asks for",
    "BadConstraints": "no node of the partition has what it asks for",
    "Constraints": "no node of the partition has what it asks for",
    "DependencyNeverSatisfied": "another job of the same attempt will never end well",
    "MaxMemPerLimit": "it asks for more memory than a limit allows",
    "MaxPoweredUpNodes": "as many nodes are powered up as are allowed",
    "BurstBufferResources": "others hold the burst buffer that it needs",
    "BurstBufferStageIn": "its burst buffer is being filled",
})  # fmt: skip

_LIMITS = (
    (r"QOSMin.*", "it asks for less than the quality of service demands; change the option qos"),
    (r"(QOS|Assoc|Association)?Max.*(PerJob|PerNode).*", "it asks for more than one job may have"),
    (r"QOSMax.*|Max.*PerUser", "its user has as much as the quality of service allows at a time"),
    (r"QOS.*", "the jobs of its quality of service have as much as is allowed at a time"),
    (r"Assoc.*|Max.*PerAccount|AccountingPolicy", "the jobs of its account have as much as is allowed at a time"),
    (r"BurstBuffer.*", "its burst buffer is not ready"),
)
"""Patterns of reasons, of which Slurm has a hundred, in the order in which they are tried."""

NEVER = frozenset({
    "AccountNotAllowed", "AssociationTimeLimit", "BadConstraints", "Constraints", "DependencyNeverSatisfied",
    "InvalidAccount", "InvalidQOS", "MaxMemPerLimit", "PartitionConfig", "PartitionTimeLimit", "QOSNotAllowed",
    "QOSTimeLimit", "ReservationDeleted", "ReservationInvalid",
})  # fmt: skip
"""Reasons that time does not remove: somebody has to change the job, the options or the cluster."""


def never_starts(reason: str) -> bool:
    word = _word_of(reason)
    return word in NEVER or re.fullmatch(r"QOSMin.*|(QOS|Assoc)Max.*(PerJob|PerNode).*", word) is not None


def why_it_waits(state: str, reason: str) -> str:
    """Why a job waits, as a sentence with Slurm's own words.

    >>> why_it_waits("PENDING", "Priority")
    'waits: jobs of a higher priority come first (Slurm: Priority)'
    >>> why_it_waits("PENDING", "BadConstraints")
    'cannot start as it is: no node of the partition has what it asks for (Slurm: BadConstraints)'
    """
    word = _word_of(reason)
    sentence = _WAITS.get(word) or next((text for form, text in _LIMITS if re.fullmatch(form, word)), "")
    if meaning := state_of(state).meaning:
        sentence = meaning
    own = reason if word not in ("", "None") else state
    start = "cannot start as it is" if never_starts(reason) else "waits"
    return f"{start}: {sentence} (Slurm: {own})" if sentence else f"{start} (Slurm: {own})"


def _word_of(reason: str) -> str:
    """Without what Slurm adds, as in `ReqNodeNotAvail, UnavailableNodes:n1`."""
    found = re.match(r"[A-Za-z]*", reason.strip("()"))
    return found[0] if found else ""


# -- why a job ended --

_TOLD_EARLY_S = 900
"""Slurm tells jobs to stop before they reach their time limit: by the grace period, which no list shows, and up to a
minute more. A job that ended with more time left was told for another reason."""
_LAUNCH_FAILURES = ("JobLaunchFailure", "SystemFailure")
_SIGNALLED = 128


def exit_of(text: str) -> tuple[int, int]:
    """The exit code and the signal of a job: squeue before 24.05 writes a wait status, later ones `code:signal`.

    >>> exit_of("18176"), exit_of("71:0"), exit_of("15")
    ((71, 0), (71, 0), (0, 15))
    """
    code, colon, number = text.partition(":")
    if colon:
        return int(code or 0), int(number or 0)
    status = int(code) if code.isdigit() else 0
    return status >> 8 & 0xFF, status & 0x7F


def loss_of(
    state: str,
    reason: str,
    exit_text: str,
    *,
    cancelled_by: str = "",
    failed_nodes: str = "",
    output: str = "",
    was_preempted: bool = False,
    time_left_s: int | None = None,
) -> Loss:
    """What the end of a job means for nodes whose worker did not report, or was told to stop.

    `output`: where what the worker printed is kept. `time_left_s`: until its time limit, if it had one.
    """
    known = state_of(state)
    code, number = exit_of(exit_text)
    meaning, cause = known.meaning, known.reason or Reason.WORKER_LOST
    if cancelled_by:
        meaning += f" by {cancelled_by}"
    if failed_nodes:
        meaning += f": {failed_nodes}"
    if cause is Reason.WORKER_LOST:
        if _word_of(reason) == "OutOfMemory":
            meaning, cause = STATES["OUT_OF_MEMORY"].meaning, Reason.OUT_OF_MEMORY
        elif code in worker_start.MESSAGES:
            meaning, cause = worker_start.MESSAGES[code], worker_start.REASONS[code]
        elif _word_of(reason) in _LAUNCH_FAILURES:
            meaning, cause = "Slurm could not launch it on its nodes", Reason.ENGINE_UNAVAILABLE
        elif number or code > _SIGNALLED:
            meaning = f"its worker was killed by {_signal_name(number or code - _SIGNALLED)}"
    details = [state]
    if _word_of(reason) not in ("", "None", "NonZeroExitCode"):
        details.append(reason)
    if cause in (Reason.WORKER_LOST, *worker_start.REASONS.values()) and code:
        details.append(f"exit code {code}")
    where = f"; its output is in {output}" if output and state_of(state).reason is Reason.WORKER_LOST and code else ""
    loss = Loss(reason=cause, message=f"{meaning} (Slurm: {', '.join(details)}){where}")
    if state != "COMPLETED":
        return loss
    # All workers ended by themselves, as after a signal: no word of Slurm says why it was sent.
    if was_preempted:
        stopped, why = STATES["PREEMPTED"].meaning, Reason.PREEMPTED
    elif time_left_s is not None and time_left_s <= _TOLD_EARLY_S:
        stopped, why = STATES["TIMEOUT"].meaning, Reason.TIMEOUT
    else:
        stopped, why = "Slurm told it to stop, and does not say why", Reason.PREEMPTED
    return replace(loss, if_stopped=Loss(reason=why, message=f"{stopped} (Slurm: {state})"))


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name}, as when its node is out of memory" if number == signal.SIGKILL else name
