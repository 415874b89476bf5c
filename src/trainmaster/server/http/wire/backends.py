"""The backends of a server."""

from __future__ import annotations

from pydantic import Field

from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.http.envelope import Wire


class BackendSummary(Wire):
    """Where jobs can run."""

    name: str
    default: bool = Field(description="Whether it is that of jobs that name none.")
    images: bool = Field(description="Whether it runs a workload in the image that the workload names.")


class BackendList(Wire):
    """All backends of the server, the default first."""

    backends: list[BackendSummary]


class EngineResource(Wire):
    """What runs a backend's jobs, and is no part of the server."""

    name: str | None = Field(description="`docker` or `podman`; null: none answers.")
    host: str | None = Field(description="Where it listens.")
    problem: str | None = Field(description="Why none answers, and what was tried.")


class BackendResource(BackendSummary):
    """One backend, with what its jobs run on."""

    engine: EngineResource | None = Field(
        description="Asked now. Null: the server itself runs them, or this server cannot tell."
    )


def engine_resource(facts: EngineFacts | None) -> EngineResource | None:
    """An engine, if there is one."""
    if facts is None:
        return None
    return EngineResource(name=facts.name or None, host=facts.host or None, problem=facts.problem or None)
