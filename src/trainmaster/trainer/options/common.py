"""What an option is, the options of every backend, and those for jobs that run in containers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from trainmaster.protocol.launch import CONTAINER, KUBERNETES
from trainmaster.trainer.types import CustomTrainerContainer

__all__ = [
    "ActiveDeadlineSeconds",
    "AllowWaitingForNodes",
    "Annotations",
    "Labels",
    "Limits",
    "MaxRetries",
    "Name",
    "Option",
    "Preemptible",
    "Priority",
    "Queue",
    "TrainerArgs",
    "TrainerCommand",
    "Volume",
    "Volumes",
]

JobDocument = dict[str, Any]
"""A submission, as docs/reference/job-fields.md has it."""


class Option(ABC):
    """One thing that is asked of a job."""

    backends: ClassVar[tuple[str, ...]] = ()
    """The kinds of backend that can do it; none named: all of them."""
    trainers: ClassVar[tuple[type, ...]] = ()
    """The trainers that have a use for it; none named: all of them."""

    def __call__(self, job_spec: JobDocument, trainer: object = None, backend: str | None = None) -> None:
        """Ask it of a job. Raises ValueError if that backend cannot do it, or the trainer has no use for it."""
        name = type(self).__name__
        if self.backends and backend is not None and backend not in self.backends:
            raise ValueError(f"the option {name} needs the backend {_either(self.backends)}, and this one is {backend}")
        if self.trainers and trainer is not None and not isinstance(trainer, self.trainers):
            wanted = _either(each.__name__ for each in self.trainers)
            raise ValueError(f"the option {name} needs a {wanted}, and the trainer is a {type(trainer).__name__}")
        self._change(job_spec)

    @abstractmethod
    def _change(self, job: JobDocument) -> None: ...


class SchedulingOption(Option):
    """An option with one field, which is a field of `scheduling_config`."""

    setting: ClassVar[str] = ""
    """What that is called there; empty: the same."""

    def _change(self, job: JobDocument) -> None:
        name = fields(self)[0].name  # type: ignore[arg-type]
        job.setdefault("scheduling_config", {})[self.setting or name] = getattr(self, name)


def require(holder: object, field: str, fine: bool, wanted: str) -> None:
    if not fine:
        raise ValueError(f"{type(holder).__name__}: {field} must be {wanted}, not {getattr(holder, field)!r}")


def is_whole(value: object, *, least: int, most: int | None = None) -> bool:
    """Whether it is a whole number in that range; truth values are none."""
    return type(value) is int and value >= least and (most is None or value <= most)


def is_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def is_text_to_text(value: object) -> bool:
    return isinstance(value, dict) and is_texts([*value.keys(), *value.values()])


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)


ANNOTATION_PREFIX = "annotations/"
"""Jobs have labels only; annotations are those below this prefix."""


@dataclass(frozen=True)
class Name(Option):
    """The job's name, unique in the account; made up when nobody gives one."""

    name: str

    def __post_init__(self) -> None:
        require(self, "name", isinstance(self.name, str) and bool(self.name.strip()), "a name")

    def _change(self, job: JobDocument) -> None:
        job["name"] = job["handle"] = self.name


@dataclass(frozen=True)
class Labels(Option):
    """Labels, for finding jobs again."""

    labels: dict[str, str]

    def __post_init__(self) -> None:
        require(self, "labels", is_text_to_text(self.labels), "a dictionary from text to text")

    def _change(self, job: JobDocument) -> None:
        job.setdefault("labels", {}).update(self.labels)


@dataclass(frozen=True)
class Annotations(Option):
    """Notes on the job. They are kept as labels below `annotations/`, and are as short as labels are."""

    annotations: dict[str, str]

    def __post_init__(self) -> None:
        require(self, "annotations", is_text_to_text(self.annotations), "a dictionary from text to text")

    def _change(self, job: JobDocument) -> None:
        notes = {f"{ANNOTATION_PREFIX}{key}": value for key, value in self.annotations.items()}
        job.setdefault("labels", {}).update(notes)


@dataclass(frozen=True)
class ActiveDeadlineSeconds(SchedulingOption):
    """How long it may run: each attempt is stopped after so long, and time spent waiting or paused is free."""

    seconds: int

    setting: ClassVar[str] = "max_runtime_seconds"

    def __post_init__(self) -> None:
        require(self, "seconds", is_whole(self.seconds, least=1), "a whole number of at least 1")


@dataclass(frozen=True)
class Queue(SchedulingOption):
    """The queue that it waits in."""

    queue: str

    def __post_init__(self) -> None:
        require(self, "queue", isinstance(self.queue, str) and bool(self.queue.strip()), "the name of a queue")


@dataclass(frozen=True)
class Priority(SchedulingOption):
    """Which jobs of a queue go first: 0 to 10, and 5 where nobody says."""

    priority: int

    def __post_init__(self) -> None:
        require(self, "priority", is_whole(self.priority, least=0, most=10), "a whole number from 0 to 10")


@dataclass(frozen=True)
class MaxRetries(SchedulingOption):
    """New attempts after failures that are not the program's own, each from the last checkpoint."""

    max_retries: int

    def __post_init__(self) -> None:
        require(self, "max_retries", is_whole(self.max_retries, least=0, most=100), "a whole number from 0 to 100")


@dataclass(frozen=True)
class AllowWaitingForNodes(SchedulingOption):
    """Whether it may wait for nodes that are not there yet; otherwise a job that no node could hold is refused."""

    allow: bool = True

    setting: ClassVar[str] = "allow_waiting_for_nodes"

    def __post_init__(self) -> None:
        require(self, "allow", isinstance(self.allow, bool), "true or false")


@dataclass(frozen=True)
class Preemptible(SchedulingOption):
    """Whether jobs of higher priority may take its place."""

    preemptible: bool = True

    def __post_init__(self) -> None:
        require(self, "preemptible", isinstance(self.preemptible, bool), "true or false")


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

    backends: ClassVar[tuple[str, ...]] = (CONTAINER, KUBERNETES)

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
