"""What the outside shows of an attempt: the input of `core.observations`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from trainmaster.server.core.job import Progress


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
    """How far each stream will have been read, and how many of its lines were taken."""
    progress: Progress | None = None
    behind: bool = False
    """The streams have more than this look took."""
    unclaimed_launches: int = 0
    """How many launches of the job in a row, this one among them, no worker claimed in time."""

    def without_reports(self, note: str) -> Sight:
        """The same, with a note in the place of everything that the attempt reported."""
        cut = [{"type": "reports_cut", "message": note}]
        nodes = [replace(node, records=cut if number == 0 else ()) for number, node in enumerate(self.nodes)]
        return replace(self, nodes=nodes, progress=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What runs a backend's jobs, where that is not this server itself."""

    name: str = ""
    """Such as `podman`; empty: none answers."""
    host: str = ""
    """Where it listens."""
    problem: str = ""
    """Why none answers, and what was tried."""
