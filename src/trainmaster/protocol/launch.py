"""A compiled workload: everything that a backend and a worker need to know about what to run.

A workload kind compiles a job's spec into a `Launch`; a backend never sees anything else of the
workload. All values are plain, so that a launch survives a trip through JSON unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

LOCAL = "local"
"""The backend whose jobs are processes of the server's machine."""
CONTAINER = "container"
"""The backend whose jobs run in containers of that machine."""

PACKAGES_FILE = "packages.json"
"""Among a launch's inputs: `packages`, which are requirements as pip takes them, and `index_urls`."""
ENVIRONMENT_FILE = "environment.json"
"""In the node's prepared directory: `path`, the Python environment that the ranks run in."""


class PullPolicy(StrEnum):
    """When an image is fetched from its registry."""

    IF_NOT_PRESENT = "IfNotPresent"
    ALWAYS = "Always"
    NEVER = "Never"


class Lifetime(StrEnum):
    """How a workload is meant to end."""

    BATCH = "batch"  # ends by itself; exit 0 is success
    SERVICE = "service"  # serves until it is stopped; has an endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of a machine a container may have; None: as much as there is."""

    cpu_cores: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """Containers that run beside a step's own, of the same image. They begin with it, and none outlives it."""

    count: int
    argv: tuple[str, ...]
    """What each of them runs, as the step does its own; its number comes last."""
    size: Size
    """Of each of them."""
    head: Size
    """Of the step's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of a launch. All steps but the last prepare; the last is the workload itself."""

    name: str
    """Names the step's log files: lower-case letters, digits and dashes."""
    argv: tuple[str, ...]
    """Empty: what the image itself runs."""
    args: tuple[str, ...] = ()
    """Where argv is empty: what the image's entry point is given in place of the image's own arguments."""
    python: bool = False
    """Run argv with a Python interpreter in front: the worker's own; for the last step that of the environment which a
    preparing step made, if one did."""
    from_inputs: bool = False
    """The first of argv is one of the launch's inputs."""
    tokens: bool = False
    """Give it the tokens that were passed on with the job. For our own steps that fetch; the user's never see them."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variable -> reference to the sealed secret with its value; given to this step alone."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of this step alone."""
    timeout_s: float | None = None
    """How long it may take before it is ended; None: as long as it likes."""
    image: str | None = None
    """The container image that it runs in by itself, before all steps without one; None: where the others run."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Directory in that image's container -> the path, below the node's prepared directory, of what it leaves there."""
    through: tuple[str, ...] = ()
    """What is started in its place and leads into its container: a worker that is outside of that adds it. It reads the
    variables of what it starts from its standard input."""
    gang: Gang | None = None
    """What runs beside it where it has an image of its own; None: it runs by itself."""

    @property
    def guarded(self) -> bool:
        """Whether it is a program of ours with tokens or secrets that the job's own code must not see."""
        return self.python and (self.tokens or bool(self.secrets))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobFile:
    """A file that the client shipped by content, placed into the working directory before any step runs."""

    sha256: str
    path: str
    """Relative to the working directory."""
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A directory of the machine, or a volume of the engine's own, that a container sees too."""

    source: str
    """An absolute path on the node, or the name of a volume."""
    target: str
    """Absolute, in the container."""
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerWish:
    """What a job wants of its containers beyond the image."""

    pull_policy: str | None = None
    """When the image is fetched; None: as the backend does."""
    auto_remove: bool = True
    """Whether a container goes when it has ended."""
    shm_mb: int | None = None
    """How much its /dev/shm may hold; None: the backend's own choice."""
    pids: int | None = None
    """How many processes and threads it may have; None: as many as the engine lets it."""
    runtime: str | None = None
    """The engine that it must be; None: whichever the backend has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """When a service counts as ready: `GET path` on its port answers with a status below 400."""

    path: str = "/"
    timeout_s: float = 600.0
    interval_s: float = 0.1
    first_node_only: bool = False
    """Only node 0 serves; the others of a gang are ready when their ranks run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What runs, once per rank, on each node of an attempt."""

    kind: str
    steps: tuple[Step, ...]
    image: str | None = None
    """The container image that the ranks run in, on a backend that runs images; None: the backend's own choice."""
    volumes: tuple[Volume, ...] = ()
    container: ContainerWish = field(default_factory=ContainerWish)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the workload's kind sets. The user's own are secrets."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variable -> reference to the sealed secret with its value; the worker is given the values apart."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Small text files by their plain names, for every rank to read in the directory of its inputs."""
    prepared: Mapping[str, str] = field(default_factory=dict)
    """Variable -> the path, below the node's prepared directory, of what a preparing step leaves there."""
    blobs: tuple[BlobFile, ...] = ()
    working_directory: str | None = None
    """Absolute, on the node; None means a fresh directory inside the run directory."""
    remove_working_directory: bool = False
    """Whether the fresh directory goes when the attempt has ended."""
    ranks_per_node: int = 1
    lifetime: Lifetime = Lifetime.BATCH
    port_environment: str | None = None
    """For a service: the variable that receives the port which the worker chose."""
    readiness: Readiness | None = None
    reports_phases: bool = False
    """False: the job is TRAINING from its process's start. True: from the first phase it reports."""
    can_save: bool | None = None
    """Whether it saves when asked to stop; None means: once it has told us so through the reporter."""
    grace_s: float = 30.0
    """Between being asked to stop and being killed."""
    retry_exit_codes: tuple[int, ...] = ()
    """Exit codes of the workload that count as transient."""


