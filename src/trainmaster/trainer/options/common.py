"""Options that every backend knows: names, labels, and how the queue treats the job."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.trainer.options.base import JobDocument, Option, is_text_to_text, is_whole, require

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
class ActiveDeadlineSeconds(Option):
    """How long it may run: each attempt is stopped after so long, and time spent waiting or paused is free."""

    seconds: int

    def __post_init__(self) -> None:
        require(self, "seconds", is_whole(self.seconds, least=1), "a whole number of at least 1")

    def _change(self, job: JobDocument) -> None:
        job.setdefault("scheduling_config", {})["max_runtime_seconds"] = self.seconds


@dataclass(frozen=True)
class Queue(Option):
    """The queue that it waits in."""

    queue: str

    def __post_init__(self) -> None:
        require(self, "queue", isinstance(self.queue, str) and bool(self.queue.strip()), "the name of a queue")

    def _change(self, job: JobDocument) -> None:
        job.setdefault("scheduling_config", {})["queue"] = self.queue


@dataclass(frozen=True)
class Priority(Option):
    """Which jobs of a queue go first: 0 to 10, and 5 where nobody says."""

    priority: int

    def __post_init__(self) -> None:
        require(self, "priority", is_whole(self.priority, least=0, most=10), "a whole number from 0 to 10")

    def _change(self, job: JobDocument) -> None:
        job.setdefault("scheduling_config", {})["priority"] = self.priority


@dataclass(frozen=True)
class MaxRetries(Option):
    """New attempts after failures that are not the program's own, each from the last checkpoint."""

    max_retries: int

    def __post_init__(self) -> None:
        require(self, "max_retries", is_whole(self.max_retries, least=0, most=100), "a whole number from 0 to 100")

    def _change(self, job: JobDocument) -> None:
        job.setdefault("scheduling_config", {})["max_retries"] = self.max_retries


@dataclass(frozen=True)
class AllowWaitingForNodes(Option):
    """Whether it may wait for nodes that are not there yet; otherwise a job that no node could hold is refused."""

    allow: bool = True

    def __post_init__(self) -> None:
        require(self, "allow", isinstance(self.allow, bool), "true or false")

    def _change(self, job: JobDocument) -> None:
        job.setdefault("scheduling_config", {})["allow_waiting_for_nodes"] = self.allow


@dataclass(frozen=True)
class Preemptible(Option):
    """Whether jobs of higher priority may take its place."""

    preemptible: bool = True

    def __post_init__(self) -> None:
        require(self, "preemptible", isinstance(self.preemptible, bool), "true or false")

    def _change(self, job: JobDocument) -> None:
        job.setdefault("scheduling_config", {})["preemptible"] = self.preemptible
