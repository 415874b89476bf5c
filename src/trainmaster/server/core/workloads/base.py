"""Workload specs: the fields that all kinds share, how they become part of a launch, and the registered kinds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Protocol

from pydantic import Field, Strict, StringConstraints

from trainmaster.protocol.launch import (
    PACKAGES_FILE,
    BlobFile,
    ContainerRequest,
    KubernetesRequest,
    Launch,
    LaunchStep,
    Lifetime,
    PullPolicy,
    Readiness,
    VolumeMount,
)
from trainmaster.protocol.secrets import reference_to, variable_secret
from trainmaster.server.core.fields import (
    MAX_RANKS_PER_NODE,
    AbsolutePath,
    Count,
    Environment,
    Flag,
    Image,
    Matches,
    Model,
    RelativePath,
    RuledModel,
    RuleViolation,
    Sha256,
    TaggedUnion,
    Text,
    must,
    optional,
)
from trainmaster.server.core.spec.configs import OutputConfig, ResourceConfig, TrainingConfig
from trainmaster.server.core.spec.data import DataConfig
from trainmaster.server.core.workloads.initializers import (
    INPUT_FILE,
    Initializers,
    initializers_text,
    initializing_steps,
    prepared_paths,
)
from trainmaster.server.core.workloads.kubernetes import KubernetesOptions

# The container of a workload.

VolumeSource = Annotated[
    Text,
    Matches(
        r"/(?!(.*/)?\.\.(/|$)).*|[A-Za-z0-9][A-Za-z0-9_.-]{0,62}",
        "must be an absolute path without '..', or the name of a volume: letters, digits, '_', '.' and '-'",
    ),
]
VolumeTarget = Annotated[
    AbsolutePath,
    Matches(
        r"/(?!trainmaster(/|$))(?!\.{1,2}(/|$))[^/]+(/(?!\.{1,2}(/|$))[^/]+)*/?",
        "must be a path without '.', '..' or empty parts, and not in /trainmaster, which is the worker's",
    ),
]


class ContainerEngineName(StrEnum):
    """A container engine."""

    DOCKER = "docker"
    PODMAN = "podman"


class VolumeSpec(Model):
    """A directory of the server's machine, or a volume of the engine, that the container sees."""

    source: VolumeSource = Field(
        description="A path on the server, inside its data roots; or the name of a volume, which is created if it "
        "does not exist and kept for the next jobs of the account."
    )
    target: VolumeTarget = Field(
        description="The mount point in the container; /trainmaster is reserved for the worker."
    )
    read_only: Flag = Field(default=False, description="Whether the mount is read-only.")

    @property
    def path(self) -> str | None:
        """The path on the server; None for a volume of the engine."""
        return self.source if self.source.startswith("/") else None


class ContainerOptions(Model):
    """Options of the container of a job."""

    pull_policy: PullPolicy | None = optional("When the image is pulled. Null: the server's setting.")
    auto_remove: Flag = Field(
        default=True, description="Whether to remove the container when it ends. Logs and results are always kept."
    )
    shm_mb: Count | None = optional("The size of /dev/shm. Null: the reserved memory, or half of the machine's memory.")
    pids: Count | None = optional("Maximum number of processes and threads. Null: the engine's limit.")
    runtime: ContainerEngineName | None = optional("The required engine; the job fails if the server has another one.")


ENVIRONMENT = LaunchStep(
    name="environment",
    # Whatever the job ships: without -P, a file of that name would be imported in the module's place.
    argv=("-P", "-m", "trainmaster.worker.environments"),
    python=True,
)
"""Makes or finds the environment that the last step runs in."""

# Packages. Requirements are only checked for their form, conservatively: the installer interprets them. Options of the
# installer's command line do not pass.

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_EXTRAS = rf"(?: ?\[ ?{_NAME}(?: ?, ?{_NAME})* ?\])?"
_CLAUSE = r"(?:===?|~=|!=|[<>]=?) ?[A-Za-z0-9.*+!_-]+"
_VERSIONS = rf"(?: ?{_CLAUSE}(?: ?, ?{_CLAUSE})*)?"
_URL = r"(?:[a-z]+\+)?(?:https?|ssh|file)://[^\s;]+"
_MARKER = r"""(?: ?;[ A-Za-z0-9_.,<>=!~()'"*+-]+)?"""
_REQUIREMENT = rf"{_NAME}{_EXTRAS}(?:{_VERSIONS}| ?@ ?{_URL}){_MARKER}|{_URL}"

