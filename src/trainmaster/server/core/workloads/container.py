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
        default=None, description="What runs in it, in place of the image's entry point and command. Null: those."
    )
    args: Arguments = Field(
        default=(),
        description="Further arguments behind argv; where argv is null, behind the image's entry point, in place of "
        "the image's command.",
    )

    def compile(self, job: JobConfigs) -> Launch:
        if self.argv:
            return self.launch(job, Step(name="node", argv=(*self.argv, *self.args)))
        return self.launch(job, Step(name="node", argv=(), args=self.args))
