"""What a fetching step may reach, and with which credentials: read from the environment that its worker set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from trainmaster.jobs.objects import Credentials
from trainmaster.protocol import environment
from trainmaster.protocol.secrets import HUB_TOKEN, SCAIATLAS_TOKEN, SCAIDRIVE_TOKEN
from trainmaster.training.errors import CredentialsError, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What to do when something cannot be had: in the words of the document that names it."""

    hub_name: str = "check the name; a model of this machine is written with a leading / or ./"
    hub_token: str = "give a token in training_config.environment.HF_TOKEN"
    hub_mirror: str = (
        "name a mirror in training_config.environment.HF_ENDPOINT, or a directory of this machine, with a leading / "
        "or ./"
    )
    s3_keys: str = "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in training_config.environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service whose address the server's settings have, asked with a token that came with the job."""

    name: str
    url: str
    token: str = field(repr=False, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What may be reached."""

    cache: Path
    working_directory: Path
    data_roots: tuple[Path, ...] | None = None
    """Local paths must lie below one of them; None, outside a job: anywhere."""
    artifacts: Path | None = None
    """Below which lies what jobs leave; None, outside a job: nowhere."""
    private_urls: bool = True
    """Whether http(s) URLs may lead to addresses that are not public."""
    hub_token: str | None = field(repr=False, default=None)
    services: Mapping[str, Service] = field(default_factory=dict)
    """By the scheme of their paths."""
    beginning_bytes: int | None = None
    """For a check: no more than this is fetched of a file."""
    s3_credentials: Credentials | None = field(repr=False, default=None)
    """Where there is a role to assume; otherwise the environment has them."""
    remedies: Remedies = field(default_factory=Remedies)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], *, beginning_bytes: int | None = None) -> Self:
        """What the environment of a step says."""
        roots = environ.get(environment.DATA_ROOTS)
        artifacts = environ.get(environment.ARTIFACTS_DIR)
        cache = environ.get(environment.CACHE_DIR)
        services = {
            "scaidrive": (environment.SCAIDRIVE_URL, environment.TOKENS[SCAIDRIVE_TOKEN]),
            "scaiatlas": (environment.SCAIATLAS_URL, environment.TOKENS[SCAIATLAS_TOKEN]),
        }
        return cls(
            cache=Path(cache) if cache else Path.home() / ".cache" / "trainmaster",
            working_directory=Path.cwd(),
            data_roots=None if roots is None else tuple(Path(root) for root in roots.split(os.pathsep) if root),
            artifacts=Path(artifacts) if artifacts else None,
            private_urls=environ.get(environment.PRIVATE_URLS, "1") == "1",
            hub_token=environ.get(environment.TOKENS[HUB_TOKEN]) or None,
            services={
                name: Service(name=name, url=environ[url].rstrip("/"), token=environ.get(token, ""))
                for name, (url, token) in services.items()
                if environ.get(url)
            },
            beginning_bytes=beginning_bytes,
        )

    def service(self, scheme: str, path: str) -> Service:
        """The service behind a scheme.

        Raises:
            InputError: the server knows none.
            CredentialsError: no token for it came with the job.
        """
        found = self.services.get(scheme)
        if found is None:
            raise InputError(f"{path}: this server knows no {scheme}; its operator sets {scheme}_url")
        if not found.token:
            header = {"scaidrive": "X-ScaiDrive-Token", "scaiatlas": "X-ScaiAtlas-Token"}[scheme]
            raise CredentialsError(f"{path}: no token for {scheme} came with the job; send it as the header {header}")
        return found
