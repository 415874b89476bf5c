"""`resource_config` and `scheduling_config`: what the job needs of its machines, and how the queue treats it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, Strict, model_validator

from trainmaster.server.core.fields import (
    MAX_GPUS,
    MAX_NODES,
    Broken,
    Count,
    Flag,
    Matches,
    Model,
    Name,
    Names,
    Natural,
    refuse,
)

NodeLabel = Annotated[Name, Matches(r"[^=]+(=.*)?", "write a node label as 'key=value' or 'label'")]
NodeLabels = Annotated[tuple[NodeLabel, ...], Field(max_length=1024)]


class ResourceConfig(Model):
    """What the job needs of its machines. Minima are hard needs; affinity is a wish."""

    gpu_count: Annotated[int, Strict(), Field(ge=0, le=MAX_GPUS)] | None = Field(
        default=None,
        description="GPUs over all nodes. Null: one per node where gpu_type or gpu_memory_min_mb is set or the backend "
        "has GPUs, else none. 0: runs on the CPU.",
    )
    gpu_type: Name | None = Field(default=None, description="Such as H100 or A100-80GB; any when null.")
    gpu_memory_min_mb: Natural | None = Field(default=None, description="Least memory of each GPU.")
    cpu_cores: Count | None = Field(default=None, description="Least cores of each node, and the most it gets there.")
    ram_min_mb: Natural | None = Field(
        default=None, description="Least memory of each node, and the most it gets there."
    )
    storage_min_mb: Natural | None = Field(default=None, description="Least disk space of each node.")
    node_affinity: NodeLabels = Field(default=(), description="Labels of nodes to prefer.")
    node_anti_affinity: NodeLabels = Field(default=(), description="Labels of nodes to avoid.")
    node_count: Annotated[int, Strict(), Field(ge=1, le=MAX_NODES)] = Field(
        default=1, description="Nodes of the gang; all of them run, or none."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self._broken())
        return self

    def _broken(self) -> Iterator[Broken]:
        if self.gpu_count is not None and self.gpu_count % self.node_count:
            message = f"is the total over all nodes and must be divisible by node_count ({self.node_count})"
            yield Broken(("gpu_count",), message)
        for index, label in enumerate(self.node_anti_affinity):
            if label in self.node_affinity:
                message = f"'{label}' is in node_affinity too; a node cannot be both preferred and avoided"
                yield Broken(("node_anti_affinity", index), message)


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
