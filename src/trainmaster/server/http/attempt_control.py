"""What is wanted of a running attempt, as something that workers wait for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from trainmaster.protocol.run_directory import CONTROL, RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """The control document of an attempt, as it was last seen."""

    stamp: tuple[int, int] | None = None
    """Tells one document from the next without reading it."""
    document: dict[str, Any] | None = field(default=None, compare=False)

    def later_than(self, seq: int) -> dict[str, Any] | None:
        """The document, if it is newer than the one with this number."""
        found = self.document
        return found if found is not None and int(found.get("seq", 0)) > seq else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSource:
    """The control document of one attempt."""

    job_id: str
    attempt: int
    directory: RunDirectory = field(compare=False, repr=False)

    def look(self, connection: Connection, before: Wish | None, *, changed: bool) -> Wish:  # noqa: ARG002 - it is a file
        """What is wanted now."""
        try:
            found = os.stat(self.directory.path / CONTROL)
        except (FileNotFoundError, NotADirectoryError):
            return Wish()
        stamp = (found.st_mtime_ns, found.st_ino)
        if before is not None and before.stamp == stamp:
            return before
        return Wish(stamp=stamp, document=self.directory.document(CONTROL))
