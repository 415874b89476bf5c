"""The `container` workload: an image, and what runs in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainmaster.core.fields import Argv, Image
from trainmaster.core.workloads.base import InitializedSpec, launch_of, spec_of
from trainmaster.protocol.launch import Launch, Step

if TYPE_CHECKING:
    from trainmaster.core.spec.submit import SubmitJobRequest

KIND = "container"


class ContainerSpec(InitializedSpec):
    """A container image that brings all that it needs. Only for a backend that runs images."""

    kind: Literal["container"]
    image: Image = Field(description="The container image.")
    argv: Argv | None = Field(default=None, description="What runs in it; the image's own command when null.")


Spec = ContainerSpec


def validate(request: SubmitJobRequest) -> None:
    """Nothing beyond the fields."""


def compile(request: SubmitJobRequest) -> Launch:  # noqa: A001
    """One step: the command; an empty one is the image's own."""
    spec = spec_of(request, ContainerSpec)
    return launch_of(request, spec, Step(name="node", argv=spec.argv or ()))
