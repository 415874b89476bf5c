"""The `service` workload: an HTTP server that runs until it is stopped and is reached through the gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from trainmaster.protocol.launch import Launch, Lifetime, Readiness, Step
from trainmaster.server.core.fields import Argv, EnvironmentName, Flag, Matches, Model, Text
from trainmaster.server.core.workloads.base import JobConfigs, WorkloadSpec

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
            Step(name="main", argv=self.argv, python=self.python),
            lifetime=Lifetime.SERVICE,
            port_environment=self.port_environment,
            readiness=Readiness(path=self.readiness.path, timeout_s=self.readiness.timeout_s),
        )
