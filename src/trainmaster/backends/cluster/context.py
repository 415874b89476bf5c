"""What the backend of a cluster knows of its server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainmaster.backends.cluster.engine import EngineJob
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import RunDirectory, exit_document


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

    def is_over(self, job: EngineJob, *, if_missing: bool) -> bool:
        """Whether no node of an attempt will run or report any more; `if_missing`: the answer without a directory."""
        job_id, _, number = job.attempt_id.rpartition(".")
        directory = RunDirectory(self.runs / job_id / number)
        if not directory.path.exists():
            return if_missing
        try:
            return self.has_ended(directory.request())
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def has_ended(self, request: AttemptRequest) -> bool:
        directory = self.run_directory(request)
        if directory.is_closed or not directory.path.exists():
            return True
        for node in range(len(request.nodes)):
            if directory.status(exit_document(node)) is None and not (directory.claimant(node) or {}).get("revoked"):
                return False
        return True
