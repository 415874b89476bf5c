"""The server's settings, resolved. Everything has a default that is right on a laptop."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Role(StrEnum):
    """What a server process does. Roles share only the store and hints."""

    API = "api"
    COORDINATOR = "coordinator"
    GATEWAY = "gateway"


class TransportKind(StrEnum):
    """How local workers hand over what they write."""

    FILES = "files"
    HTTP = "http"


ALL_ROLES = frozenset(Role)
HOME_VARIABLE = "TRAINMASTER_HOME"
SIMULATED_GPUS_VARIABLE = "TRAINMASTER_SIMULATED_GPUS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One server's settings."""

    data_dir: Path
    """All of the server's own state."""
    host: str = "127.0.0.1"
    port: int = 7070
    """0 chooses a free one."""
    database_url: str = ""
    """Empty: SQLite in the data directory."""
    runs_root: Path | None = None
    artifacts_root: Path | None = None
    data_roots: tuple[Path, ...] = ()
    """Where paths that jobs name on the server may lie; empty means the home of the server's user."""
    roles: frozenset[Role] = ALL_ROLES
    backends: tuple[str, ...] = ("local",)
    """Where jobs can run; the first is the default."""
    transport: TransportKind = TransportKind.FILES
    advertise_url: str = ""
    """Where workers reach an API when they report over HTTP; empty means this server itself."""
    simulated_gpus: str = ""
    """`H100-80GB:8,A100-40GB:4;H100-80GB:8`: commas part types on one node, semicolons part nodes."""
    slots_per_node: int = 0
    """How many job nodes run on a machine at a time; 0 means four for each core, at least 16."""
    max_blob_bytes: int = 2 << 30
    lease_s: float = 5.0
    """How long a leader leads without renewing."""
    blob_keep_s: float = 24 * 3600.0
    """A blob that no job uses is removed after this long."""
    stalled_after_s: float = 900.0
    """A job that makes no step for so long, after its first one, is shown as stalled."""

    @property
    def database(self) -> str:
        """The database's URL."""
        return self.database_url or f"sqlite:///{self.data_dir / 'trainmaster.db'}"

    @property
    def runs(self) -> Path:
        """Where run directories lie."""
        return self.runs_root or self.data_dir / "runs"

    @property
    def artifacts(self) -> Path:
        """Where checkpoints and results lie."""
        return self.artifacts_root or self.data_dir / "artifacts"

    @property
    def blobs(self) -> Path:
        """Where shipped files lie; servers that share the artifacts share these too."""
        return self.artifacts_root / "blobs" if self.artifacts_root else self.data_dir / "blobs"


def default_data_dir() -> Path:
    """$TRAINMASTER_HOME, or ~/.trainmaster."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.home() / ".trainmaster")
