"""`scheduling_config`: how the queue treats the job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict

from trainmaster.server.core.fields import Count, Flag, Model, Name, Names

DEFAULT_PRIORITY = 5
"""The middle of 0 to 10."""
Priority = Annotated[int, Strict(), Field(ge=0, le=10)]
Retries = Annotated[int, Strict(), Field(ge=0, le=100)]


class SchedulingConfig(Model):
    """How the queue treats the job."""

    queue: Name = Field(default="default", description="The queue it waits in.")
    priority: Priority = Field(default=DEFAULT_PRIORITY, description="0 to 10; higher goes first.")
    preemptible: Flag = Field(default=False, description="May be preempted by a job of higher priority.")
    max_runtime_seconds: Count | None = Field(
        default=None, description="Running time of one attempt, after which it is stopped; time spent paused is free."
    )
    required_capabilities: Names = Field(default=(), description="Tags that every node of the job must have.")
    allow_waiting_for_nodes: Flag = Field(
        default=False,
        description="Queue the job even if no node could ever hold it, until such nodes are added; otherwise it is "
        "refused.",
    )
    max_retries: Retries = Field(default=0, description="Automatic new attempts after transient failures.")
