"""What the outside shows of an attempt: the input of `core.observations`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trainmaster.core.job import Progress


class Liveness(StrEnum):
    """What a backend knows of one node's worker. Unknown is not gone."""

    UNCLAIMED = "unclaimed"
    ALIVE = "alive"
    GONE = "gone"
    REBOOTED = "rebooted"
    """Gone together with the whole machine."""
    REVOKED = "revoked"
    """The server took the claim itself: nobody will ever run it."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSight:
    """What was seen of one node of an attempt since the last look."""

    liveness: Liveness
    records: Sequence[Mapping[str, Any]] = ()
    """New records of its worker and its ranks, in order."""
    exit: Mapping[str, Any] | None = None
    endpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen of an attempt."""

    attempt: int
    nodes: Sequence[NodeSight]
    offsets: Mapping[str, int] = field(default_factory=dict)
    """Where each stream will have been taken in up to."""
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What runs a backend's jobs, where that is not this server itself."""

    name: str = ""
    """Such as `podman`; empty: none answers."""
    host: str = ""
    """Where it listens."""
    problem: str = ""
    """Why none answers, and what was tried."""
