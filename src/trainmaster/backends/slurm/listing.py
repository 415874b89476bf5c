"""Slurm's lists of jobs: what squeue and sacct are asked for, and what their lines mean."""

from __future__ import annotations

import pwd
import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainmaster.backends.base import Loss
from trainmaster.backends.cluster.engine import EngineJob, EnginePhase
from trainmaster.backends.slurm.hostlist import expanded
from trainmaster.backends.slurm.options import SlurmOptions, seconds
from trainmaster.backends.slurm.render import COMMENT, output_path
from trainmaster.backends.slurm.states import loss_of, state_of, why_it_waits
from trainmaster.protocol.reasons import Reason

_FIELDS = (
    *("JobID", "Name", "exit_code", "State", "NodeList", "Reason"),
    *("RestartCnt", "PreemptTime", "TimeUsed", "TimeLimit", "Comment"),
)
SQUEUE_ARGUMENTS = (
    "--noheader",
    "--states=all",
    # The characters after a colon follow the field, which then has the length that it needs.
    f"--Format={','.join(f'{field}:|' for field in _FIELDS)}",
)
"""The same fields with all versions from 22.05 on; the text in the comment comes last."""

_SACCT_FIELDS = ("JobIDRaw", "JobName", "ExitCode", "State", "NodeList", "Reason")
SACCT_ARGUMENTS = (
    "--noheader",
    "--parsable2",
    "--allocations",
    "--starttime=now-30days",
    f"--format={','.join(_SACCT_FIELDS)}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """A line of a list."""

    job_id: int
    name: str
    instance: str
    attempt_id: str
    exit: str
    state: str
    hosts: tuple[str, ...]
    reason: str
    restarts: int = 0
    """How often it was requeued."""
    was_preempted: bool = False
    """Whether Slurm told it to make room, however it ended then."""
    elapsed_s: int = 0
    limit_s: int | None = None
    """Its time limit; None: it has none, or it is not known."""

    @property
    def was_requeued(self) -> bool:
        """Whether it waits to run once more, which no attempt does: it has ended."""
        return self.restarts > 0 and self.phase is EnginePhase.QUEUED

    @property
    def phase(self) -> EnginePhase:
        return state_of(self.state).phase

    @property
    def has_ended(self) -> bool:
        return self.phase is EnginePhase.ENDED


def jobs_of(text: str, instance: str) -> Iterator[SlurmJob]:
    """Those of an instance in the output of squeue, or of sacct, which has no comments."""
    for line in text.splitlines():
        parts = line.split("|", len(_FIELDS) - 1)
        if len(parts) < len(_SACCT_FIELDS) or not parts[0].isdigit() or not parts[1].startswith(f"tm-{instance}-"):
            continue
        of_squeue = dict(zip(_FIELDS, parts, strict=True)) if len(parts) == len(_FIELDS) else {}
        owner, attempt_id = marks(parts[1], of_squeue.get("Comment", ""), instance)
        if owner == instance:
            yield SlurmJob(
                job_id=int(parts[0]),
                name=parts[1],
                instance=owner,
                attempt_id=attempt_id,
                exit=parts[2],
                state=parts[3],
                hosts=() if parts[4] in ("", "(null)", "None assigned") else expanded(parts[4]),
                reason=parts[5],
                restarts=int(restarts) if (restarts := of_squeue.get("RestartCnt", "")).isdigit() else 0,
                was_preempted=of_squeue.get("PreemptTime", "N/A") != "N/A",
                elapsed_s=_seconds(of_squeue.get("TimeUsed", "")) or 0,
                limit_s=_seconds(of_squeue.get("TimeLimit", "")),
            )


def _seconds(text: str) -> int | None:
    """None: it is a word, such as UNLIMITED."""
    return seconds(text) if text[:1].isdigit() else None


def marks(name: str, comment: str, instance: str) -> tuple[str, str]:
    """Instance and attempt of a job: from its comment, or from its name if a plugin of the site replaces comments."""
    words = comment.split(" ")
    if words[0] == COMMENT and len(words) > len(("mark", "instance")):
        return words[1], words[2].rstrip("|")
    job_id, _, number = name.removeprefix(f"tm-{instance}-").rpartition("-")
    return instance, f"{job_id}.{number}"


def engine_job(job: SlurmJob, options: SlurmOptions, addresses: dict[str, str], *, failed_nodes: str = "") -> EngineJob:
    """`addresses`: host -> address, as far as they are known."""
    phase, loss, message = job.phase, None, state_of(job.state).meaning
    if job.restarts and phase is not EnginePhase.RUNNING:
        phase, message = EnginePhase.ENDED, f"it was requeued on Slurm, where it ran before (Slurm: {job.state})"
        loss = Loss(reason=Reason.ENGINE_CANCELLED, message=message)
    elif phase is EnginePhase.ENDED:
        output = output_path(job.name, options)
        loss = loss_of(
            job.state.split(" ")[0],
            job.reason,
            job.exit,
            cancelled_by=_canceller(job.state),
            failed_nodes=failed_nodes,
            was_preempted=job.was_preempted,
            time_left_s=None if job.limit_s is None else job.limit_s - job.elapsed_s,
            output=f"{output} on {job.hosts[0]}" if output and job.hosts else "",
        )
        message = loss.message
    elif phase is EnginePhase.QUEUED:
        message = why_it_waits(job.state, job.reason)
    return EngineJob(
        attempt_id=job.attempt_id,
        handle=str(job.job_id),
        phase=phase,
        message=message,
        loss=loss,
        addresses={node: addresses.get(host, host) for node, host in enumerate(job.hosts)},
    )


def _canceller(state: str) -> str:
    """The user in `CANCELLED by 1000`."""
    found = re.search(r" by (\d+)", state)
    if found is None:
        return ""
    try:
        return pwd.getpwuid(int(found[1])).pw_name
    except KeyError:
        return f"user {found[1]}"
