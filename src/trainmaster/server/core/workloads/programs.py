"""The `command`, `script`, `container` and `service` workloads: a program of the user's own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from trainmaster.protocol.launch import Launch, LaunchStep, Lifetime, Readiness
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.fields import (
    Arguments,
    Argv,
    EnvironmentName,
    Flag,
    Image,
    Matches,
    Model,
    PathText,
    Text,
    optional,
)
from trainmaster.server.core.workloads.base import InitializedSpec, JobConfigs, PackagedSpec, WorkloadSpec


class CommandSpec(PackagedSpec):
    """A program and its arguments, started without a shell."""

    kind: Literal["command"]
    argv: Argv = Field(description="The program and its arguments.")

    def compile(self, job: JobConfigs) -> Launch:
        return self.launch(job, LaunchStep(name="main", argv=self.argv))


_NAMED = 5
"""How many of the shipped files an error names."""


class ScriptSpec(PackagedSpec):
    """A script: `.py` runs with Python, anything else with `sh`, unless an interpreter is named."""

    kind: Literal["script"]
    path: PathText = Field(description="The relative path of an uploaded file, or an absolute path on the server.")
    args: Arguments = Field(default=(), description="Arguments of the script.")
    interpreter: Argv | None = optional("What to run the script with.")

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
            step = LaunchStep(name="main", argv=(*self.interpreter, self.path, *self.args))
        elif self.path.endswith(".py"):
            step = LaunchStep(name="main", argv=(self.path, *self.args), python=True)
        else:
            step = LaunchStep(name="main", argv=("sh", self.path, *self.args))
        return self.launch(job, step)


class ContainerSpec(InitializedSpec):
    """A container image that contains everything it needs. Only for a backend that runs images."""

    kind: Literal["container"]
    image: Image = Field(description="The container image.")
    argv: Argv | None = optional("Replaces the image's entry point and command. Null: those of the image.")
    args: Arguments = Field(
        default=(),
        description="Arguments appended to argv. If argv is null: arguments of the image's entry point, which "
        "replace the image's command.",
    )

    def compile(self, job: JobConfigs) -> Launch:
        if self.argv:
            return self.launch(job, LaunchStep(name="node", argv=(*self.argv, *self.args)))
        return self.launch(job, LaunchStep(name="node", argv=(), args=self.args))


DEFAULT_INACTIVITY_S = 3600.0
"""What an inactivity timeout of 0 stands for."""
MAX_TIMEOUT_S = 31_536_000.0
"""A year; whoever means forever disables the clean-up."""

UrlPath = Annotated[Text, Matches(r"/[^\s#]*", "must be a path that begins with '/'")]


class ReadinessSpec(Model):
    """When the service counts as ready: `GET path` answers with a status below 400."""

    path: UrlPath = Field(default="/", description="The path that is polled until it answers.")
    timeout_s: Annotated[float, Strict(), Field(gt=0, le=MAX_TIMEOUT_S)] = Field(
        default=600.0, description="The attempt fails if the service is not ready after this time."
    )


class Serving(WorkloadSpec):
    """What serves until it is stopped, and is parked when nobody uses it."""

    inactivity_timeout_s: Annotated[float, Strict(), Field(ge=0, le=MAX_TIMEOUT_S)] = Field(
        default=0.0,
        description=f"The service is paused after this time without a request; 0 means {DEFAULT_INACTIVITY_S:g}.",
    )
    disable_inactivity_cleanup: Flag = Field(default=False, description="Never pause the service for inactivity.")

    @property
    def effective_inactivity_s(self) -> float | None:
        """After how long without a request it is paused; None means never."""
        return None if self.disable_inactivity_cleanup else self.inactivity_timeout_s or DEFAULT_INACTIVITY_S


class ServiceSpec(Serving):
    """An HTTP server on a port that the worker chooses."""

    kind: Literal["service"]
    argv: Argv = Field(description="The program and its arguments.")
    python: Flag = Field(default=False, description="Run argv with the worker's Python.")
    port_environment: EnvironmentName = Field(default="PORT", description="The variable that receives the port.")
    readiness: ReadinessSpec = Field(default_factory=ReadinessSpec, description="When the service counts as ready.")

    def compile(self, job: JobConfigs) -> Launch:
        return self.launch(
            job,
            LaunchStep(name="main", argv=self.argv, python=self.python),
            lifetime=Lifetime.SERVICE,
            port_environment=self.port_environment,
            readiness=Readiness(**dict(self.readiness)),
        )
