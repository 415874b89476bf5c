"""A workload kind as somebody else would add it: one class, and not a line elsewhere."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainmaster.protocol.launch import Launch, LaunchStep
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.workloads.base import JobConfigs, WorkloadSpec


class ToySpec(WorkloadSpec):
    """Prepares a greeting in one step and says it in the next."""

    kind: Literal["toy"]
    greeting: str = Field(default="hello", description="What it says.")

    def check(self, job: JobConfigs) -> None:
        if "'" in self.greeting:
            raise SpecError([Problem(field="workload.greeting", message="must not hold a quote")])

    def compile(self, job: JobConfigs) -> Launch:
        return self.launch(
            job,
            LaunchStep(name="prepare", argv=("sh", "-c", f"echo '{self.greeting}' > greeting")),
            LaunchStep(name="main", argv=("cat", "greeting")),
        )
