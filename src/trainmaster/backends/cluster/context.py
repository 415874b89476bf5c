"""What the backend of a cluster knows of its server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainmaster.backends.cluster.engine import EngineJob
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import REQUEST, RunDirectory, exit_document


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

    def age_s(self, request: AttemptRequest) -> float:
        """Since when an attempt has been laid out on disk."""
        try:
            return time.time() - (self.run_directory(request).path / REQUEST).stat().st_mtime
        except FileNotFoundError:
            return math.inf

    def is_over(self, job: EngineJob, *, if_missing: bool) -> bool:
        """Whether no node of an attempt will run or report any more; `if_missing`: the answer without a directory."""
        directory = self._directory(job.attempt_id)
        if not directory.path.exists():
            return if_missing
        try:
            return self.has_ended(job.attempt_id, len(directory.request().nodes))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def has_ended(self, attempt_id: str, node_count: int) -> bool:
        directory = self._directory(attempt_id)
        if directory.is_closed or not directory.path.exists():
            return True
        for node in range(node_count):
            if directory.status(exit_document(node)) is None and not (directory.claimant(node) or {}).get("revoked"):
                return False
        return True

    def _directory(self, attempt_id: str) -> RunDirectory:
        job_id, _, number = attempt_id.rpartition(".")
        return RunDirectory(self.runs / job_id / number)
