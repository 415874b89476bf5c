"""What the server sends to the workers of an attempt: `request.json` (immutable, version 1) and `control.json`."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from trainmaster.protocol.documents import JsonRecord, from_json
from trainmaster.protocol.launch import Launch
from trainmaster.protocol.reasons import StopCause

RUN_DIRECTORY_VERSION = 1
"""Written into every request. Readers accept this version and the one before it."""

_FIRST_GROUP = 0x7000_0000
_GROUPS = 0x0FFF_0000
"""A range that neither systems nor user namespaces assign to groups."""
CONFINED_CACHES = ".confined"
"""The caches of accounts whose jobs must stay in containers. No account has this name."""


class UnsupportedVersionError(ValueError):
    """This run directory was written by a version that is too old or too new to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAssignment:
    """One node of an attempt and what it may use there."""

    node_id: str
    address: str = "127.0.0.1"
    """Where the other nodes reach this one."""
    gpus: tuple[str, ...] = ()
    """The value of CUDA_VISIBLE_DEVICES, in order."""
    cpu_cores: int = 0
    """Booked for the attempt; 0: the job did not say."""
    memory_mb: int = 0
    """Booked for the attempt; 0: the job did not say."""
    port: int = 0
    """Where its service listens; 0: the worker chooses a free port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """What the engine of a cluster is asked for, for each node of the attempt, and whose the attempt is."""

    account: str
    job_name: str
    """As its user wrote it: any text."""
    handle: str = ""
    """The name by which its user finds it; empty: it has none."""
    uid: int | None = None
    """The user that submits it; None: the server's."""
    priority: int = 5
    gpus: int = 0
    gpu_type: str | None = None
    gpu_memory_min_mb: int = 0
    cpu_cores: int = 0
    memory_mb: int = 0
    storage_mb: int = 0
    capabilities: tuple[str, ...] = ()
    """Required of the node."""
    affinity: tuple[str, ...] = ()
    """Labels of nodes to prefer."""
    anti_affinity: tuple[str, ...] = ()
    """Labels of nodes to avoid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRequest(JsonRecord):
    """Everything that the workers of one attempt know of it. Never changed after it was written."""

    job_id: str
    attempt: int
    token: str
    """The workers report with it. Ranks never see it; a courier's copy of the request has it empty."""
    rank_token: str
    """Held by the ranks: proves ownership when a checkpoint is committed, and is good for nothing else."""
    launch: Launch
    nodes: tuple[NodeAssignment, ...]
    checkpoint_dir: str
    output_dir: str
    owner_file: str
    resume_from: str | None = None
    max_runtime_s: float | None = None
    """Wall time of the ranks; past it they are stopped with the cause `timeout`."""
    engine_needs: EngineNeeds | None = None
    """Set if the engine of a cluster places the attempt; None if the scheduler did."""
    hint_socket: str | None = None
    server_url: str | None = None
    """Set if the worker moves its streams over HTTP; None if it shares the server's files."""
    blob_dir: str | None = None
    """Shipped files by their digest; over HTTP they are fetched from the server instead."""
    uid: int | None = None
    """The system user that the ranks run as; None: the worker's. A worker that cannot become it runs nothing."""
    log_cap_bytes: int = 0
    """The middle of a log that reaches this size is removed; 0: no limit."""
    confined: bool = False
    """Nothing of the job may run outside of a container: its account has no user on this machine."""
    cache_dir: str | None = None
    """What was fetched and prepared, for all jobs of the account; None in requests of older servers."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the server sets for every process: what may be fetched, and from where."""
    labels: Mapping[str, str] = field(default_factory=dict)
    version: int = RUN_DIRECTORY_VERSION

    @property
    def attempt_id(self) -> str:
        """Unique over all jobs."""
        return f"{self.job_id}.{self.attempt}"

    @property
    def group(self) -> int:
        """A group id that only this attempt's processes have, where the jobs of an account share a user."""
        digest = hashlib.sha256(self.rank_token.encode()).digest()
        return _FIRST_GROUP + int.from_bytes(digest[:8], "big") % _GROUPS

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.launch.ranks_per_node

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Raises UnsupportedVersionError if the version is neither ours nor the one before."""
        version = document.get("version")
        if version not in (RUN_DIRECTORY_VERSION, RUN_DIRECTORY_VERSION - 1):
            raise UnsupportedVersionError(
                f"run directory version {version!r}: this version of Trainmaster reads "
                f"{RUN_DIRECTORY_VERSION - 1} and {RUN_DIRECTORY_VERSION}"
            )
        return from_json(cls, document)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOverrides(JsonRecord):
    """What differs inside a container, where names and numbers are not those outside."""

    address: str | None = None
    """Where the other nodes reach this one."""
    gpus: tuple[str, ...] | None = None
    """The value of CUDA_VISIBLE_DEVICES."""
    port: int | None = None
    """Where a service listens: this port is published."""
    entrypoint: tuple[str, ...] = ()
    """The image's entry point, for a last step that names no program."""
    command: tuple[str, ...] = ()
    """The image's arguments for it, or its command if it has no entry point; a step may override it."""
    working_directory: str | None = None
    """The image's; None: where any step runs."""
    through: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Step -> the command that leads into its container: the worker is outside of it."""
    onward: tuple[str, ...] = ()
    """What the worker becomes when the steps with images of their own are done: a program that leads into the node's
    container, where another worker continues. Empty: this worker does everything itself."""
    first_step: str | None = None
    """Where the worker continues after one outside, which has claimed the node; None: it starts from the beginning."""

    def amend(self, request: AttemptRequest, node: int) -> AttemptRequest:
        differing = {"address": self.address, "gpus": self.gpus, "port": self.port}
        known: dict[str, Any] = {name: value for name, value in differing.items() if value is not None}
        own = replace(request.nodes[node], **known)
        nodes = (*request.nodes[:node], own, *request.nodes[node + 1 :])
        launch, last = request.launch, request.launch.steps[-1]
        argv = last.argv or (*self.entrypoint, *(last.args or self.command))
        # The program that leads into a container knows the Python there.
        steps = tuple(
            replace(step, through=self.through[step.name], python=False) if step.name in self.through else step
            for step in (*launch.steps[:-1], replace(last, argv=argv, args=()))
        )
        if self.first_step is not None:
            steps = tuple(itertools.dropwhile(lambda step: step.name != self.first_step, steps))
        if self.onward:
            # The worker that continues stages the working directory and the shipped files, where it runs.
            own_steps = (step for step in steps[:-1] if step.name in self.through)
            launch = replace(launch, steps=(*own_steps, steps[-1]), working_directory=None, blobs=())
        else:
            # A worker outside of the container does not use the directory inside.
            directory = None if self.through else launch.working_directory
            if not last.argv and not self.through:
                directory = directory or self.working_directory
            launch = replace(launch, steps=steps, working_directory=directory)
        return replace(request, nodes=nodes, launch=launch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(JsonRecord):
    """What the server asks of a running attempt. The highest `seq` wins; a stop is never taken back."""

    seq: int
    stop: StopCause | None = None
    save: bool = False
    """With a stop: save first. Without: save at the next step and continue."""
    grace_s: float = 30.0
    """From now until the ranks are killed."""
    dump_stacks: bool = False
    """Make the ranks print their stacks (SIGUSR1, to ranks that registered a handler)."""
