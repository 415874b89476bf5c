"""The files of one attempt that runs on another machine, as a small object store over the directory of artifacts."""

from __future__ import annotations

from trainmaster.server.attempt_store.paths import FilePathError, FileStatus
from trainmaster.server.attempt_store.store import (
    MANIFEST,
    UPLOADS,
    AttemptStore,
    DigestError,
    IncompleteSaveError,
    ReadOnlyCheckpoint,
)

__all__ = [
    "MANIFEST",
    "UPLOADS",
    "AttemptStore",
    "DigestError",
    "FilePathError",
    "FileStatus",
    "IncompleteSaveError",
    "ReadOnlyCheckpoint",
]
