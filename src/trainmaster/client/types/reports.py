"""What jobs say, what happened to them, and what they measured."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from trainmaster.client.types.jobs import Checkpoint, Status


class LogLine(TypedDict):
    """One line that a job wrote."""

    ts: str | None
    attempt: int
    node: int
    rank: int
    step: str
    stream: Literal["stdout", "stderr"]
    message: str
    open: NotRequired[bool]
    """True of the newest state of a line that is still being overwritten, such as a progress bar."""


class LogPage(TypedDict):
    """Lines, and where to go on. `complete`: there will be no more. `notice`: why there are none, where there were."""

    lines: list[LogLine]
    open_lines: list[LogLine]
    next_cursor: str
    complete: bool
    notice: str | None


Transition = TypedDict("Transition", {"from": Status | None, "to": Status | None})


class Event(Transition):
    """One thing that happened to a job; `from` and `to` when its status changed."""

    job_id: str
    seq: int
    ts: str
    type: str
    actor: str
    reason: str | None
    attempt: int
    message: str
    data: dict[str, Any]


class EventPage(TypedDict):
    """Events, and where to go on."""

    events: list[Event]
    next_cursor: int


class Series(TypedDict):
    """A metric over time: points of step, time and value."""

    name: str
    points: list[tuple[int | None, str | None, float | None]]


class Metrics(TypedDict):
    """A job's metrics."""

    job_id: str
    status: Status
    step: int | None
    epoch: float | None
    latest: dict[str, float | None]
    series: list[Series]
    checkpoints: list[Checkpoint]
    best_checkpoint_id: str | None
    notice: str | None


class MetricsReport(TypedDict):
    """What a job reported at one moment."""

    ts: str | None
    attempt: int
    step: int | None
    total_steps: int | None
    epoch: float | None
    percent: float | None
    eta_seconds: float | None
    values: dict[str, float | None]