def launch_to_json(launch: Launch) -> dict[str, Any]:
    """The plain form of a launch, as stored in `request.json`."""
    return asdict(launch)


def launch_from_json(document: Mapping[str, Any]) -> Launch:
    """The launch of a plain form. Unknown keys are ignored: an older reader meets a newer writer."""
    known = {name: document[name] for name in Launch.__dataclass_fields__ if name in document}
    known["steps"] = tuple(map(_step_from, known["steps"]))
    known["blobs"] = tuple(_from_known(BlobFile, blob) for blob in known.get("blobs", ()))
    known["volumes"] = tuple(_from_known(Volume, volume) for volume in known.get("volumes", ()))
    known["container"] = _from_known(ContainerWish, known.get("container", {}))
    known["retry_exit_codes"] = tuple(known.get("retry_exit_codes", ()))
    known["lifetime"] = Lifetime(known.get("lifetime", Lifetime.BATCH))
    if known.get("readiness") is not None:
        known["readiness"] = _from_known(Readiness, known["readiness"])
    return Launch(**known)


def _step_from(document: Mapping[str, Any]) -> Step:
    lists = {name: tuple(document.get(name, ())) for name in ("argv", "args", "through")}
    known = {**document, **lists}
    if (gang := document.get("gang")) is not None:
        sizes = {name: _from_known(Size, gang[name]) for name in ("size", "head")}
        known["gang"] = _from_known(Gang, {**gang, **sizes, "argv": tuple(gang["argv"])})
    step: Step = _from_known(Step, known)
    return step


def _from_known(kind: type[Any], document: Mapping[str, Any]) -> Any:
    return kind(**{name: document[name] for name in kind.__dataclass_fields__ if name in document})


# What names a job class's run: project, group and name, each one segment of the path of its checkpoints.

POINTERS = ("latest", "best")
"""Files beside the checkpoints of a run that name one of them. Nothing else may be called like that."""

SEGMENT_PATTERN = r"(?!(?:latest|best)$)[A-Za-z0-9_][A-Za-z0-9 ._+=@,-]{0,127}"
"""What is neither a pointer, nor anything that a file system or an object store reads in a way of its own."""
SEGMENT_SAYS = (
    "has letters, digits, spaces and . _ + = @ , - begins with a letter, a digit or _, and is neither latest nor best"
)

RUN_FILE = "run.json"
"""The input of a launch that tells the runner of job classes what to run."""

_segment = re.compile(SEGMENT_PATTERN)


def is_segment(text: str) -> bool:
    """Whether a text can be a project, a group or a name."""
    return _segment.fullmatch(text) is not None
