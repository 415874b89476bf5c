"""What a workload says of the container that it runs in, for a backend that runs images."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from trainmaster.protocol.launch import ContainerWish, PullPolicy, Volume
from trainmaster.server.core.fields import AbsolutePath, Count, Flag, Matches, Model, Text

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


class Runtime(StrEnum):
    """A container engine."""

    DOCKER = "docker"
    PODMAN = "podman"


class VolumeSpec(Model):
    """A directory of the server's machine, or a volume of the engine, that the container sees."""

    source: VolumeSource = Field(
        description="A path on the server, inside its data roots; or the name of a volume, which is made when it is "
        "not there and kept for the next jobs of the account."
    )
    target: VolumeTarget = Field(description="Where it is seen in the container; /trainmaster is the worker's.")
    read_only: Flag = Field(default=False, description="Whether it can only be read there.")

    @property
    def path(self) -> str | None:
        """The path on the server; None for a volume of the engine."""
        return self.source if self.source.startswith("/") else None

    def compiled(self) -> Volume:
        """As the backend is told."""
        return Volume(source=self.source, target=self.target, read_only=self.read_only)


class ContainerOptions(Model):
    """More about the container of a job."""

    pull_policy: PullPolicy | None = Field(
        default=None, description="When the image is fetched. Null: as the server does."
    )
    auto_remove: Flag = Field(
        default=True, description="Whether it is removed when it has ended. Logs and results are kept either way."
    )
    shm_mb: Count | None = Field(
        default=None,
        description="How much /dev/shm may hold. Null: what is booked of memory, or half of the machine's.",
    )
    pids: Count | None = Field(
        default=None, description="Most processes and threads in it. Null: as many as the engine lets it have."
    )
    runtime: Runtime | None = Field(
        default=None, description="The engine that it must be; the job fails where the server has another one."
    )


def wish_from(spec: ContainerOptions | None) -> ContainerWish:
    """As the backend is told."""
    if spec is None:
        return ContainerWish()
    return ContainerWish(
        pull_policy=spec.pull_policy,
        auto_remove=spec.auto_remove,
        shm_mb=spec.shm_mb,
        pids=spec.pids,
        runtime=spec.runtime,
    )
