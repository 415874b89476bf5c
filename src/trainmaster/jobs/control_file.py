"""What the server wants of this rank: reads the control file, cheaply enough for every step."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from trainmaster.protocol.documents import read_document
from trainmaster.protocol.reasons import StopCause
from trainmaster.protocol.request import Control

LOOK_EVERY_S = 0.05
"""A stop may wait this long to be seen; a training step is rarely shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The job shall stop: save if `save` says so, then leave with `report.exit_stopped()`."""

    cause: StopCause
    save: bool
    deadline: float
    """Unix time after which the rank is killed."""

    @property
    def seconds_left(self) -> float:
        """Until the deadline; never negative."""
        return max(0.0, self.deadline - time.time())


class ControlReader:
    """The newest wish in a control file. Without a path there is never one. Not for several threads at once."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._next_look = 0.0
        self._seq = -1
        self._stop: Stop | None = None
        self._save_wanted = False

    def stop(self) -> Stop | None:
        """The stop that was asked for. It is never taken back, but a later one may replace it."""
        self._look()
        return self._stop

    def take_save(self) -> bool:
        """Whether a save without a stop was asked for since the last call."""
        self._look()
        wanted, self._save_wanted = self._save_wanted, False
        return wanted

    def _look(self) -> None:
        now = time.monotonic()
        if self._path is None or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        try:
            document = read_document(Path(self._path))
            if document is None:
                return
            control = Control.from_json(document)
            written_at = os.stat(self._path).st_mtime
        except (OSError, ValueError, KeyError):
            return  # Not readable by this version: the worker enforces a stop anyway.
        if control.seq > self._seq:
            self._take(control, written_at)

    def _take(self, control: Control, written_at: float) -> None:
        self._seq = control.seq
        if control.stop is not None:
            self._stop = Stop(cause=control.stop, save=control.save, deadline=written_at + control.grace_s)
        elif control.save:
            self._save_wanted = True
