"""A compiled workload: all that a backend and a worker know of what to run, in plain values that survive JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

LOCAL = "local"
"""Jobs are processes on the server's machine."""
CONTAINER = "container"
"""Jobs run in containers on the server's machine."""
SLURM = "slurm"
"""A kind of cluster: jobs run on the nodes of a Slurm partition."""
RAY = "ray"
"""A kind of cluster: jobs run on the nodes of a Ray cluster."""
KUBERNETES = "kubernetes"
"""A kind of cluster: jobs run as pods in a namespace of a Kubernetes cluster."""

PACKAGES_FILE = "packages.json"
"""An input of the launch: `packages` (pip requirements) and `index_urls`."""
ENVIRONMENT_FILE = "environment.json"
"""In the node's prepared directory: `path`, the Python environment of the ranks."""


class PullPolicy(StrEnum):
    """When an image is fetched from its registry."""

    IF_NOT_PRESENT = "IfNotPresent"
    ALWAYS = "Always"
    NEVER = "Never"


class Lifetime(StrEnum):
    """How a workload is meant to end."""

    BATCH = "batch"  # ends by itself; exit 0 is success
    SERVICE = "service"  # serves until it is stopped; has an endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLimits:
    """Limits of a container; None: no limit."""

    cpu_cores: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """Containers that run beside a step's own, with the same image. They start with it, and none outlives it."""

    count: int
    argv: tuple[str, ...]
    """The command of each; its index is appended."""
    size: ContainerLimits
    """Of each container."""
    head: ContainerLimits
    """Of the step's own container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStep:
    """One command of a launch. The last step is the workload itself; the others prepare it."""

    name: str
    """Also names the step's log files: lower-case letters, digits and dashes."""
    argv: tuple[str, ...]
    """Empty: the image's own command."""
    args: tuple[str, ...] = ()
    """With an empty argv: arguments for the image's entry point, instead of the image's own."""
    python: bool = False
    """Run argv with a Python interpreter: the worker's; for the last step, that of the environment made by a preparing
    step, if any."""
    from_inputs: bool = False
    """argv[0] is the name of an input."""
    tokens: bool = False
    """Give it the tokens passed on with the job. Only for our own steps that fetch; user code never sees them."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variable -> reference to the encrypted secret with its value. Only this step gets them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    """The step is ended after this time; None: no limit."""
    image: str | None = None
    """The step runs in a container of this image, before all steps without one; None: where the other steps run."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Directory in that container -> path below the node's prepared directory where its content goes."""
    through: tuple[str, ...] = ()
    """The command that leads into the step's container, set by a worker outside of it. It reads the step's variables
    from standard input."""
    gang: Gang | None = None
    """Containers beside the step's own, if it has an image; None: it runs alone."""

    @property
    def guarded(self) -> bool:
        """Whether it is our own program with tokens or secrets that user code must not see."""
        return self.python and (self.tokens or bool(self.secrets))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobFile:
    """A file that the client uploaded by content; placed into the working directory before any step runs."""

    sha256: str
    path: str
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeMount:
    """A directory of the machine, or a named volume of the engine, mounted into a container."""

    source: str
    """An absolute path on the node, or the name of a volume."""
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRequest:
    """What a job requests for its containers beyond the image."""

    pull_policy: str | None = None
    """None: the backend's default."""
    auto_remove: bool = True
    """Whether a container is removed when it has ended."""
    shm_mb: int | None = None
    """Size of /dev/shm; None: the backend's default."""
    pids: int | None = None
    """Most processes and threads; None: the engine's default."""
    runtime: str | None = None
    """The engine it must be; None: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRequest:
    """What a job requests of a Kubernetes cluster."""

    runtime: str | None = None
    """The training runtime of Kubeflow's with which the job is a TrainJob; None: it is none."""
    runtime_kind: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    pod_patches: tuple[Mapping[str, Any], ...] = ()
    """Strategic merge patches of the template of its pods, whose container is called `node`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """A service is ready when `GET path` on its port answers with a status below 400."""

    path: str = "/"
    timeout_s: float = 600.0
    interval_s: float = 0.1
    first_node_only: bool = False
    """Only node 0 serves; the other nodes are ready when their ranks run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What runs, once per rank, on each node of an attempt."""

    kind: str
    steps: tuple[LaunchStep, ...]
    image: str | None = None
    """The image that the ranks run in; None: the backend's default. Only for backends that run images."""
    volumes: tuple[VolumeMount, ...] = ()
    container: ContainerRequest = field(default_factory=ContainerRequest)
    kubernetes: KubernetesRequest = field(default_factory=KubernetesRequest)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables set by the workload kind. The user's own are secrets."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variable -> reference to the encrypted secret with its value; the worker gets the values separately."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Small text files by name; every rank can read them."""
    prepared: Mapping[str, str] = field(default_factory=dict)
    """Variable -> path below the node's prepared directory of what a preparing step leaves there."""
    blobs: tuple[BlobFile, ...] = ()
    working_directory: str | None = None
    """Absolute, on the node; None: a new directory inside the run directory."""
    remove_working_directory: bool = False
    """Remove the new directory when the attempt has ended."""
    ranks_per_node: int = 1
    lifetime: Lifetime = Lifetime.BATCH
    port_environment: str | None = None
    """For a service: the variable for the port that the worker chose."""
    readiness: Readiness | None = None
    reports_phases: bool = False
    """False: the job is TRAINING when its processes start. True: from the first phase it reports."""
    can_save: bool | None = None
    """Whether it saves when asked to stop; None: once it has said so through the reporter."""
    grace_s: float = 30.0
    """From the request to stop until the kill."""
    retry_exit_codes: tuple[int, ...] = ()
    """Exit codes of the workload that count as transient."""


# The identity of a job class's run: project, group and name, each one segment of its checkpoints' path.

POINTERS = ("latest", "best")
"""Files beside a run's checkpoints that name one of them. No segment may have these names."""

SEGMENT_PATTERN = r"(?!(?:latest|best)$)[A-Za-z0-9_][A-Za-z0-9 ._+=@,-]{0,127}"
"""No pointer, and nothing that a file system or an object store treats specially."""
SEGMENT_SAYS = (
    "has letters, digits, spaces and . _ + = @ , - begins with a letter, a digit or _, and is neither latest nor best"
)

RUN_FILE = "run.json"
"""The input of a launch that tells the job class runner what to run."""

_segment = re.compile(SEGMENT_PATTERN)


def is_segment(text: str) -> bool:
    return _segment.fullmatch(text) is not None
