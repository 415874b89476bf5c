"""The server's settings, resolved. Everything has a default that is right on a laptop.

A setting is a field with a docstring; file, environment and `trainmaster config` (`trainmaster.server.settings`) follow
from its name, its type and its metadata: `flag` names its option of `serve`, `minimum` and `maximum` bound a number,
and a `secret` is never shown.
"""

from __future__ import annotations

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
"""Where others reach the server: enough for a loop that drives a service, half of what a small machine answers."""
HOME_VARIABLE = "TRAINMASTER_HOME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One server's settings, by topic; documentation and `trainmaster config` list them in this order."""

    # The process and its address

    data_dir: Path = field(metadata={"flag": "--data-dir"})
    """The directory of the server's own state."""
    host: str = field(default="127.0.0.1", metadata={"flag": "--host"})
    """The address to listen on."""
    port: int = field(default=7070, metadata={"flag": "--port", "minimum": 0, "maximum": 65535})
    """The port to listen on; 0 chooses a free one."""
    roles: frozenset[Role] = field(default=ALL_ROLES, metadata={"flag": "--roles"})
    """The roles of this process: `api` serves all routes except the gateway's, `gateway` serves those, `coordinator`
    leads and runs jobs."""
    advertise_url: str = field(default="", metadata={"flag": "--advertise-url"})
    """The API address for workers that report over HTTP; empty: this server's own. An attempt keeps the address that it
    started with, so the port must not be 0."""
    transport: TransportKind = field(default=TransportKind.FILES, metadata={"flag": "--transport"})
    """How workers report: `files`, or `http` from private directories in `spool` of the data directory."""
    lease_s: float = field(default=5.0, metadata={"minimum": 0.1})
    """How long a leader stays leader without renewing its lease."""

    # TLS, and who may ask how often

    tls_cert: Path | None = field(default=None, metadata={"flag": "--tls-cert"})
    """The server's certificate with its chain, in PEM. Every address except loopback needs `tls_cert` and `tls_key`, or
    `behind_proxy`."""
    tls_key: Path | None = field(default=None, metadata={"flag": "--tls-key"})
    """The certificate's private key, in PEM."""
    behind_proxy: bool = field(default=False, metadata={"flag": "--behind-proxy"})
    """Whether a proxy in front of the server terminates TLS. Only then does the server trust `X-Forwarded-For` and
    `X-Forwarded-Proto`."""
    ca: Path | None = None
    """A file of CA certificates, in PEM. Workers that report over HTTPS trust these instead of the system's; webhooks
    trust both."""
    rate_limit_per_s: float | None = field(default=None, metadata={"minimum": 0})
    """The sustained number of requests per second for each key; 0 means no limit. Not set: 500, or no limit if only
    this machine can reach the server."""
    rate_burst: int = field(default=2000, metadata={"minimum": 1})
    """How many requests a key may make at once after a quiet period, whatever the rate."""
    open_metrics: bool = False
    """Whether `/metrics` works without a key."""

    # The database and secrets

    database_url: str = field(default="", repr=False, metadata={"flag": "--database"})
    """The database: `sqlite:////srv/trainmaster.db` on a local disk, or `postgresql://user@host/database`. Empty:
    SQLite in the data directory."""
    secret_key: str = field(default="", repr=False, metadata={"secret": True})
    """The key that encrypts secrets: 32 random bytes in base64. Empty: the file `secret-key` beside an SQLite database,
    created at the first start. PostgreSQL requires the setting, with the same value on every server."""
    old_secret_keys: tuple[str, ...] = field(default=(), repr=False, metadata={"secret": True})
    """Former values of `secret_key`, which still decrypt what they encrypted."""

    # Directories

    runs_root: Path | None = field(default=None, metadata={"flag": "--runs-root"})
    """The directory of run directories: requests, logs, metrics. Not set: `runs` in the data directory."""
    artifacts_root: Path | None = field(default=None, metadata={"flag": "--artifacts-root"})
    """The directory of checkpoints and results and, if set, also of uploaded files. Not set: `artifacts` in the data
    directory."""
    object_root: str = field(default="", metadata={"pattern": r"(s3://[^/\s]+(/\S*)?)?"})
    """The object store, `s3://bucket/prefix`, to which the files of jobs move when these have ended (logs, metrics,
    checkpoints and results), and uploaded files at once. Credentials come from the `AWS_*` variables of the server's
    environment. Empty: all files stay in the directories above."""
    cache_root: Path | None = field(default=None, metadata={"flag": "--cache-root"})
    """The cache of models and data that jobs name, after download and preparation. Not set: `cache` in the data
    directory."""
    data_roots: tuple[Path, ...] = field(default=(), metadata={"flag": "--data-root"})
    """The directories in which jobs may name paths on the server; empty: the home directory of the server's user."""
    shapes_dir: Path | None = field(default=None, metadata={"flag": "--shapes-dir"})
    """The directory of this server's training shapes, one YAML file each. Not set: `shapes` in the data directory."""
    runtimes_dir: Path | None = field(default=None, metadata={"flag": "--runtimes-dir"})
    """The directory of this server's training runtimes, in YAML files. Not set: `runtimes` in the data directory."""

    # Backends and nodes

    backends: tuple[str, ...] = ()
    """The backends that run jobs: `local`, `container`, and names of clusters; the first is the default for jobs that
    name none. Empty: `local`, then `container` if `trainmaster[containers]` is installed. Clusters that are declared
    are available even if they are not listed. The server looks for a container engine when a job needs one."""
    container_host: str = ""
    """The address of the container engine, such as `unix:///run/podman/podman.sock`. Empty: DOCKER_HOST,
    CONTAINER_HOST, or the sockets of docker and podman, in that order. The engine must run on this machine, since
    containers share its files."""
    container_runtime: ContainerRuntime = ContainerRuntime.AUTO
    """The container engine to require; `auto` accepts either."""
    container_pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    """When to pull images, for jobs that do not say."""
    container_image: str = ""
    """The image for jobs that name none. Empty: the backend `container` refuses such jobs."""
    simulated_gpus: str = field(default="", metadata={"flag": "--simulated-gpus"})
    """GPUs to simulate, such as `H100-80GB:8,A100-40GB:4;H100-80GB:8`: commas separate types on one node, semicolons
    separate nodes."""
    slots_per_node: int = field(default=0, metadata={"flag": "--slots", "minimum": 0})
    """The maximum number of job nodes on a machine at a time; 0 means four per core, at least 16."""
    autoscaling: bool = False
    """Whether something outside adds nodes for waiting jobs: a job that no present node could hold is then queued
    instead of refused."""
    shared_uid: bool = False
    """Whether all accounts may run jobs as the server's own user, where jobs can read each other's files. Otherwise
    only the account `default` may; other accounts need their own uid, or containers."""

    # Models and data that jobs name

    model_aliases: tuple[NamedPath, ...] = field(default=(), metadata={"flag": "--model-alias"})
    """The base models of trainer services: names, such as `Qwen/Qwen3-8B=/srv/models/qwen3-8b`, each with the directory
    of a transformers checkpoint."""
    allow_trust_remote_code: bool = False
    """Whether jobs may run code from a model repository (`base_model.trust_remote_code`)."""
    private_urls: bool | None = None
    """Whether URLs of models and data in jobs may resolve to addresses that are not public. Not set: only if no other
    machine can reach the server."""
    token_exchange: str = ""
    """The RFC 8693 endpoint that exchanges a caller's credential for ScaiDrive and ScaiAtlas tokens; empty: no
    exchange."""
    scaidrive_url: str = ""
    """The server of `scaidrive://` paths, used with the caller's own token; empty: jobs cannot name such paths."""
    scaiatlas_url: str = ""
    """The server of `scaiatlas://` paths and models, used with the caller's own token; empty: jobs cannot name them."""
    max_blob_bytes: int = field(default=2 << 30, metadata={"minimum": 1})
    """The largest file that can be uploaded for a job."""

    # Plain Tinker clients

    tinker_shape: str = ""
    """The training shape of trainers that the server starts for plain Tinker clients. Empty: the smallest sufficient
    one, on a GPU if there is one."""
    tinker_tempered_logprobs: bool = False
    """Whether trainers for plain Tinker clients return the log-probabilities of the distribution that tokens were
    sampled from (temperature, top-k, top-p). Otherwise they return the model's own at temperature 1, as training
    computes them."""
    tinker_silent_s: float = field(default=1800.0, metadata={"minimum": 20})
    """How long a plain Tinker client may be silent. After that, its session ends together with its models, and unsaved
    weights are kept for a week. Clients send a heartbeat every ten seconds; allow for the sleep of a laptop."""

    # Retention

    blob_keep_s: float = field(default=24 * 3600.0, metadata={"minimum": 0})
    """How long an uploaded file is kept after its last use by a job; 0 removes it at the next collection."""
    keep_runs_s: float = field(default=0.0, metadata={"minimum": 0})
    """How long run directories (logs, metrics, working directories) are kept after their job's end; 0 keeps them."""
    keep_checkpoints_s: float = field(default=0.0, metadata={"minimum": 0})
    """How long checkpoints are kept after their job's end; 0 keeps them. Pinned checkpoints, the best and the latest
    stay, unless the job is deleted."""
    keep_deleted_s: float = field(default=0.0, metadata={"minimum": 0})
    """How long the files of a job are kept after its deletion; 0 keeps them until the job is purged."""
    keep_caches_s: float = field(default=7 * 24 * 3600.0, metadata={"minimum": 0})
    """How long files of couriers in `spool` are kept after their last change, once the attempt has ended; 0 keeps
    them."""
    keep_sessions_s: float = field(default=30 * 24 * 3600.0, metadata={"minimum": 0})
    """How long the record of a Tinker session is kept after its end; 0 keeps all. The session's samplers and its
    training runs without saved weights are removed with it. A run with saved weights stays, and so does its session."""
    log_cap_mb: int = field(default=1024, metadata={"minimum": 0})
    """The maximum size of each log of a rank in MiB, for stdout and stderr separately; beyond it, the middle of the log
    is removed. 0: no limit."""

    # Reports: logs, webhooks and stalled jobs

    log_format: LogFormat = LogFormat.TEXT
    """The format of the server's log: `text` for people, or `json` with one object per line, including a line for each
    request."""
    log_level: LogLevel = LogLevel.INFO
    """The lowest level that is logged."""
    stalled_after_s: float = field(default=900.0, metadata={"flag": "--stalled-after-s", "minimum": 0.1})
    """A job that completes no step for this long, after its first one, is shown as stalled."""
    webhook_private_addresses: bool | None = None
    """Whether webhooks may resolve to addresses that are not public. Not set: only if no other machine can reach the
    server."""

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
        return self.data_roots or (Path.home(),)

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach the server."""
        return not self.behind_proxy and is_loopback(self.host)

    @property
    def private_webhooks(self) -> bool:
        return self.is_private if self.webhook_private_addresses is None else self.webhook_private_addresses

    @property
    def private_sources(self) -> bool:
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


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def default_data_dir() -> Path:
    """$TRAINMASTER_HOME, or ~/.trainmaster."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".trainmaster")
