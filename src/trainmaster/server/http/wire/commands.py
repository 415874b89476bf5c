"""Bodies of commands, and the answer to a submission."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from trainmaster.server.core.fields import Flag, Matches, Model, Name
from trainmaster.server.core.job import Job
from trainmaster.server.core.spec import ResourceConfig
from trainmaster.server.core.spec.resources import Priority
from trainmaster.server.core.spec.submit import Handle, Labels
from trainmaster.server.http.envelope import Wire

PROPER = Matches(r"[^\x00]*", "must not hold a NUL character")
"""Text that every database takes."""
CheckpointId = Annotated[str, StringConstraints(max_length=512), PROPER]


class CancelBody(Model):
    """How to cancel a job."""

    reason: Annotated[str, StringConstraints(max_length=1024), PROPER] = Field(
        default="", description="Kept with the job, for people."
    )


class PauseBody(Model):
    """How to pause a job."""

    save_checkpoint: Flag = Field(default=True, description="Save first; false stops it as it is.")


class ResumeBody(Model):
    """How to resume a job."""

    checkpoint_id: CheckpointId = Field(default="", description="What to go on from; empty: the latest.")


class RetryBody(Model):
    """How to retry a job."""

    checkpoint_id: CheckpointId = Field(default="", description="What to go on from; empty: the latest.")
    modify_resources: Flag = Field(default=False, description="Use new_resource_config.")
    new_resource_config: ResourceConfig | None = Field(
        default=None, description="Replaces the whole resource_config of the job."
    )
    handle: Handle | None = Field(default=None, description="Of the new job; it has none otherwise.")


class EditBody(Model):
    """What to change about a job that has not ended; what is left out stays."""

    priority: Priority | None = None
    queue: Name | None = None
    labels: Labels | None = Field(default=None, description="Replaces all labels.")


class SubmittedJob(Wire):
    """A job that was accepted."""

    job_id: str
    handle: str | None
    name: str
    status: str
    message: str
    estimated_wait_seconds: float | None
    checkpoint_id: str | None = Field(description="What it will go on from.")


class CheckedJob(Wire):
    """A job that would be accepted."""

    missing_blobs: list[str] = Field(
        description="Digests of the files in its `workload.files` that are yet to be uploaded."
    )


def submitted_job(job: Job) -> SubmittedJob:
    """The answer to a submission."""
    return SubmittedJob(
        job_id=job.job_id,
        handle=job.handle,
        name=job.name,
        status=job.status,
        message=f"job {job.handle or job.job_id} was accepted",
        estimated_wait_seconds=None,
        checkpoint_id=job.resume_checkpoint_id,
    )
