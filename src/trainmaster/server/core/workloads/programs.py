"""The `command`, `script` and `container` workloads: a program of the user's own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainmaster.protocol.launch import Launch, Step
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.fields import Arguments, Argv, Image, PathText
from trainmaster.server.core.workloads.base import InitializedSpec, JobConfigs, PackagedSpec


class CommandSpec(PackagedSpec):
    """A program and its arguments, started without a shell."""

    kind: Literal["command"]
    argv: Argv = Field(description="The program and its arguments.")

    def compile(self, job: JobConfigs) -> Launch:
        return self.launch(job, Step(name="main", argv=self.argv))


_NAMED = 5
"""How many of the shipped files an error names."""


class ScriptSpec(PackagedSpec):
    """A script: `.py` runs with Python, anything else with `sh`, unless an interpreter is named."""

    kind: Literal["script"]
    path: PathText = Field(description="The relative path of an uploaded file, or an absolute path on the server.")
    args: Arguments = Field(default=(), description="Arguments of the script.")
    interpreter: Argv | None = Field(default=None, description="What to run the script with.")

    def check(self, job: JobConfigs) -> None:  # noqa: ARG002
        """A relative path names a shipped file, unless a working directory says where else to look."""
        if self.path.startswith("/") or self.working_directory is not None:
            return
        if self.path not in {file.path for file in self.files}:
            there = ", ".join(sorted(file.path for file in self.files)[:_NAMED]) or "none"
            message = (
                f"there is no such file: '{self.path}' was looked for among the shipped files ({there}); ship it in "
                "workload.files, or give an absolute path on the server"
            )
            raise SpecError([Problem(field="workload.path", message=message)])

    def compile(self, job: JobConfigs) -> Launch:
        if self.interpreter is not None:
            step = Step(name="main", argv=(*self.interpreter, self.path, *self.args))
        elif self.path.endswith(".py"):
            step = Step(name="main", argv=(self.path, *self.args), python=True)
        else:
            step = Step(name="main", argv=("sh", self.path, *self.args))
        return self.launch(job, step)


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
