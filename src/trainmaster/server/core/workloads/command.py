"""The `command` workload: a program and its arguments."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainmaster.protocol.launch import Launch, Step
from trainmaster.server.core.fields import Argv
from trainmaster.server.core.workloads.base import JobConfigs, PackagedSpec


class CommandSpec(PackagedSpec):
    """A program and its arguments, started without a shell."""

    kind: Literal["command"]
    argv: Argv = Field(description="The program and its arguments.")

    def compile(self, job: JobConfigs) -> Launch:
        return self.launch(job, Step(name="main", argv=self.argv))
