"""Options for jobs that run in containers."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import ClassVar

from trainmaster.protocol.launch import CONTAINER
from trainmaster.trainer.options.common import JobDocument, Option, is_texts, is_whole, require
from trainmaster.trainer.types import CustomTrainerContainer

ABSOLUTE = r"/[^\0]*"
VOLUME_SOURCE = rf"{ABSOLUTE}|[A-Za-z0-9][A-Za-z0-9_.-]*"


@dataclass(frozen=True)
class TrainerCommand(Option):
    """What to start in the image, in place of its entry point."""

    command: list[str]

    trainers: ClassVar[tuple[type, ...]] = (CustomTrainerContainer,)

    def __post_init__(self) -> None:
        require(self, "command", bool(self.command) and is_texts(self.command), "a list of text, and not empty")

    def _change(self, job: JobDocument) -> None:
        _container(self, job)["argv"] = list(self.command)


@dataclass(frozen=True)
class TrainerArgs(Option):
    """The arguments of what is started in the image, in place of the image's own."""

    args: list[str]

    trainers: ClassVar[tuple[type, ...]] = (CustomTrainerContainer,)

    def __post_init__(self) -> None:
        require(self, "args", is_texts(self.args), "a list of text")

    def _change(self, job: JobDocument) -> None:
        _container(self, job)["args"] = list(self.args)


@dataclass(frozen=True)
class Volume:
    """A directory that a container sees."""

    source: str
    """An absolute path on the server's machine, inside its data roots; or the name of a volume of the engine."""
    target: str
    """Absolute, in the container."""
    read_only: bool = False

    def __post_init__(self) -> None:
        _require_text(self, "source", "an absolute path, or the name of a volume", VOLUME_SOURCE)
        _require_text(self, "target", "an absolute path", ABSOLUTE)
        require(self, "read_only", isinstance(self.read_only, bool), "true or false")


@dataclass(frozen=True)
class Volumes(Option):
    """Directories that the job's containers see."""

    volumes: list[Volume]

    backends: ClassVar[tuple[str, ...]] = (CONTAINER,)

    def __post_init__(self) -> None:
        given = self.volumes
        fine = isinstance(given, list | tuple) and all(isinstance(each, Volume) for each in given)
        require(self, "volumes", fine, "a list of Volume")
        targets = [each.target for each in given]
        require(self, "volumes", len(set(targets)) == len(targets), "at different targets")

    def _change(self, job: JobDocument) -> None:
        _workload(job).setdefault("volumes", []).extend(asdict(each) for each in self.volumes)


@dataclass(frozen=True)
class Limits(Option):
    """What bounds a container beside `resources_per_node`; what is None is the server's own default.

    The user that it runs as is no choice of a job's: the server has to read and remove what the container writes.
    """

    shm_mb: int | None = None
    """Of /dev/shm, through which data loaders pass their batches."""
    pids: int | None = None
    """Processes and threads."""

    backends: ClassVar[tuple[str, ...]] = (CONTAINER,)

    def __post_init__(self) -> None:
        for name in ("shm_mb", "pids"):
            value = getattr(self, name)
            require(self, name, value is None or is_whole(value, least=1), "a whole number of at least 1")

    def _change(self, job: JobDocument) -> None:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        _workload(job).setdefault("container", {}).update(given)


def _require_text(holder: object, field: str, wanted: str, pattern: str) -> None:
    value = getattr(holder, field)
    require(holder, field, isinstance(value, str) and bool(re.fullmatch(pattern, value)), wanted)


def _workload(job: JobDocument) -> JobDocument:
    """What the options write into; a job of a built-in trainer has none until something is to be said of it."""
    workload: JobDocument = job.setdefault("workload", {"kind": "trainer"})
    return workload


def _container(option: Option, job: JobDocument) -> JobDocument:
    workload = _workload(job)
    if workload["kind"] != "container":
        raise ValueError(
            f"the option {type(option).__name__} needs a CustomTrainerContainer, or a runtime with an image"
        )
    return workload
