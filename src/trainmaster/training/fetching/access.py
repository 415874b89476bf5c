"""What a fetching step may reach: credentials, services, public addresses, and local paths that jobs may read."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from trainmaster.jobs.objects import Credentials
from trainmaster.protocol import environment
from trainmaster.protocol.secrets import HUB_TOKEN, SCAIATLAS_TOKEN, SCAIDRIVE_TOKEN
from trainmaster.protocol.sockets import resolve
from trainmaster.server.core.training.sources import file_path, fixed_part, left_by_job
from trainmaster.training.steps import CredentialsError, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """Advice for errors, by the fields of the document that the user wrote."""

    hub_name: str = "check the name; a model of this machine is written with a leading / or ./"
    hub_token: str = "give a token in training_config.environment.HF_TOKEN"
    hub_mirror: str = (
        "name a mirror in training_config.environment.HF_ENDPOINT, or a directory of this machine, with a leading / "
        "or ./"
    )
    s3_keys: str = "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in training_config.environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service with an address from the server's settings and a token that came with the job."""

    name: str
    url: str
    token: str = field(repr=False, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    cache: Path
    working_directory: Path
    data_roots: tuple[Path, ...] | None = None
    """Local paths must lie below one of them; None (outside a job): anywhere."""
    artifacts: Path | None = None
    """The directory of all jobs' artifacts; None outside a job."""
    private_urls: bool = True
    hub_token: str | None = field(repr=False, default=None)
    services: Mapping[str, Service] = field(default_factory=dict)
    beginning_bytes: int | None = None
    """For a check: how much is fetched of a file at most."""
    s3_credentials: Credentials | None = field(repr=False, default=None)
    """Of an assumed role; None: those of the environment."""
    remedies: Remedies = field(default_factory=Remedies)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], *, beginning_bytes: int | None = None) -> Self:
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
        found = self.services.get(scheme)
        if found is None:
            raise InputError(f"{path}: this server knows no {scheme}; its operator sets {scheme}_url")
        if not found.token:
            header = {"scaidrive": "X-ScaiDrive-Token", "scaiatlas": "X-ScaiAtlas-Token"}[scheme]
            raise CredentialsError(f"{path}: no token for {scheme} came with the job; send it as the header {header}")
        return found


def initializer_access(part: str, spec: Mapping[str, Any], document: Mapping[str, Any]) -> Access:
    """The access of an initializer's step; endpoint and keys go into the environment, where the clients look."""
    where = f"workload.initializers.{part}"
    secrets = {field: os.environ.pop(name, None) for field, name in environment.INITIALIZER_SECRETS.items()}
    access = replace(
        Access.from_environ(os.environ),
        hub_token=secrets["access_token"],
        remedies=Remedies(
            hub_name="check the name",
            hub_token=f"give a token in {where}.access_token",
            hub_mirror="name a mirror in workload.environment.HF_ENDPOINT",
            s3_keys=(
                "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in workload.environment"
                if spec["type"] == "cache"
                else f"give access_key_id and secret_access_key in {where}"
            ),
        ),
    )
    if not access.private_urls:
        for name in document["endpoints_of_the_job"]:
            _require_public(os.environ.get(name, ""), f"workload.environment.{name}")
        _require_public(spec.get("endpoint") or "", f"{where}.endpoint")
    given = {
        "AWS_ENDPOINT_URL_S3": spec.get("endpoint"),
        "AWS_REGION": spec.get("region"),
        "AWS_ACCESS_KEY_ID": secrets["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": secrets["secret_access_key"],
    }
    os.environ.update({name: value for name, value in given.items() if value})
    if secrets["access_key_id"]:
        os.environ.pop("AWS_SESSION_TOKEN", None)  # it belongs to the key of the environment
    return access


def _require_public(url: str, field: str) -> None:
    host = urlsplit(url).hostname
    if not host:
        return
    try:
        addresses = resolve(host)
    except (OSError, UnicodeError) as error:
        raise InputError(f"{field}: there is no host {host}") from error
    if not all(addresses.values()):
        raise InputError(
            f"{field}: it leads to {host}, which is not a public address; this server lets jobs read from public "
            "addresses alone"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFiles:
    paths: tuple[Path, ...]
    """Sorted."""
    top: Path
    """The directory that the path names, or the one above all matches of its pattern."""
    is_file: bool = False
    is_pattern: bool = False


def local_path(path: str, access: Access) -> Path:
    named = file_path(path) or path
    found = access.working_directory / named
    _require_allowed(path, found, access)
    if not found.exists() and named.startswith("/"):
        raise InputError(f"{path}: there is no such file or directory on the machine that runs the job")
    if not found.exists():
        raise InputError(f"{path}: there is no such file in the job's working directory; was it shipped with the job?")
    return found


def local_files(path: str, access: Access) -> LocalFiles:
    """The files of a path: itself, those of a directory, or those that a pattern matches, if jobs may read them."""
    named = file_path(path) or path
    if (above := fixed_part(named)) != named:
        top = access.working_directory / above
        _require_allowed(path, top, access)
        pattern = str(access.working_directory / named)
        files = [Path(each) for each in sorted(glob.glob(pattern, recursive=True)) if Path(each).is_file()]
        if not files:
            raise InputError(f"{path}: no file matches this pattern")
        found = LocalFiles(paths=tuple(files), top=top, is_pattern=True)
    else:
        top = local_path(path, access)
        if not top.is_dir():
            return LocalFiles(paths=(top,), top=top.parent, is_file=True)
        files = sorted(each for each in top.rglob("*") if _is_plain(each, top))
        if not files:
            raise InputError(f"{path}: the directory is empty")
        found = LocalFiles(paths=tuple(files), top=top)
    for file in found.paths:
        _require_allowed(path, file, access)
    return found


def left_directory(name: str, access: Access) -> Path:
    """A directory that another job left; the server checked that the account may read it. Raises InputError."""
    try:
        wanted = left_by_job(name)
    except ValueError as error:
        raise InputError(str(error)) from None
    if access.artifacts is None:
        raise InputError(f"{name}: results of jobs are known only where jobs run; name the directory")
    own = access.artifacts.resolve() / wanted.job_id
    try:
        found = (own / wanted.path).resolve()
        if found.is_relative_to(own) and found.is_dir():
            return found
    except OSError as error:  # for example, the account runs as another user now
        raise InputError(f"{name} cannot be read: {error.strerror}") from error
    raise InputError(f"{name}: the job has left no such directory, or it was removed since")


def _is_plain(path: Path, directory: Path) -> bool:
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)


def _require_allowed(path: str, found: Path, access: Access) -> None:
    """Refuse a path outside the data roots, also by way of a link or `..`."""
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