_WITHOUT_CREDENTIALS = must(
    lambda value: not re.search(r"https?://[^/\s]*@", value),
    "must not hold a user or a password, as it is shown with the job; give the whole URL in the variable "
    "PIP_INDEX_URL or PIP_EXTRA_INDEX_URL of workload.environment, whose values are encrypted",
)
Requirement = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=1024),
    Matches(
        _REQUIREMENT,
        "is no requirement: write name, name[extra]>=1.0,<2, name @ https://..., or a URL, in one line and without "
        "options",
    ),
    _WITHOUT_CREDENTIALS,
]
IndexUrl = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=1024),
    Matches(r"(?:https?://[^/\s]\S*|file:///\S*)", "must be an http, https or file URL"),
    _WITHOUT_CREDENTIALS,
]
Requirements = Annotated[tuple[Requirement, ...], Field(max_length=512)]
IndexUrls = Annotated[tuple[IndexUrl, ...], Field(max_length=16)]


class JobConfigs(Protocol):
    """What a workload kind may read of a request, beside its own spec. A `SubmitJobRequest` is one."""

    @property
    def name(self) -> str: ...
    @property
    def training_config(self) -> TrainingConfig | None: ...
    @property
    def data_config(self) -> DataConfig | None: ...
    @property
    def resource_config(self) -> ResourceConfig: ...
    @property
    def output_config(self) -> OutputConfig: ...
    @property
    def world_size(self) -> int: ...
    @property
    def training_document(self) -> Mapping[str, Any]: ...


DEFAULT_GRACE_S = 30.0
"""Long enough for a small job to save, short enough that a cancel does not feel ignored."""
MAX_GRACE_S = 86_400.0

ExitCode = Annotated[int, Strict(), Field(ge=1, le=255)]


class UploadedFile(Model):
    """A file that the client uploaded by content; it is put into the working directory."""

    path: RelativePath = Field(description="Relative to the working directory.")
    sha256: Sha256 = Field(description="Digest of the content, as it was uploaded.")
    executable: Flag = Field(default=False, description="Whether it may be executed.")


