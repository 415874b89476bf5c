"""What jobs used."""

from __future__ import annotations

from datetime import datetime

from pydantic import ConfigDict, Field

from trainmaster.server.http.envelope import Wire
from trainmaster.server.store.usage import Used


class UsageRow(Wire):
    """What a group of attempts used."""

    key: str = Field(description="The group; empty for jobs that lack the label, and for the total.")
    jobs: int
    attempts: int
    gpu_seconds: float
    cpu_seconds: float = Field(description="Allocated cores x time, however busy they were.")
    wall_seconds: float


class Usage(Wire):
    """What was used in an interval."""

    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True, populate_by_name=True)

    from_: datetime | None = Field(alias="from", description="Null: all time.")
    to: datetime
    group_by: str
    rows: list[UsageRow]
    total: UsageRow
    truncated: bool = Field(description="There are more groups than `limit`.")


def usage_row(used: Used) -> UsageRow:
    """A group as it is shown."""
    return UsageRow(
        key=used.key,
        jobs=used.jobs,
        attempts=used.attempts,
        gpu_seconds=used.gpu_seconds,
        cpu_seconds=used.cpu_seconds,
        wall_seconds=used.wall_seconds,
    )
