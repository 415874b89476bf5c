"""What a cluster backend needs of an engine: start, find, list, cancel, forget; nodes; and facts about itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from trainmaster.backends.base import FilesBy, Loss
from trainmaster.protocol.request import AttemptRequest, EngineNeeds
from trainmaster.server.core.errors import EngineUnavailableError
from trainmaster.server.core.foreign_jobs import ForeignJobs
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.core.resources import Node


class EngineAwayError(EngineUnavailableError):
    """The engine did not answer: nothing is known of what it runs, and what was asked may have happened."""


class EngineRefusedError(Exception):
    """The engine refused for good; the message is in its words, with what to do."""


class EnginePhase(StrEnum):
    """Where an attempt stands on its engine."""

    PREPARING = "preparing"  # half handed over by a server that did not finish; `start` does
    QUEUED = "queued"  # accepted, not started
    RUNNING = "running"  # started on every node
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineJob:
    """One attempt, as the engine reports it."""

    attempt_id: str
    handle: str
    """What the engine calls it."""
    phase: EnginePhase
    message: str = ""
    """In the engine's words: why it waits, or how it ended."""
    loss: Loss | None = None
    """Once it has ended: what that means for nodes whose worker did not report an exit of its own."""
    node_losses: Mapping[int, Loss] = field(default_factory=dict)
    """While it runs: the nodes that the engine knows to be gone, and why."""
    addresses: Mapping[int, str] = field(default_factory=dict)
    """Node of the attempt -> the host or address where the server and other nodes reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """An attempt to be started: one worker on each of its nodes."""

    name: str
    """Unique over all servers, at most 63 letters, digits and dashes: the attempt is found again by it."""
    instance: str
    """Identifies the Trainmaster that everything on the engine belongs to."""
    request: AttemptRequest
    grace_s: float
    """How long the worker needs between the engine's SIGTERM and its SIGKILL."""
    command: tuple[str, ...]
    """Starts the worker of a node, with the environment below. It finds out which node it is by `node_variable`."""
    environment: Mapping[str, str]
    """Without secrets; the same on every node."""
    secrets: Mapping[str, str] = field(repr=False)
    """Variables that only the worker may see: they must not appear in listings, logs or on a command line."""

    @property
    def node_count(self) -> int:
        return len(self.request.nodes)

    @property
    def needs(self) -> EngineNeeds:
        """What each node of the attempt needs. Limits are in the request: `max_runtime_s`."""
        if self.request.engine_needs is None:
            raise ValueError(f"{self.request.attempt_id} was placed by the scheduler, and not for an engine")
        return self.request.engine_needs


class ClusterOptions(BaseModel):
    """What an operator says of a cluster, whatever its kind: `--set key=value`, or keys of `[clusters.NAME]`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str = Field(
        default="",
        description="The Python, 3.11 or newer, of workers on the cluster's nodes. Empty: the server's own Python if "
        "its path exists on the node, else `python3`.",
    )
    work_dir: str = Field(
        default="",
        description="A directory on each node for running jobs and caches. Empty: TMPDIR of the node, or /tmp.",
    )
    server_url: str = Field(
        default="",
        pattern=r"^(https?://[^\s/]+(/\S*)?)?$",
        description="Where workers on the cluster reach this server. Empty: the setting advertise_url.",
    )
    files: FilesBy = Field(
        default=FilesBy.SERVER,
        description="How checkpoints and results of jobs on the cluster are stored: `server`, over HTTP; `shared`, if "
        "the nodes have the server's directories at the same paths, and its user may write there; or `object_root`, "
        "checkpoints straight to the object store of the setting `object_root`, and results over HTTP. The job's "
        "Python then needs `trainmaster[s3]`, and every job sees the server's `AWS_*` variables; jobs of accounts "
        "other than the default one are refused, unless the setting shared_uid allows them.",
    )
    poll_s: float = Field(default=1.0, ge=0.1, le=60, description="How often the engine is asked for its jobs.")

    @property
    def runs_images(self) -> bool:
        """Whether clusters whose kind does not always run images do so."""
        return False

    @property
    def own_image(self) -> str:
        """The image of jobs that name none, on clusters that run images."""
        return ""

    @property
    def submits_as_users(self) -> bool:
        """Whether jobs of an account that has a uid are submitted as that user."""
        return False

    @property
    def job_nodes_apart(self) -> bool:
        """Whether every node of a job runs on another node of the cluster."""
        return False


class ClusterEngine(Protocol):
    """A client of one engine. Every method may take long, is called from any thread, and raises EngineAwayError if the
    engine does not answer in time; none changes anything when it is repeated."""

    kind: str
    node_variable: str
    """The variable by which a worker learns the number of its node, from 0."""

    def facts(self) -> EngineFacts:
        """What answers, and its version; never raises, a problem is in the facts, with what to do about it."""

    def document(self, launch: EngineLaunch) -> str:
        """What `start` sends, as text that a person can read, without secrets. Pure: asks nobody."""

    def start(self, launch: EngineLaunch, *, is_new: bool = False) -> str:
        """Hand an attempt to the engine's queue, unless the engine, asked now, has it; returns its handle. `is_new`:
        nobody has tried before, so it need not be asked. Raises EngineRefusedError."""

    def find(self, name: str) -> EngineJob | None:
        """The attempt of this name, asked now: also one that `jobs` does not list yet. None: the engine has none."""

    def jobs(self) -> Mapping[str, EngineJob]:
        """All attempts of this server's instance by name, in one request, however many there are.

        Ended ones stay listed for as long as the engine knows them, or until `forget`.
        """

    def wait(self, timeout_s: float) -> None:
        """Return when `jobs` may have changed, at the latest after this time."""

    def cancel(self, handle: str) -> None:
        """End a job, whether it waits or runs; its processes get SIGTERM, then SIGKILL."""

    def forget(self, handle: str) -> None:
        """Remove what an ended job has left on the engine."""

    def nodes(self) -> Sequence[Node]:
        """The nodes that jobs of this backend may run on, with what is held on each."""

    def close(self) -> None: ...


@runtime_checkable
class StandsIn(Protocol):
    """An engine that runs some attempts as something else than they ask for."""

    def instead(self, launch: EngineLaunch) -> str:
        """What runs an attempt that was just started, and why not what it asks for; empty: it is what it asks for."""


@runtime_checkable
class ShowsForeignJobs(Protocol):
    """An engine that can show what others run there."""

    foreign: ForeignJobs


_UNFIT = re.compile(r"[^a-z0-9-]+")


def engine_name(instance: str, attempt_id: str) -> str:
    """The name of an attempt on every engine: `tm-<instance>-<job>-<number>`.

    >>> engine_name("k3f9", "job-wk96lltjcfl9.2")
    'tm-k3f9-job-wk96lltjcfl9-2'
    """
    return _UNFIT.sub("-", f"{engine_prefix(instance)}{attempt_id}".lower())[:63].rstrip("-")


def engine_prefix(instance: str) -> str:
    """What the names of all attempts of an instance begin with."""
    return f"tm-{instance}-"
