"""A workload kind as somebody else would add it: one object with the four names, and not a line elsewhere."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainmaster.protocol.launch import Launch, Step
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.workloads import WorkloadSpec, launch_of, spec_of


class ToySpec(WorkloadSpec):
    """Says hello."""

    kind: Literal["toy"]
    greeting: str = Field(default="hello", description="What it says.")


class ToyKind:
    """Prepares a greeting in one step and says it in the next."""

    KIND = "toy"
    Spec = ToySpec

    def validate(self, request: SubmitJobRequest) -> None:
        if "'" in spec_of(request, ToySpec).greeting:
            raise SpecError([Problem(field="workload.greeting", message="must not hold a quote")])

    def compile(self, request: SubmitJobRequest) -> Launch:
        spec = spec_of(request, ToySpec)
        return launch_of(
            request,
            spec,
            Step(name="prepare", argv=("sh", "-c", f"echo '{spec.greeting}' > greeting")),
            Step(name="main", argv=("cat", "greeting")),
        )
