"""What sources on the network had, kept on disk for a day."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainmaster.trainer.runtimes.yaml_file import TextFile

_log = logging.getLogger(__name__)

FRESH_S = 24 * 3600.0
MAX_SOURCES = 32
"""Of which each has a few MiB at the most."""


def default_directory() -> Path:
    """Where the caches of this user lie, and this one among them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainmaster" / "runtimes"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCache:
    """A file for each source."""

    directory: Path = field(default_factory=default_directory)

    def files(self, source: str, fetch: Callable[[], list[TextFile]], *, now: float) -> list[TextFile]:
        """What a source had within the last day, or has; when it cannot be reached, what it had at last."""
        kept = self._read(source)
        if kept is not None and 0 <= now - kept[0] < FRESH_S:
            return kept[1]
        try:
            files = fetch()
        except ValueError as error:
            if kept is None:
                raise
            _log.warning("%s; what it had when it was last reached is used", error)
            return kept[1]
        try:
            self._write(source, files, now)
        except OSError as error:
            _log.warning("runtimes cannot be kept in %s: %s", self.directory, error)
        return files

    def _path(self, source: str) -> Path:
        return self.directory / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.json"

    def _read(self, source: str) -> tuple[float, list[TextFile]] | None:
        try:
            kept = json.loads(self._path(source).read_text("utf-8"))
            if kept["source"] != source:
                return None
            files = [TextFile(name=str(file["name"]), text=str(file["text"])) for file in kept["files"]]
            return float(kept["fetched_at"]), files
        except (OSError, ValueError, KeyError, TypeError):
            return None  # not there, or not ours: fetched anew, and written over

    def _write(self, source: str, files: list[TextFile], now: float) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        document = {
            "source": source,
            "fetched_at": now,
            "files": [{"name": file.name, "text": file.text} for file in files],
        }
        descriptor, temporary = tempfile.mkstemp(dir=self.directory, prefix=".new-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(document, file)
            os.replace(temporary, self._path(source))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        # The oldest go. Another process may do the same at the same time.
        kept = sorted(self.directory.glob("*.json"), key=_written_at)
        for path in kept[:-MAX_SOURCES]:
            path.unlink(missing_ok=True)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
