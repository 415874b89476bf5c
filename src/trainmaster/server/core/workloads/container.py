"""The `container` workload: an image, and what runs in it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainmaster.protocol.launch import Launch, Step
from trainmaster.server.core.fields import Arguments, Argv, Image
from trainmaster.server.core.workloads.base import InitializedSpec, JobConfigs

KIND = "container"


class ContainerSpec(InitializedSpec):
    """A container image that brings all that it needs. Only for a backend that runs images."""

    kind: Literal["container"]
    image: Image = Field(description="The container image.")
    argv: Argv | None = Field(
        default=None, description="Replaces the image's entry point and command. Null: those of the image."
    )
    args: Arguments = Field(
        default=(),
        description="Arguments appended to argv. If argv is null: arguments of the image's entry point, which "
        "replace the image's command.",
    )

    def compile(self, job: JobConfigs) -> Launch:
        if self.argv:
            return self.launch(job, Step(name="node", argv=(*self.argv, *self.args)))
        return self.launch(job, Step(name="node", argv=(), args=self.args))
