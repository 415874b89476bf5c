"""What the backend of a cluster knows of its server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterContext:
    """What a server tells the backend of a cluster."""

    name: str
    instance: str
    """Identifies this Trainmaster on the engine."""
    run_directory: Callable[[AttemptRequest], RunDirectory]
    runs: Path
    workers: Path
    """Where the worker's archive is made."""
    ca_pem: str = ""
    """The certificates that workers trust in place of their system's."""
    hint: Callable[[str], None] = lambda _: None
    """Tells the leader that something happened to an attempt."""
    on_nodes: Callable[[], None] = lambda: None
    """Called when the nodes have changed."""
    leads: Callable[[], bool] = lambda: True
    """Whether this server leads: only the leader tidies up on the engine."""
