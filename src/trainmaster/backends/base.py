"""What every backend does: render, submit, observe, stop; and what it says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.reports import EngineFacts, Liveness
from trainmaster.server.core.resources import Node


class PlacementBy(StrEnum):
    """Who chooses the nodes."""

    US = "ours"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do. What is missing is refused at submission, never at run time."""

    placement: PlacementBy
    lifetimes: frozenset[Lifetime]
    colocates_gangs: bool
    """Several nodes of a gang may share one machine."""
    images: bool = False
    """It runs a workload in the container image that the workload names."""
    own_image: str = ""
    """The image of workloads that name none, as the server's settings have it; empty: those are refused."""


class LaunchError(Exception):
    """The backend could not launch an attempt, and nothing of it runs."""

    def __init__(
        self, message: str, reason: Reason = Reason.ENGINE_UNAVAILABLE, *, again_in_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        """ENGINE_UNAVAILABLE is tried again; LAUNCH_REFUSED is final."""
        self.again_in_s = again_in_s
        """When that is, where the backend knows better than others."""


class NotYetError(Exception):
    """An attempt cannot start yet, and nothing of it runs; the text says what for. It keeps its place meanwhile."""

    def __init__(self, message: str, until: Future[Any]) -> None:
        super().__init__(message)
        self.until = until
        """Done when it is worth another try; how it ended is for the backend to know."""


def endpoint_on_node(request: AttemptRequest, node: int, host: str, port: int) -> str | None:
    """Where a service is reached that listens on its node itself: there, and not where else its worker may name."""
    return f"{host}:{port}" if host == request.nodes[node].address else None


class Backend(Protocol):
    """One way of running attempts. Every verb may be repeated; repeating it changes nothing.

    A backend is called from several threads, never twice at the same time for one attempt.
    """

    name: str
    capabilities: Capabilities

    def open(self) -> None:
        """Get ready; called once, when a server starts to coordinate."""
        ...

    def inventory(self) -> Sequence[Node]:
        """The nodes there are now."""
        ...

    def engine(self) -> EngineFacts | None:
        """What runs its jobs, asked now; None: nobody else does."""
        ...

    def render(self, request: AttemptRequest) -> str:
        """The document for the engine, as text: what `submit` would send, but for the secrets' values."""
        ...

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
        """Start the workers of an attempt, unless they run already; returns the engine's name for it.

        The secrets reach the workers in memory, or as a secret of the engine's own; they are written nowhere else.
        Workers that report over HTTP may fetch them instead.

        Raises:
            LaunchError: nothing was started.
            NotYetError: something is being made ready; it is to be submitted again soon, for as long as that takes.
        """
        ...

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        """What is known of each node's worker."""
        ...

    def endpoint(self, request: AttemptRequest, node: int, host: str, port: int) -> str | None:
        """Where the server reaches a service that listens there, as its worker says; None: nowhere."""
        ...

    def stop(self, request: AttemptRequest, control: Control) -> None:
        """Pass a control on to the workers."""
        ...

    def kill(self, request: AttemptRequest) -> None:
        """End workers that did not react to a stop, by force."""
        ...

    def revoke(self, request: AttemptRequest) -> None:
        """See to it that nodes which no worker has claimed never run."""
        ...

    def sweep(self, request: AttemptRequest, node: int) -> None:
        """Kill whatever is left of a node whose worker is gone."""
        ...

    def close(self) -> None:
        """Let go of connections; what runs goes on."""
        ...
