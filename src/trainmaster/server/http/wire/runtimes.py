"""Training runtimes, as they were written."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trainmaster.server.coordinator.operator_files import RuntimeDocument, RuntimeFiles
from trainmaster.server.http.envelope import Wire


class RuntimeResource(Wire):
    """A training runtime."""

    name: str
    kind: str = Field(description="`ClusterTrainingRuntime` or `TrainingRuntime`.")
    file: str = Field(description="The file that it is in.")
    document: dict[str, Any] = Field(description="As it was written, in the shape of Kubeflow's.")


class RuntimeProblem(Wire):
    """What is wrong with a file."""

    file: str
    message: str


class RuntimeList(Wire):
    """All training runtimes of the server."""

    runtimes: list[RuntimeResource]
    problems: list[RuntimeProblem] = Field(description="Files of which something cannot be used.")


def runtime_resource(runtime: RuntimeDocument) -> RuntimeResource:
    """One runtime."""
    return RuntimeResource(name=runtime.name, kind=runtime.kind, file=runtime.file, document=dict(runtime.document))


def runtime_list(found: RuntimeFiles) -> RuntimeList:
    """What a directory has."""
    return RuntimeList(
        runtimes=[runtime_resource(runtime) for runtime in found.runtimes],
        problems=[RuntimeProblem(file=each.file, message=each.message) for each in found.broken],
    )
