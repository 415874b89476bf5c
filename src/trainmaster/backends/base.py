"""The interface of every backend: render, submit, observe, stop; and what it declares about itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.reports import EngineFacts, Liveness
from trainmaster.server.core.resources import Node


class PlacementBy(StrEnum):
    """Who chooses the nodes. The scheduler places jobs of an ENGINE backend in its pool, and its engine on nodes."""

    US = "ours"
    ENGINE = "engine"


class ImageFeature(StrEnum):
    """What a job may ask for in addition to its image."""

    PULL_POLICY = "a choice of when an image is pulled"
    SHARED_MEMORY = "a size of /dev/shm"
    VOLUMES = "volumes"
    INITIALIZER_IMAGES = "initializers with images of their own"
    OWN_COMMAND = "an image's own command"
    KEPT_CONTAINERS = "containers that stay when they have ended"
    PROCESS_LIMIT = "a limit of processes"
    ENGINE_CHOICE = "the choice of a container engine"


class FilesBy(StrEnum):
    """The way of checkpoints and results from machines other than the server's."""

    SERVER = "server"  # over HTTP
    SHARED = "shared"  # the nodes have the server's directories, at the same paths
    OBJECT_ROOT = "object_root"  # checkpoints go straight to the server's object store, results over HTTP


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do. Anything else is refused at submission, never at run time."""

    placement: PlacementBy
    lifetimes: frozenset[Lifetime]
    runs_here: bool = False
    """Its jobs run on the server's machine: each account needs a system user that the server can start jobs as.
    Otherwise its workers report over HTTP, and `files` says how checkpoints and results arrive."""
    server_url: str = ""
    """Where workers on other machines reach the server; empty: where the server says that it is reached."""
    submits_as_users: bool = False
    """With `runs_here` false: jobs of an account that has a uid are submitted to the engine as that user."""
    files: FilesBy = FilesBy.SERVER
    """Of its jobs, if they do not run here."""
    isolates_accounts: bool = False
    """It separates the jobs of accounts that have no system user of their own."""
    uses_server_python: bool = False
    """Its workers run the server's Python: a job is refused if a package that it needs is missing there."""
    nodes_of: str = ""
    """The backend on whose nodes its jobs run; empty: its own nodes."""
    images: bool = False
    """It runs workloads in the container image that they name; their paths are the container's."""
    image_features: frozenset[ImageFeature] = frozenset()
    image_optional: bool = False
    """With `images`: workloads that name none run on a node itself, unless there is an own one."""
    image_setting: str = ""
    """The name of the setting with the image of workloads that name none; empty: there is no such setting."""
    fields: frozenset[str] = frozenset()
    """Fields of a workload that only backends of its kind take."""
    own_image: str = ""
    """The value of that setting on this server; empty: workloads that name no image are refused."""
    job_nodes_apart: bool = False
    """Its engine runs every node of a job on another node of the cluster; otherwise several may share one."""
    cannot_choose_by: frozenset[str] = frozenset()
    """Fields of `resource_config` by which its engine cannot choose nodes."""


class LaunchError(Exception):
    """The backend could not launch an attempt, and nothing of it runs."""

    def __init__(
        self, message: str, reason: Reason = Reason.ENGINE_UNAVAILABLE, *, again_in_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        """ENGINE_UNAVAILABLE is tried again; LAUNCH_REFUSED is final."""
        self.again_in_s = again_in_s
        """When to try again, if the backend knows better."""


class Change(Protocol):
    """Something that happens once; a future is one."""

    def done(self) -> bool: ...

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        """Call it when the change has happened, at once if it has."""


class NotYetError(Exception):
    """An attempt cannot start yet, and nothing of it runs; the message says what it waits for. It keeps its place."""

    def __init__(self, message: str, until: Change, *, again_in_s: float = 1.0, handle: str | None = None) -> None:
        super().__init__(message)
        self.until = until
        """Done when it is worth another try, however it ended."""
        self.again_in_s = again_in_s
        """How long to wait for that before the next try."""
        self.handle = handle
        """What the engine calls the attempt, where it waits in the engine's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why the worker of a node is gone, according to the backend's engine."""

    reason: Reason
    message: str
    if_stopped: Loss | None = None
    """What it means instead for a worker that the engine told to stop and that did; None: the same."""


def claim_free_nodes(directory: RunDirectory, request: AttemptRequest) -> list[int]:
    """Claim the nodes that no worker has, so that a worker that comes later exits at once; returns these nodes."""
    revoked = {"nonce": uuid.uuid4().hex, "revoked": True}
    return [node for node in range(len(request.nodes)) if directory.claim(node, revoked)]


def endpoint_on_node(request: AttemptRequest, node: int, host: str, port: int) -> str | None:
    """The address of a service on its node; None if its worker names another host."""
    return f"{host}:{port}" if host == request.nodes[node].address else None


class Backend(Protocol):
    """One way of running attempts. Every verb may be repeated; repeating it changes nothing.

    A backend is called from several threads, but never twice at the same time for one attempt.
    """

    name: str
    capabilities: Capabilities

    def open(self) -> None:
        """Get ready; called once, when a server starts to coordinate."""

    def inventory(self) -> Sequence[Node]:
        """The current nodes."""

    def engine(self) -> EngineFacts | None:
        """The engine that runs its jobs, queried now; None if there is none."""

    def render(self, request: AttemptRequest) -> str:
        """What `submit` would send to the engine, as text, without the secrets' values."""

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
        """Start the workers of an attempt, unless they run already; returns the engine's name for it.

        The secrets reach the workers in memory, or as a secret of the engine's own; they are written nowhere else.
        Workers that report over HTTP may fetch them instead. Raises LaunchError if nothing was started, and NotYetError
        while something is being prepared: submit again, for as long as that takes.
        """

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        """What is known of each node's worker; UNKNOWN is not GONE."""

    def loss(self, request: AttemptRequest, node: int) -> Loss | None:
        """Why a node's worker is gone or was told to stop, according to the engine; None if it does not say."""

    def endpoint(self, request: AttemptRequest, node: int, host: str, port: int) -> str | None:
        """Where the server reaches a service that listens there, according to its worker; None: nowhere."""

    def stop(self, request: AttemptRequest, control: Control) -> None:
        """Pass a control on to the workers."""

    def kill(self, request: AttemptRequest) -> None:
        """End workers by force that did not react to a stop."""

    def revoke(self, request: AttemptRequest) -> None:
        """Make sure that nodes which no worker has claimed never run."""

    def sweep(self, request: AttemptRequest, node: int) -> None:
        """Kill everything that is left of a node whose worker is gone."""

    def close(self) -> None:
        """Close connections; running attempts continue."""
