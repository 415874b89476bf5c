"""The `container` workload: an image, and what runs in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainmaster.protocol.launch import Launch, Step
from trainmaster.server.core.fields import Arguments, Argv, Image
from trainmaster.server.core.workloads.base import InitializedSpec, launch_of, spec_of

if TYPE_CHECKING:
    from trainmaster.server.core.spec.submit import SubmitJobRequest

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


Spec = ContainerSpec


def validate(request: SubmitJobRequest) -> None:
    """Nothing beyond the fields."""


def compile(request: SubmitJobRequest) -> Launch:  # noqa: A001
    """One step: the command; an empty one is the image's own."""
    spec = spec_of(request, ContainerSpec)
    step = Step(name="node", argv=(*spec.argv, *spec.args)) if spec.argv else Step(name="node", argv=(), args=spec.args)
    return launch_of(request, spec, step)
