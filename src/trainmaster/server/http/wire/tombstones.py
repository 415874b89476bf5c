"""Deleted jobs whose files are still there."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from trainmaster.server.coordinator.tombstones import Tombstone
from trainmaster.server.core.states import JobStatus
from trainmaster.server.http.envelope import Wire
from trainmaster.server.http.wire.reported import instant


class TombstoneResource(Wire):
    """A deleted job whose files are still there."""

    job_id: str
    handle: str | None = Field(description="Which another job may have since.")
    name: str
    kind: str = Field(description="Of its workload.")
    status: JobStatus = Field(description="How it ended.")
    deleted_at: datetime
    size_bytes: int = Field(description="The room that its files take.")


class TombstonePage(Wire):
    """One page of deleted jobs."""

    tombstones: list[TombstoneResource]
    next_page_token: str | None = Field(description="Send it as `page_token`; null on the last page.")


def tombstone_resource(tombstone: Tombstone) -> TombstoneResource:
    """A deleted job as it is shown."""
    job = tombstone.job
    return TombstoneResource(
        job_id=job.job_id,
        handle=job.handle,
        name=job.name,
        kind=job.workload_kind,
        status=job.status,
        deleted_at=instant(tombstone.deleted_at),
        size_bytes=tombstone.size_bytes,
    )
