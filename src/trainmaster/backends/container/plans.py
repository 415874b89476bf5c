"""The plans of workers that stay outside of their containers, by which the server knows what to end and to remove.

They lie in the server's own directory: no container has them mounted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.protocol.documents import read_document, write_document
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import RunDirectory, exit_document


class Plans:
    """A document for each node whose worker is outside; there is none for one inside."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, request: AttemptRequest, node: int) -> Path:
        """Where the plan of a node lies, if there is one."""
        return self._directory / f"{request.attempt_id}.{node}.json"

    def read(self, request: AttemptRequest, node: int) -> dict[str, Any] | None:
        """The plan of a node; None where its worker is inside."""
        return read_document(self.path(request, node))

    def write(self, request: AttemptRequest, node: int, plan: Mapping[str, Any], directory: RunDirectory) -> Path:
        """Write a plan down; where it lies."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.clear()
        path = self.path(request, node)
        write_document(path, {**plan, "run_dir": str(directory.path), "node": node})
        return path

    def remove(self, request: AttemptRequest, node: int) -> None:
        """Forget the plan of a node of which nothing is left."""
        self.path(request, node).unlink(missing_ok=True)

    @property
    def are_any(self) -> bool:
        """Whether there is a plan of any node."""
        return any(self._directory.glob("*.json"))

    def clear(self) -> None:
        """Forget the plans of nodes that have ended, and of jobs that are gone."""
        for path in self._directory.glob("*.json"):
            if (plan := read_document(path)) is None:
                continue  # somebody else has
            directory = RunDirectory(Path(plan["run_dir"]))
            if not directory.path.exists() or directory.document(exit_document(plan["node"])) is not None:
                path.unlink(missing_ok=True)
