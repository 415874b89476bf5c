"""The `command` workload: a program and its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainmaster.protocol.launch import Launch, Step
from trainmaster.server.core.fields import Argv
from trainmaster.server.core.workloads.base import PackagedSpec, launch_of, spec_of

if TYPE_CHECKING:
    from trainmaster.server.core.spec.submit import SubmitJobRequest

KIND = "command"


class CommandSpec(PackagedSpec):
    """A program and its arguments, started without a shell."""

    kind: Literal["command"]
    argv: Argv = Field(description="The program and its arguments.")


Spec = CommandSpec


def validate(request: SubmitJobRequest) -> None:
    """Nothing beyond the fields."""


def compile(request: SubmitJobRequest) -> Launch:  # noqa: A001
    """One step: the command."""
    spec = spec_of(request, CommandSpec)
    return launch_of(request, spec, Step(name="main", argv=spec.argv))
