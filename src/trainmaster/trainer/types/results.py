"""What the client answers with: runtimes, jobs, their steps and events, and lists of them as tables."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, SupportsIndex, TypeVar, overload

from trainmaster.trainer.constants import UNKNOWN

if TYPE_CHECKING:
    from rich.console import RenderableType


Row = dict[str, str]
"""Heading -> what stands below it."""
NONE = "none"


class TableRow(ABC):
    @abstractmethod
    def row(self) -> Row:
        """What is shown of it."""

    def _repr_html_(self) -> str:
        return html_table([self.row()])

    def __rich__(self) -> RenderableType:
        return rich_table([self.row()])


RowT = TypeVar("RowT", bound=TableRow)


class Listing(list[RowT]):
    """A list that a notebook and rich show as a table; and so is a part of it."""

    @overload
    def __getitem__(self, chosen: SupportsIndex, /) -> RowT: ...

    @overload
    def __getitem__(self, chosen: slice, /) -> Listing[RowT]: ...

    def __getitem__(self, chosen: SupportsIndex | slice, /) -> RowT | Listing[RowT]:
        return Listing(super().__getitem__(chosen)) if isinstance(chosen, slice) else super().__getitem__(chosen)

    def _repr_html_(self) -> str:
        return html_table(item.row() for item in self)

    def __rich__(self) -> RenderableType:
        return rich_table(item.row() for item in self)


def html_table(rows: Iterable[Row]) -> str:
    shown = list(rows)
    if not shown:
        return f"<p>{NONE}</p>"
    head = _html_row("th", list(shown[0]))
    body = "".join(_html_row("td", list(row.values())) for row in shown)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def rich_table(rows: Iterable[Row]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    shown = list(rows)
    if not shown:
        return Text(NONE)
    table = Table(*shown[0])
    for row in shown:
        table.add_row(*(Text(cell) for cell in row.values()))  # a Text, as square brackets would be markup
    return table


def moment(when: datetime | None) -> str:
    return when.strftime("%Y-%m-%d %H:%M:%S") if when else ""


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


class TrainerType(Enum):
    """Who brings the training: the user, or the runtime."""

    CUSTOM_TRAINER = "CustomTrainer"
    BUILTIN_TRAINER = "BuiltinTrainer"


class RuntimeKind(Enum):
    """Whether a runtime belongs to a whole cluster or to one namespace of it."""

    CLUSTER_TRAINING_RUNTIME = "ClusterTrainingRuntime"
    TRAINING_RUNTIME = "TrainingRuntime"


@dataclass
class RuntimeTrainer:
    """How a runtime trains, and on what."""

    trainer_type: TrainerType
    framework: str
    image: str
    num_nodes: int = 1
    device: str = UNKNOWN
    device_count: str = UNKNOWN
    _command: tuple[str, ...] = field(init=False, repr=False, default=())

    @property
    def command(self) -> tuple[str, ...]:
        """What it starts a training with; empty where nobody has said."""
        return self._command

    def set_command(self, command: tuple[str, ...]) -> None:
        self._command = command


@dataclass
class Runtime(TableRow):
    """A named way to run a training."""

    name: str
    trainer: RuntimeTrainer
    kind: RuntimeKind
    pretrained_model: str | None = None

    def row(self) -> Row:
        return {
            "runtime": self.name,
            "trainer": self.trainer.trainer_type.value,
            "framework": self.trainer.framework,
            "nodes": str(self.trainer.num_nodes),
            "image": self.trainer.image,
            "model": self.pretrained_model or "",
        }


@dataclass
class Step(TableRow):
    """A part of a job that has a log of its own: a node, an initializer, the installation of packages."""

    name: str
    status: str | None
    pod_name: str
    """The pod, on backends that have them; empty elsewhere."""
    device: str = UNKNOWN
    device_count: str = UNKNOWN

    def row(self) -> Row:
        return {
            "step": self.name,
            "status": self.status or "",
            "pod": self.pod_name,
            "device": self.device,
            "devices": self.device_count,
        }


@dataclass
class Event(TableRow):
    involved_object_kind: str
    involved_object_name: str
    message: str
    reason: str
    event_time: datetime

    def row(self) -> Row:
        return {
            "time": moment(self.event_time),
            "object": f"{self.involved_object_kind} {self.involved_object_name}",
            "reason": self.reason,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a job is, as far as it says."""

    step: int | None = None
    total_steps: int | None = None
    epoch: float | None = None
    percent: float | None = None
    eta_seconds: float | None = None

    def __str__(self) -> str:
        steps = "" if self.step is None else f"step {self.step}"
        if steps and self.total_steps:
            steps += f" of {self.total_steps}"
        return ", ".join(part for part in (steps, "" if self.percent is None else f"{self.percent:.0f} %") if part)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(TableRow):
    checkpoint_id: str
    step: int
    created_at: datetime
    uri: str
    size_bytes: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)
    is_best: bool = False
    is_latest: bool = False

    def row(self) -> Row:
        return {
            "checkpoint": self.checkpoint_id,
            "step": str(self.step),
            "time": moment(self.created_at),
            "metrics": _measured(self.metrics),
            "": " ".join(word for word, true in (("latest", self.is_latest), ("best", self.is_best)) if true),
        }


@dataclass(repr=False)
class TrainJob(TableRow):
    """A job. The fields from `state` on are ours; Kubeflow has the others."""

    name: str
    runtime: Runtime
    steps: list[Step]
    num_nodes: int
    creation_timestamp: datetime
    status: str = UNKNOWN
    """Created, Running, Complete or Failed."""
    state: str = UNKNOWN
    """The real state, such as QUEUED, PAUSED or CHECKPOINTING."""
    progress: Progress = Progress()
    metrics: dict[str, float | None] = field(default_factory=dict)
    """The latest value of each."""
    checkpoints: list[Checkpoint] = field(default_factory=list)
    message: str | None = None
    """Why it is in that state: what it waits for, or how it failed."""
    labels: dict[str, str] = field(default_factory=dict)
    started_at: datetime | None = None
    finished_at: datetime | None = None

    def __repr__(self) -> str:
        runtime = self.runtime.name if self.runtime else None
        shown = {"name": self.name, "status": self.status, "state": self.state, "runtime": runtime}
        said = shown | ({"message": self.message} if self.message else {})
        return f"TrainJob({', '.join(f'{field}={value!r}' for field, value in said.items())})"

    def row(self) -> Row:
        return {
            "job": self.name,
            "status": self.status,
            "state": self.state,
            "runtime": self.runtime.name,
            "nodes": str(self.num_nodes),
            "progress": str(self.progress),
            "metrics": _measured(self.metrics),
            "created": moment(self.creation_timestamp),
            "finished": moment(self.finished_at),
            "message": self.message or "",
        }


def _measured(metrics: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items()) if value is not None)
