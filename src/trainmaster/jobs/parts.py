"""How ranks tell rank 0 that their part of a checkpoint is written: by small files in the draft.

The threads that save have no collective operations: those belong to the thread that trains.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.jobs.process import Process

_PREFIX = ".part-"
_LOOK_EVERY_S = 0.05


class PartError(RuntimeError):
    """A rank could not write its part of a checkpoint, or did not in time."""


class Parts:
    """The parts of one checkpoint."""

    def __init__(self, draft: Path, process: Process, *, timeout_s: float) -> None:
        self._draft = draft
        self._process = process
        self._timeout_s = timeout_s

    def done(self, digests: Mapping[str, str]) -> None:
        """Say that this rank's files are on disk."""
        self._say({"digests": dict(digests)})

    def failed(self, error: BaseException) -> None:
        """Say that they will not be; rank 0 need not wait."""
        if self._process.index == 0:
            return
        with contextlib.suppress(OSError):  # The draft is gone: rank 0 has given up by itself.
            self._say({"error": f"{type(error).__name__}: {error}"})

    def collect(self, rel_path: str) -> dict[str, str]:
        """On rank 0: wait for all other ranks; the digests of their files.

        Raises:
            PartError: names the rank that failed or did not come in time.
        """
        digests: dict[str, str] = {}
        deadline = time.monotonic() + self._timeout_s
        for rank in range(1, self._process.count):
            said = self._await(rank, deadline, rel_path)
            if "error" in said:
                raise PartError(f"rank {rank} could not write its part of {rel_path}: {said['error']}")
            digests |= said["digests"]
        return digests

    def _await(self, rank: int, deadline: float, rel_path: str) -> dict[str, Any]:
        path = self._draft / f"{_PREFIX}{rank}"
        while True:
            try:
                said: dict[str, Any] = json.loads(path.read_bytes())
                path.unlink()
                return said
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise PartError(
                        f"rank {rank} did not write its part of {rel_path} within {self._timeout_s:.0f} s"
                    ) from None
                time.sleep(_LOOK_EVERY_S)

    def _say(self, what: Mapping[str, Any]) -> None:
        path = self._draft / f"{_PREFIX}{self._process.index}"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(what))
        os.replace(new, path)