class WorkloadSpec(RuledModel):
    """What runs. These fields are common to all kinds; each kind adds its own."""

    kind: str = Field(description="The kind of the workload.")
    image: Image | None = optional(
        "The container image to run in, on a backend that runs images. Null: the backend's own "
        "choice, which is none on `local`."
    )
    volumes: Annotated[tuple[VolumeSpec, ...], Field(max_length=256)] = Field(
        default=(), description="Further mounts of the container; needs a backend that runs images."
    )
    container: ContainerOptions | None = optional("Options of the container, on a backend that runs images.")
    kubernetes: KubernetesOptions | None = optional("Options of the job, on a cluster of kind kubernetes.")
    environment: Environment = Field(
        default_factory=dict,
        repr=False,
        description="Variables for the process; they override training_config.environment. Values are encrypted and "
        "never shown.",
    )
    working_directory: AbsolutePath | None = optional("An absolute path on the node; a fresh directory when null.")
    remove_working_directory: Flag = Field(
        default=False, description="Remove the fresh directory at the end. Logs and results are kept elsewhere."
    )
    ranks_per_node: Annotated[int, Strict(), Field(ge=1, le=MAX_RANKS_PER_NODE)] = Field(
        default=1, description="Processes on each node."
    )
    can_save: Flag | None = optional("Whether it saves when asked to stop. Null: once the job has shown that it can.")
    grace_period_s: Annotated[float, Strict(), Field(ge=0, le=MAX_GRACE_S)] | None = optional(
        f"Seconds from the request to stop until the kill; {DEFAULT_GRACE_S:g} when null. A pause or a preemption "
        "gives at least three times the duration of the last save."
    )
    retry_exit_codes: Annotated[tuple[ExitCode, ...], Field(max_length=255)] = Field(
        default=(), description="Exit codes that count as transient failures."
    )
    resume_from_checkpoint: Text | None = optional(
        "Id of a committed checkpoint to start from, of any job of the account. A training names it in training_config."
    )
    files: Annotated[tuple[UploadedFile, ...], Field(max_length=8192)] = Field(
        default=(), description="Files that were uploaded for this job."
    )

    def broken_rules(self) -> Iterator[RuleViolation]:
        paths = {file.path for file in self.files}
        both = paths & directories_above(paths)
        seen: set[str] = set()
        for index, file in enumerate(self.files):
            if file.path in seen:
                yield RuleViolation(
                    ("files", index, "path"), f"'{file.path}' is there twice; each path may be used once"
                )
            seen.add(file.path)
            above = min(both & directories_above([file.path]), default=None) if both else None
            if above:
                yield RuleViolation(("files", index, "path"), f"'{above}' is a file too, so nothing can lie below it")

    def check(self, job: JobConfigs) -> None:
        """Check what the fields alone do not say; SpecError when it is wrong, RefusedError when it is not available."""

    def compile(self, job: JobConfigs) -> Launch:
        """What to run. Pure: the same request always gives the same launch."""
        raise NotImplementedError

    def launch(
        self,
        job: JobConfigs,
        *steps: LaunchStep,
        lifetime: Lifetime = Lifetime.BATCH,
        port_environment: str | None = None,
        readiness: Readiness | None = None,
        inputs: Mapping[str, str] = MappingProxyType({}),
        reports_phases: bool = False,
    ) -> Launch:
        """A launch of these steps, with all that the kinds have in common."""
        training = job.training_config
        variables = {**training.environment, **self.environment} if training else self.environment
        if isinstance(self, PackagedSpec) and self.packages:
            steps = (ENVIRONMENT, *steps)
            packages = {"packages": self.packages, "index_urls": self.index_urls}
            inputs = {**inputs, PACKAGES_FILE: json.dumps(packages, indent=2) + "\n"}
        if (initializers := initializers_of(self)) is not None:
            steps = (*initializing_steps(initializers), *steps)
            inputs = {**inputs, INPUT_FILE: initializers_text(initializers, variables)}
        return Launch(
            kind=self.kind,
            steps=steps,
            image=self.image,
            volumes=tuple(VolumeMount(**dict(volume)) for volume in self.volumes),
            container=ContainerRequest(**dict(self.container or ())),
            kubernetes=self.kubernetes.request() if self.kubernetes else KubernetesRequest(),
            secrets={name: reference_to(variable_secret(name)) for name in variables},
            inputs=dict(inputs),
            prepared=prepared_paths(initializers) if initializers is not None else {},
            blobs=tuple(BlobFile(**dict(file)) for file in self.files),
            working_directory=self.working_directory,
            remove_working_directory=self.remove_working_directory and self.working_directory is None,
            ranks_per_node=self.ranks_per_node,
            lifetime=lifetime,
            port_environment=port_environment,
            readiness=readiness,
            reports_phases=reports_phases,
            can_save=self.can_save,
            grace_s=DEFAULT_GRACE_S if self.grace_period_s is None else self.grace_period_s,
            retry_exit_codes=self.retry_exit_codes,
        )


class InitializedSpec(WorkloadSpec):
    """A workload of the user's own, for which a dataset and a model can be fetched before it runs."""

    initializers: Initializers | None = optional(
        "A dataset and a model to fetch before the job's processes start, each in its own step."
    )


class PackagedSpec(InitializedSpec):
    """A workload of the user's own that may need Python packages beyond those of the worker."""

    packages: Requirements = Field(
        default=(),
        description="Packages to install, into an environment that jobs with the same packages share; in "
        "pip's syntax, such as `einops>=0.8`.",
    )
    index_urls: IndexUrls = Field(
        default=(),
        description="Where packages come from: the first is the index, the others are extra indexes. The worker's own "
        "settings when empty.",
    )


def initializers_of(workload: WorkloadSpec | None) -> Initializers | None:
    return workload.initializers if isinstance(workload, InitializedSpec) else None


def directories_above(paths: Iterable[str]) -> set[str]:
    """All directories that these relative paths lead through."""
    found: set[str] = set()
    for path in paths:
        above = path.rpartition("/")[0]
        while above and above not in found:
            found.add(above)
            above = above.rpartition("/")[0]
    return found


# The registered kinds, and the field that holds a spec of any of them. A kind that was registered is accepted in
# requests, shown in the JSON schema and compiled, and nothing else has to change.

_UNION = TaggedUnion("kind")


def register(spec: type[WorkloadSpec]) -> None:
    _UNION.add(spec)


def unregister(kind: str) -> None:
    del _UNION.models[kind]


def kinds() -> tuple[str, ...]:
    return tuple(sorted(_UNION.models))


def spec_for(kind: str) -> type[Model]:
    """KeyError when there is no such kind."""
    return _UNION.models[kind]


AnyWorkload = Annotated[WorkloadSpec, _UNION]
"""A workload of any registered kind, told apart by `kind`."""
