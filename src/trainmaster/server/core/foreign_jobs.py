"""What the engine of a cluster has beside our jobs: the jobs of others, for reading, and training runtimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainmaster.server.core.states import JobStatus

_ENDED = (JobStatus.COMPLETED, JobStatus.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStep:
    """A part of a job that has a log of its own."""

    name: str
    status: JobStatus
    """As of a job."""
    pod: str
    """What its log is found by."""
    device: str = ""
    device_count: str = ""

    @property
    def has_ended(self) -> bool:
        return self.status in _ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignJob:
    """A job that somebody else made on an engine. It is shown, and never touched."""

    name: str
    status: JobStatus
    """QUEUED, TRAINING, PAUSED, COMPLETED or FAILED."""
    created_at: str
    node_count: int
    runtime: str
    message: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[ForeignStep, ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.status in _ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    lines: tuple[str, ...]
    cursor: str
    """Where the next part begins."""


class ForeignJobs(Protocol):
    """Every method asks the engine, and raises EngineUnavailableError."""

    def runtimes(self) -> Sequence[Mapping[str, Any]]:
        """Documents of training runtimes that jobs can name."""

    def others(self) -> Sequence[ForeignJob]:
        """Jobs that this server did not make, the newest first."""

    def other(self, name: str) -> ForeignJob | None: ...

    def log(self, pod: str, step: str, cursor: str) -> LogPart:
        """What a step has written since a cursor; empty: from the beginning."""
