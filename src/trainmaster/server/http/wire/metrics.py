"""Metrics of jobs."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from trainmaster.server.http.envelope import Wire
from trainmaster.server.http.wire.checkpoints import CheckpointResource

Point = tuple[int | None, datetime | None, float | None]
"""Step, time, value."""


class MetricSeries(Wire):
    """One metric over time."""

    name: str
    points: list[Point] = Field(description="[step, time, value], by step. A value that is no finite number is null.")


class JobMetrics(Wire):
    """How far a job is, and how it got there."""

    job_id: str
    status: str
    step: int | None
    epoch: float | None
    latest: dict[str, float | None] = Field(description="The last value of each metric.")
    series: list[MetricSeries]
    checkpoints: list[CheckpointResource]
    best_checkpoint_id: str | None
    notice: str | None = Field(description="Why there are no series, where there were some.")


class MetricsReport(Wire):
    """What a job reported at one moment."""

    ts: datetime | None
    attempt: int
    step: int | None
    total_steps: int | None
    epoch: float | None
    percent: float | None
    eta_seconds: float | None
    values: dict[str, float | None]
