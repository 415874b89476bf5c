"""What a fetching step may reach: credentials and services from its environment, and local paths.

Local paths lie below the server's data roots, in the job's working directory, or in what another job left.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from trainmaster.jobs.objects import Credentials
from trainmaster.protocol import environment
from trainmaster.protocol.secrets import HUB_TOKEN, SCAIATLAS_TOKEN, SCAIDRIVE_TOKEN
from trainmaster.server.core.training.sources import file_path, fixed_part, left_by_job
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


_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFiles:
    """The files that a path stands for."""

    paths: tuple[Path, ...]
    """Sorted."""
    top: Path
    """The directory that the path names, or below which all matches of its pattern lie."""
    itself: bool = False
    """The path names a file."""
    pattern: bool = False
    """The path is a pattern."""


def local_path(path: str, access: Access) -> Path:
    """Where a path leads that a job names.

    Raises:
        InputError: there is nothing, or it lies where jobs may not read.
    """
    named = file_path(path) or path
    found = access.working_directory / named
    _require_allowed(path, found, access)
    if not found.exists():
        raise InputError(_nothing(path, named))
    return found


def local_files(path: str, access: Access) -> LocalFiles:
    """All files that a path stands for: itself, those of a directory, or those that a pattern matches.

    Raises:
        InputError: there are none, or one of them lies where jobs may not read.
    """
    named = file_path(path) or path
    if _WILD & set(named):
        top = access.working_directory / fixed_part(named)
        _require_allowed(path, top, access)
        pattern = str(access.working_directory / named)
        files = [Path(each) for each in sorted(glob.glob(pattern, recursive=True)) if Path(each).is_file()]
        if not files:
            raise InputError(f"{path}: no file matches this pattern")
        found = LocalFiles(paths=tuple(files), top=top, pattern=True)
    else:
        top = local_path(path, access)
        if not top.is_dir():
            return LocalFiles(paths=(top,), top=top.parent, itself=True)
        files = sorted(each for each in top.rglob("*") if _is_plain(each, top))
        if not files:
            raise InputError(f"{path}: the directory is empty")
        found = LocalFiles(paths=tuple(files), top=top)
    for file in found.paths:
        _require_allowed(path, file, access)
    return found


def left_directory(name: str, access: Access) -> Path:
    """A directory that another job left. That the account may have it was seen when the job was submitted.

    Raises:
        InputError: it is not there, or leads elsewhere.
    """
    try:
        wanted = left_by_job(name)
    except ValueError as error:
        raise InputError(str(error)) from None
    if access.artifacts is None:
        raise InputError(f"{name}: what jobs leave is known where jobs run alone; name its directory")
    own = access.artifacts.resolve() / wanted.job_id
    try:
        found = (own / wanted.path).resolve()
        if found.is_relative_to(own) and found.is_dir():
            return found
    except OSError as error:  # the account runs as another user than it did then, say
        raise InputError(f"{name} cannot be read: {error.strerror}") from error
    raise InputError(f"{name}: the job has left no such directory, or it was removed since")


def _is_plain(path: Path, directory: Path) -> bool:
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)


def _require_allowed(path: str, found: Path, access: Access) -> None:
    """Refuse what lies elsewhere, wherever a link or `..` leads."""
    if access.data_roots is None:
        return
    real = found.resolve()
    roots = [root.resolve() for root in (access.working_directory, *access.data_roots)]
    if not any(real == root or root in real.parents for root in roots):
        allowed = ", ".join(map(str, access.data_roots)) or "none"
        raise InputError(
            f"{path}: this server lets jobs read below its data roots alone ({allowed}); put it there, "
            "name it from the job file's directory, so that it is sent along, or add to the server's data_roots"
        )


def _nothing(path: str, named: str) -> str:
    if named.startswith("/"):
        return f"{path}: there is no such file or directory on the machine that runs the job"
    return f"{path}: there is no such file in the job's working directory; was it shipped with the job?"
