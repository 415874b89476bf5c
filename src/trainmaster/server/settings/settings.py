"""The server's settings, resolved. Everything has a default that is right on a laptop.

A setting is a field with a docstring; file, environment and `trainmaster config` (`trainmaster.server.settings`) follow
from its name, its type and its metadata: `flag` names its option of `serve`, `minimum` and `maximum` bound a number,
and a `secret` is never shown.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from trainmaster.protocol.launch import PullPolicy


class Role(StrEnum):
    """What a server process does. Roles share only the store and hints."""

    API = "api"
    COORDINATOR = "coordinator"
    GATEWAY = "gateway"


class TransportKind(StrEnum):
    """How local workers hand over what they write."""

    FILES = "files"
    HTTP = "http"


class ContainerRuntime(StrEnum):
    """Which container engine is used."""

    AUTO = "auto"
    DOCKER = "docker"
    PODMAN = "podman"


class LogFormat(StrEnum):
    """How log lines are written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class NamedPath:
    """A name for a path of this machine, written `NAME=PATH`."""

    name: str
    path: Path

    def __str__(self) -> str:
        return f"{self.name}={self.path}"


ALL_ROLES = frozenset(Role)
DEFAULT_RATE_LIMIT_PER_S = 500.0
"""The default where others can reach the server: enough for a training loop that drives a service, and half of what a
small machine answers, so that a runaway loop leaves the rest to others."""
HOME_VARIABLE = "TRAINMASTER_HOME"
SIMULATED_GPUS_VARIABLE = "TRAINMASTER_SIMULATED_GPUS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One server's settings, by topic; documentation and `trainmaster config` list them in this order."""

    # The process and its address

    data_dir: Path = field(metadata={"flag": "--data-dir"})
    """All of the server's own state."""
    host: str = field(default="127.0.0.1", metadata={"flag": "--host"})
    """The address to listen on."""
    port: int = field(default=7070, metadata={"flag": "--port", "minimum": 0, "maximum": 65535})
    """The port to listen on; 0 chooses a free one."""
    roles: frozenset[Role] = field(default=ALL_ROLES, metadata={"flag": "--roles"})
    """What this process does: `api` all routes but the gateway's, `gateway` those, `coordinator` leads and runs
    jobs."""
    advertise_url: str = field(default="", metadata={"flag": "--advertise-url"})
    """Where workers reach an API when they report over HTTP; empty means this server itself. Attempts keep the address
    that they were given, so that the port must not be 0."""
    transport: TransportKind = field(default=TransportKind.FILES, metadata={"flag": "--transport"})
    """How workers report: `files`, or `http` from private directories in `spool` of the data directory."""
    lease_s: float = field(default=5.0, metadata={"minimum": 0.1})
    """How long a leader leads without renewing."""

    # TLS, and who may ask how often

    tls_cert: Path | None = field(default=None, metadata={"flag": "--tls-cert"})
    """The server's certificate with its chain, in PEM. Any address but loopback needs it and `tls_key`, or
    `behind_proxy`."""
    tls_key: Path | None = field(default=None, metadata={"flag": "--tls-key"})
    """The certificate's private key, in PEM."""
    behind_proxy: bool = field(default=False, metadata={"flag": "--behind-proxy"})
    """Whether a proxy in front does TLS. Then, and only then, `X-Forwarded-For` and `X-Forwarded-Proto` are
    believed."""
    ca: Path | None = None
    """Certificates, in PEM, of the authorities that are trusted by workers which report over HTTPS, instead of the
    system's, and by webhooks, beside them."""
    rate_limit_per_s: float | None = field(default=None, metadata={"minimum": 0})
    """Requests that each key may make in a second, in the long run; 0 means no limit. Not set: 500, and no limit where
    only this machine can reach the server."""
    rate_burst: int = field(default=2000, metadata={"minimum": 1})
    """Requests that a key which was quiet may make at once, whatever the rate."""
    open_metrics: bool = False
    """Whether `/metrics` needs no key."""

    # The database and secrets

    database_url: str = field(default="", repr=False, metadata={"flag": "--database"})
    """Where the database is: `sqlite:////srv/trainmaster.db` on a local disk, or `postgresql://user@host/database`.
    Empty: SQLite in the data directory."""
    secret_key: str = field(default="", repr=False, metadata={"secret": True})
    """What secrets are sealed with: 32 random bytes in base64. Empty: the file `secret-key` beside an SQLite database,
    made at the first start. PostgreSQL needs it, the same on every server."""
    old_secret_keys: tuple[str, ...] = field(default=(), repr=False, metadata={"secret": True})
    """Keys that were `secret_key` before; they open what they sealed."""

    # Directories

    runs_root: Path | None = field(default=None, metadata={"flag": "--runs-root"})
    """Where run directories lie: requests, logs, metrics. Not set: `runs` in the data directory."""
    artifacts_root: Path | None = field(default=None, metadata={"flag": "--artifacts-root"})
    """Where checkpoints and results lie, and then also shipped files. Not set: `artifacts` in the data directory."""
    cache_root: Path | None = field(default=None, metadata={"flag": "--cache-root"})
    """Where models and data that jobs name are kept once they were fetched and prepared. Not set: `cache` in the data
    directory."""
    data_roots: tuple[Path, ...] = field(default=(), metadata={"flag": "--data-root"})
    """Where paths that jobs name on the server may lie; empty means the home of the server's user."""
    shapes_dir: Path | None = field(default=None, metadata={"flag": "--shapes-dir"})
    """Where the training shapes of this server lie, one YAML file each. Not set: `shapes` in the data directory."""
    runtimes_dir: Path | None = field(default=None, metadata={"flag": "--runtimes-dir"})
    """Where the training runtimes of this server lie, in YAML files. Not set: `runtimes` in the data directory."""

    # Backends and nodes

    backends: tuple[str, ...] = ()
    """Where jobs can run: `local` and `container`; the first is the default of jobs that name none. Empty: `local`,
    then `container` where `trainmaster[containers]` is installed; its engine is looked for when a job needs one."""
    container_host: str = ""
    """Where the container engine listens, such as `unix:///run/podman/podman.sock`. Empty: DOCKER_HOST,
    CONTAINER_HOST, or the sockets of docker and podman, in that order. It has to run on this machine, whose files
    containers share."""
    container_runtime: ContainerRuntime = ContainerRuntime.AUTO
    """Which engine that must be; `auto` takes whichever answers."""
    container_pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    """When images are fetched, for jobs that do not say."""
    container_image: str = ""
    """The image of jobs that name none. Empty: such a job is refused for the backend `container`."""
    simulated_gpus: str = field(default="", metadata={"flag": "--simulated-gpus"})
    """GPUs to pretend to have, such as `H100-80GB:8,A100-40GB:4;H100-80GB:8`: commas part types on one node,
    semicolons part nodes."""
    slots_per_node: int = field(default=0, metadata={"flag": "--slots", "minimum": 0})
    """How many job nodes run on a machine at a time; 0 means four for each core, at least 16."""
    autoscaling: bool = False
    """Nodes are added when jobs wait for them: a job that no present node could hold is queued, not refused."""
    shared_uid: bool = False
    """Whether all accounts may run jobs as the server's own user, where they can read each other's files. Otherwise
    only the account `default` may, and others need a uid of their own, or containers."""

    # Models and data that jobs name

    model_aliases: tuple[NamedPath, ...] = field(default=(), metadata={"flag": "--model-alias"})
    """Names of base models, such as `Qwen/Qwen3-8B=/srv/models/qwen3-8b`, each with the directory of a transformers
    checkpoint: what trainer services may be asked for."""
    allow_trust_remote_code: bool = False
    """Whether jobs may run code that comes with a model (`base_model.trust_remote_code`)."""
    private_urls: bool | None = None
    """Whether URLs of models and data that jobs name may lead to addresses that are not public. Not set: only where
    nobody but this machine can reach the server."""
    token_exchange: str = ""
    """Where an RFC 8693 endpoint exchanges a caller's credential for ScaiDrive and ScaiAtlas tokens; empty: nowhere."""
    scaidrive_url: str = ""
    """Where `scaidrive://` paths are fetched from, with the caller's own token; empty: jobs cannot name them."""
    scaiatlas_url: str = ""
    """Where `scaiatlas://` paths and models are fetched from, with the caller's own token; empty: jobs cannot name
    them."""
    max_blob_bytes: int = field(default=2 << 30, metadata={"minimum": 1})
    """The largest file that can be shipped with a job."""

    # Plain Tinker clients

    tinker_shape: str = ""
    """The training shape of trainers that are started for plain Tinker clients. Empty: the smallest that is good
    enough, on a GPU where there is one."""
    tinker_tempered_logprobs: bool = False
    """Whether trainers that are started for plain Tinker clients give sampled tokens the log-probabilities of the
    distribution that they were drawn from (temperature, top-k, top-p). Otherwise they are the model's own, at
    temperature 1, which training computes."""
    tinker_silent_s: float = field(default=1800.0, metadata={"minimum": 20})
    """A plain Tinker client that is not heard of for so long is taken for dead: its session ends, and its models with
    it; what it has not saved is saved for a week. Clients beat every ten seconds; a laptop may sleep a little
    longer."""

    # Retention

    blob_keep_s: float = field(default=24 * 3600.0, metadata={"minimum": 0})
    """A blob that no job uses is removed after this long."""
    keep_runs_s: float = field(default=0.0, metadata={"minimum": 0})
    """Run directories (logs, metrics, working directories) are removed so long after their job ended; 0 keeps them."""
    keep_checkpoints_s: float = field(default=0.0, metadata={"minimum": 0})
    """Checkpoints are removed so long after their job ended, but for pinned ones, the best and the latest; of a deleted
    job, all. 0 keeps them."""
    keep_deleted_s: float = field(default=0.0, metadata={"minimum": 0})
    """The files of a deleted job are removed so long after its deletion; 0 keeps them until it is purged."""
    keep_caches_s: float = field(default=7 * 24 * 3600.0, metadata={"minimum": 0})
    """What couriers left in `spool` is removed so long after their attempt ended; 0 keeps it."""
    keep_sessions_s: float = field(default=30 * 24 * 3600.0, metadata={"minimum": 0})
    """The record of a Tinker session is removed so long after its end, with its samplers and with those of its training
    runs that have no saved weights; runs that have some stay, and their session with them. 0 keeps all."""
    log_cap_mb: int = field(default=1024, metadata={"minimum": 0})
    """How much each log of a rank, stdout and stderr apart, may hold, in MiB: beyond that its middle is removed. 0: as
    much as it likes."""

    # Reports: logs, webhooks and stalled jobs

    log_format: LogFormat = LogFormat.TEXT
    """How the log is written: `text` for people, or `json`, an object on each line, with a line for each request."""
    log_level: LogLevel = LogLevel.INFO
    """What is logged: from this level on."""
    stalled_after_s: float = field(default=900.0, metadata={"flag": "--stalled-after-s", "minimum": 0.1})
    """A job that makes no step for so long, after its first one, is shown as stalled."""
    webhook_private_addresses: bool | None = None
    """Whether webhooks may lead to addresses that are not public. Not set: only where nobody but this machine can reach
    the server."""

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir / 'trainmaster.db'}"

    @property
    def database_file(self) -> Path | None:
        """The file of an SQLite database; None for any other."""
        path = self.database.partition(":///")[2].partition("?")[0]
        return Path(path) if path and self.database.startswith("sqlite") else None

    @property
    def runs(self) -> Path:
        return self.runs_root or self.data_dir / "runs"

    @property
    def artifacts(self) -> Path:
        return self.artifacts_root or self.data_dir / "artifacts"

    @property
    def cache(self) -> Path:
        """The directory of models and data that jobs have fetched."""
        return self.cache_root or self.data_dir / "cache"

    @property
    def shapes(self) -> Path:
        return self.shapes_dir or self.data_dir / "shapes"

    @property
    def runtimes(self) -> Path:
        return self.runtimes_dir or self.data_dir / "runtimes"

    @property
    def readable_roots(self) -> tuple[Path, ...]:
        """The directories that jobs may name paths in."""
        return self.data_roots or (Path.home(),)

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.behind_proxy:
            return False
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    @property
    def private_webhooks(self) -> bool:
        """Whether webhooks may go to private addresses."""
        return self.is_private if self.webhook_private_addresses is None else self.webhook_private_addresses

    @property
    def private_sources(self) -> bool:
        """Whether URLs of models and data may lead to private addresses."""
        return self.is_private if self.private_urls is None else self.private_urls

    @property
    def rate_limit(self) -> float:
        """Requests of a key in a second; 0 means no limit."""
        if self.rate_limit_per_s is None:
            return 0.0 if self.is_private else DEFAULT_RATE_LIMIT_PER_S
        return self.rate_limit_per_s

    @property
    def blobs(self) -> Path:
        """The directory of uploaded files; servers that share the artifacts share it too."""
        return self.artifacts_root / "blobs" if self.artifacts_root else self.data_dir / "blobs"


def default_data_dir() -> Path:
    """$TRAINMASTER_HOME, or ~/.trainmaster."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".trainmaster")
