"""The environment of a workload: container options, and `workload.packages`, which a step installs first.

Requirements are only checked for their form, conservatively: the installer interprets them. Options of the installer's
command line do not pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from trainmaster.protocol.launch import PullPolicy, Step
from trainmaster.server.core.fields import AbsolutePath, Count, Flag, Matches, Model, Text, must

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
    """More about the container of a job."""

    pull_policy: PullPolicy | None = Field(
        default=None, description="When the image is pulled. Null: the server's setting."
    )
    auto_remove: Flag = Field(
        default=True, description="Whether to remove the container when it ends. Logs and results are always kept."
    )
    shm_mb: Count | None = Field(
        default=None,
        description="The size of /dev/shm. Null: the reserved memory, or half of the machine's memory.",
    )
    pids: Count | None = Field(
        default=None, description="Maximum number of processes and threads. Null: the engine's limit."
    )
    runtime: Runtime | None = Field(
        default=None, description="The required engine; the job fails if the server has another one."
    )


ENVIRONMENT = Step(
    name="environment",
    # Whatever the job ships: without -P, a file of that name would be imported in the module's place.
    argv=("-P", "-m", "trainmaster.worker.environments"),
    python=True,
)
"""Makes or finds the environment that the last step runs in."""

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


def packages_text(packages: Sequence[str], index_urls: Sequence[str]) -> str:
    return json.dumps({"packages": list(packages), "index_urls": list(index_urls)}, indent=2) + "\n"
