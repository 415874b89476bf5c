"""The `script` workload: a script that was shipped with the job, or that lies on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainmaster.protocol.launch import Launch, Step
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.fields import Arguments, Argv, PathText
from trainmaster.server.core.workloads.base import PackagedSpec, launch_of, spec_of

if TYPE_CHECKING:
    from trainmaster.server.core.spec.submit import SubmitJobRequest

KIND = "script"
_NAMED = 5
"""Of the shipped files, an error names so many."""


class ScriptSpec(PackagedSpec):
    """A script: `.py` runs with Python, anything else with `sh`, unless an interpreter is named."""

    kind: Literal["script"]
    path: PathText = Field(description="Of a shipped file, relative; or absolute, on the server.")
    args: Arguments = Field(default=(), description="Arguments of the script.")
    interpreter: Argv | None = Field(default=None, description="What to run the script with.")


Spec = ScriptSpec


def validate(request: SubmitJobRequest) -> None:
    """A relative path names a shipped file, unless a working directory says where else to look."""
    spec = spec_of(request, ScriptSpec)
    if spec.path.startswith("/") or spec.working_directory is not None:
        return
    if spec.path not in {file.path for file in spec.files}:
        there = ", ".join(sorted(file.path for file in spec.files)[:_NAMED]) or "none"
        message = (
            f"there is no such file: '{spec.path}' was looked for among the shipped files ({there}); ship it in "
            "workload.files, or give an absolute path on the server"
        )
        raise SpecError([Problem(field="workload.path", message=message)])


def compile(request: SubmitJobRequest) -> Launch:  # noqa: A001
    """One step: the script in its interpreter."""
    spec = spec_of(request, ScriptSpec)
    if spec.interpreter is not None:
        step = Step(name="main", argv=(*spec.interpreter, spec.path, *spec.args))
    elif spec.path.endswith(".py"):
        step = Step(name="main", argv=(spec.path, *spec.args), python=True)
    else:
        step = Step(name="main", argv=("sh", spec.path, *spec.args))
    return launch_of(request, spec, step)
