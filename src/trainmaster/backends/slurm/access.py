"""How a Slurm cluster is reached: by its programs, or by slurmrestd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainmaster.backends.cluster.engine import EngineLaunch
from trainmaster.backends.slurm.inventory import SlurmNode
from trainmaster.backends.slurm.listing import SlurmJob


class SlurmRefusedError(Exception):
    """Slurm answers, and refuses; the message is in its words."""


@dataclass(frozen=True, slots=True)
class Partition:
    state: str = "UP"
    is_default: bool = False
    max_minutes: int | None = None
    """The longest time limit that a job may have; None: any."""


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    """What answers."""

    version: str
    name: str
    partitions: Mapping[str, Partition]


class SlurmAccess(Protocol):
    """Thread-safe. Raises EngineAwayError if the cluster does not answer."""

    def cluster(self) -> SlurmCluster: ...

    def nodes(self) -> tuple[SlurmNode, ...]:
        """All nodes of the cluster."""

    def jobs(self, name: str = "") -> Sequence[SlurmJob]:
        """Those of the instance that the controller knows, in one request; or those of a name, asked now."""

    def ended(self, *, names: Sequence[str] = (), handles: Sequence[str] = ()) -> Sequence[SlurmJob]:
        """Jobs of the instance that the controller may have forgotten, if Slurm has an accounting that answers."""

    def submit(self, launch: EngineLaunch, script: str) -> str:
        """The id of the new job. Raises EngineRefusedError and SlurmRefusedError."""

    def cancel(self, handle: str) -> None:
        """Nothing happens to a job that has ended, or is not known."""

    def close(self) -> None: ...
