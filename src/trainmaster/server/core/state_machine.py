"""The state machine: takes edges of the lifecycle, the only place where a job's status changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.errors import InvalidTransitionError
from trainmaster.server.core.job import Attempt, Change, CheckpointRecord, Job, JobEvent
from trainmaster.server.core.states import TERMINAL, TRANSITIONS, Actor, Edge, JobStatus, Trigger, sources


class Draft:
    """A change in the making: a job, the edges taken so far and the events that tell of them."""

    def __init__(self, job: Job, now: float) -> None:
        self.job = job
        self.now = now
        self._before = job
        self._events: list[JobEvent] = []
        self._checkpoints: list[CheckpointRecord] = []
        self._replaced: list[str] = []
        self._ended: Attempt | None = None

    def edge(self, trigger: Trigger) -> Edge | None:
        edge = TRANSITIONS.get((self.job.status, trigger))
        return None if edge is None or (edge.service_only and not self.job.is_service) else edge

    def move(
        self,
        trigger: Trigger,
        *,
        reason: Reason | None = None,
        message: str = "",
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Take an edge and record it; InvalidTransitionError when the table has no such edge."""
        if (edge := self.edge(trigger)) is None:
            allowed = sources(trigger, service=self.job.is_service)
            raise InvalidTransitionError(action=trigger, status=self.job.status, allowed_from=sorted(allowed))
        before = self.job.status
        self.set(status=edge.to, status_at=self.now, reason=reason, message=message or None, **self._stamps(edge.to))
        self.note(
            "status",
            actor=edge.actor,
            from_status=before,
            to_status=edge.to,
            reason=reason,
            message=message or edge.meaning,
            data=data,
        )

    def set(self, **changes: Any) -> None:
        self.job = self.job.evolve(**changes)

    def set_attempt(self, **changes: Any) -> None:
        self.job = self.job.evolve(attempt=self.job.live.evolve(**changes))

    def note(
        self,
        type: str,  # noqa: A002 - the word that events have for it
        *,
        actor: Actor,
        message: str,
        from_status: JobStatus | None = None,
        to_status: JobStatus | None = None,
        reason: Reason | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self._events.append(
            JobEvent(
                job_id=self.job.job_id,
                seq=self._before.event_count + len(self._events) + 1,
                at=self.now,
                type=type,
                actor=actor,
                attempt=self.job.attempt.number if self.job.attempt else self.job.attempt_count,
                from_status=from_status,
                to_status=to_status,
                reason=reason,
                message=message,
                data=data or {},
            )
        )

    def register(self, checkpoint: CheckpointRecord, *, replaces: Sequence[str] = ()) -> None:
        """Add a committed checkpoint, in the place of others; one that the job made to resume from is the latest."""
        self._checkpoints.append(checkpoint)
        self._replaced += (before for before in replaces if before != checkpoint.checkpoint_id)
        if not checkpoint.kind:
            self.set(latest_checkpoint_id=checkpoint.checkpoint_id)

    def end_attempt(
        self, *, reason: Reason, message: str, evidence: Mapping[str, Any] | None = None, ended_at: float | None = None
    ) -> None:
        """End the current attempt, now or when it is known to have ended; the commit frees its resources."""
        attempt = self.job.live
        ended_at = self.now if ended_at is None else ended_at
        ran_s = 0.0
        if attempt.started_at is not None:
            ended_at = max(ended_at, attempt.started_at)
            ran_s = ended_at - attempt.started_at
        self._ended = attempt.evolve(ended_at=ended_at, reason=reason, message=message, evidence=evidence or {})
        self.set(
            attempt=None,
            endpoint=None,
            stalled_at=None,
            runtime_s=self.job.runtime_s + ran_s,
            gpu_s=self.job.gpu_s + ran_s * sum(len(share.gpus) for share in attempt.shares),
        )

    def change(self) -> Change | None:
        """The finished change; None when nothing changed."""
        if not self._events and self.job == self._before:
            return None
        job = self.job.evolve(
            version=self._before.version + 1,
            event_count=self._before.event_count + len(self._events),
            updated_at=self.now,
        )
        return Change(
            job=job,
            events=tuple(self._events),
            checkpoints=tuple(self._checkpoints),
            replaced=tuple(self._replaced),
            ended=self._ended,
        )

    def _stamps(self, to: JobStatus) -> dict[str, Any]:
        if to in TERMINAL:
            return {"finished_at": self.now}
        if to is JobStatus.PAUSED:
            return {"paused_at": self.now}
        if to is JobStatus.TRAINING and self.job.started_at is None:
            return {"started_at": self.now}
        return {"queued_at": self.now} if to is JobStatus.QUEUED and self.job.queued_at is None else {}
