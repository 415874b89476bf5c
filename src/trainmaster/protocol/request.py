"""What the server tells the workers of an attempt: `request.json` (immutable, version 1) and `control.json`."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainmaster.protocol.launch import Launch, Step, launch_from_json, launch_to_json
from trainmaster.protocol.reasons import StopCause

RUN_DIRECTORY_VERSION = 1
"""Written into every request. A reader accepts this version and the one before it."""

_FIRST_GROUP = 0x7000_0000
_GROUPS = 0x0FFF_0000
"""Numbers that neither systems nor user namespaces give to groups of their own."""
CONFINED_CACHES = ".confined"
"""Holds the caches of accounts whose jobs stay in containers, beside those of the others. No account has this name."""


class UnsupportedVersionError(ValueError):
    """This run directory was written by a version that is too old or too new to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAssignment:
    """One node of an attempt and what it may use there."""

    node_id: str
    address: str = "127.0.0.1"
    """Where the other nodes of the gang reach this one."""
    gpus: tuple[str, ...] = ()
    """What CUDA_VISIBLE_DEVICES shall hold, in order."""
    cpu_cores: int = 0
    """How many are booked for it there; 0: the job did not say."""
    memory_mb: int = 0
    """How much is booked for it there; 0: the job did not say."""
    port: int = 0
    """Where a service of its listens; 0: where the worker finds that a port is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRequest:
    """All that the workers of one attempt are told. Nobody changes it after it was written."""

    job_id: str
    attempt: int
    token: str
    """Held by this attempt's workers alone: what they report with. Ranks never see it; in a courier's own copy of the
    request it is empty."""
    rank_token: str
    """Held by this attempt's ranks: proves ownership at a checkpoint's commit, and is good for nothing else."""
    launch: Launch
    nodes: tuple[NodeAssignment, ...]
    checkpoint_dir: str
    output_dir: str
    owner_file: str
    resume_from: str | None = None
    max_runtime_s: float | None = None
    """Wall time of this attempt's ranks; past it they are stopped with the cause `timeout`."""
    hint_socket: str | None = None
    server_url: str | None = None
    """Set when the worker shall move its streams over HTTP; None when it shares the server's files."""
    blob_dir: str | None = None
    """Where shipped files lie by their digest; over HTTP they are fetched from the server instead."""
    uid: int | None = None
    """The system's user as whom the ranks run; None means the worker's own. A worker that cannot become that user
    runs nothing."""
    log_cap_bytes: int = 0
    """How much a log may hold; of one that reaches it the middle is removed. 0: as much as it likes."""
    confined: bool = False
    """Nothing of the job may run outside of a container: its account has no user of its own on this machine."""
    cache_dir: str | None = None
    """Where what was fetched and prepared is kept for all jobs of the account; None in requests of older servers."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the server sets for every process: what may be fetched, and from where."""
    labels: Mapping[str, str] = field(default_factory=dict)
    version: int = RUN_DIRECTORY_VERSION

    @property
    def attempt_id(self) -> str:
        """Unique over all jobs: the job and the attempt's number."""
        return f"{self.job_id}.{self.attempt}"

    @property
    def group(self) -> int:
        """The number of a group of users that only the processes of this attempt are in, where they run as a user.

        Jobs of an account run as one user: by the group, the kernel tells them apart.
        """
        digest = hashlib.sha256(self.rank_token.encode()).digest()
        return _FIRST_GROUP + int.from_bytes(digest[:8], "big") % _GROUPS

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return len(self.nodes) * self.launch.ranks_per_node

    def to_json(self) -> dict[str, Any]:
        """The plain form, as in `request.json`."""
        return {**asdict(self), "launch": launch_to_json(self.launch)}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> AttemptRequest:
        """The request of a plain form.

        Raises:
            UnsupportedVersionError: the document's version is neither ours nor the one before.
        """
        check_version(document)
        known = {name: document[name] for name in AttemptRequest.__dataclass_fields__ if name in document}
        known["launch"] = launch_from_json(document["launch"])
        known["nodes"] = tuple(
            NodeAssignment(
                node_id=node["node_id"],
                address=node.get("address", "127.0.0.1"),
                gpus=tuple(node.get("gpus", ())),
                cpu_cores=node.get("cpu_cores", 0),
                memory_mb=node.get("memory_mb", 0),
                port=node.get("port", 0),
            )
            for node in document["nodes"]
        )
        return AttemptRequest(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """What a worker is told of the inside of a container, where names and numbers are others than outside."""

    address: str | None = None
    """Where the other nodes of the gang reach this one."""
    gpus: tuple[str, ...] | None = None
    """What CUDA_VISIBLE_DEVICES shall hold."""
    port: int | None = None
    """Where a service listens, because it is published there."""
    entrypoint: tuple[str, ...] = ()
    """What the image starts: for a last step that names no program."""
    command: tuple[str, ...] = ()
    """What the image gives to that, or starts where there is no entry point; a step may put its own in place."""
    working_directory: str | None = None
    """Where it runs that; None: where any step runs."""
    through: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Step -> what it is run through: the worker is outside of the step's container, and this leads into it."""
    onward: tuple[str, ...] = ()
    """What the worker becomes when the steps that have images of their own are done: it leads into the node's
    container, where another one goes on. Empty: it does everything itself."""
    first_step: str | None = None
    """Where the worker goes on from one outside, which has claimed the node; None: it has it from the beginning."""

    def amend(self, request: AttemptRequest, node: int) -> AttemptRequest:
        """The request as it holds for a node in there."""
        own = request.nodes[node]
        own = replace(
            own,
            address=own.address if self.address is None else self.address,
            gpus=own.gpus if self.gpus is None else self.gpus,
            port=own.port if self.port is None else self.port,
        )
        nodes = (*request.nodes[:node], own, *request.nodes[node + 1 :])
        launch, last = request.launch, request.launch.steps[-1]
        argv = last.argv or (*self.entrypoint, *(last.args or self.command))
        steps = tuple(map(self._led, (*launch.steps[:-1], replace(last, argv=argv, args=()))))
        if self.first_step is not None:
            steps = tuple(itertools.dropwhile(lambda step: step.name != self.first_step, steps))
        if self.onward:
            # The working directory and what is shipped into it are for whoever goes on, where it goes on.
            own_steps = (step for step in steps[:-1] if step.name in self.through)
            launch = replace(launch, steps=(*own_steps, steps[-1]), working_directory=None, blobs=())
        elif not last.argv and not self.through:
            directory = launch.working_directory or self.working_directory
            launch = replace(launch, steps=steps, working_directory=directory)
        else:
            # Of a worker that is outside of the container, the directory in there is no business.
            directory = None if self.through else launch.working_directory
            launch = replace(launch, steps=steps, working_directory=directory)
        return replace(request, nodes=nodes, launch=launch)

    def to_json(self) -> dict[str, Any]:
        """The plain form."""
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Within:
        """What a plain form says."""
        gpus = document.get("gpus")
        return Within(
            address=document.get("address"),
            gpus=None if gpus is None else tuple(gpus),
            port=document.get("port"),
            entrypoint=tuple(document.get("entrypoint", ())),
            command=tuple(document.get("command", ())),
            working_directory=document.get("working_directory"),
            through={step: tuple(command) for step, command in document.get("through", {}).items()},
            onward=tuple(document.get("onward", ())),
            first_step=document.get("first_step"),
        )

    def _led(self, step: Step) -> Step:
        """A step as the worker starts it; what leads into a container knows the Python there."""
        through = self.through.get(step.name)
        return step if through is None else replace(step, through=through, python=False)


def check_version(document: Mapping[str, Any]) -> None:
    """Refuse a document of a version that this code cannot read."""
    version = document.get("version")
    if version not in (RUN_DIRECTORY_VERSION, RUN_DIRECTORY_VERSION - 1):
        raise UnsupportedVersionError(
            f"run directory version {version!r}: this version of Trainmaster reads "
            f"{RUN_DIRECTORY_VERSION - 1} and {RUN_DIRECTORY_VERSION}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What the server asks of a running attempt. The highest `seq` counts; a stop is never taken back."""

    seq: int
    stop: StopCause | None = None
    save: bool = False
    """With a stop: save first. Without one: save at the next step and go on."""
    grace_s: float = 30.0
    """From now until the ranks are killed."""
    dump_stacks: bool = False
    """Make the ranks print their stacks (SIGUSR1 to ranks that registered for it; else where they are)."""

    def to_json(self) -> dict[str, Any]:
        """The plain form."""
        return {
            "seq": self.seq,
            "stop": self.stop,
            "save": self.save,
            "grace_s": self.grace_s,
            "dump_stacks": self.dump_stacks,
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Control:
        """The control of a plain form."""
        stop = document.get("stop")
        return Control(
            seq=int(document["seq"]),
            stop=StopCause(stop) if stop else None,
            save=bool(document.get("save", False)),
            grace_s=float(document.get("grace_s", 30.0)),
            dump_stacks=bool(document.get("dump_stacks", False)),
        )
