"""When the loop looks again: at once after a hint or another process's write, and every so often by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Alarm:
    """Wakes one loop. Hints may come from any thread; they carry no state and may be lost."""

    def __init__(self, *, foreign_writes: Callable[[], int], poll_s: float, foreign_s: float = 0.2) -> None:
        self._foreign_writes = foreign_writes
        """A number that changes when another process has written to the database."""
        self._poll_s = poll_s
        self._foreign_s = foreign_s
        self._condition = threading.Condition()
        self._hinted: set[str] = set()
        self._rung = False
        self._seen = 0
        self.stopped = False

    def hint(self, subject: str) -> None:
        """Wake the loop; `subject` is an attempt's id, or empty."""
        with self._condition:
            if subject:
                self._hinted.add(subject)
            self._rung = True
            self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self.stopped = True
            self._condition.notify()

    def wait(self, rest_s: float = 0.0, within_s: float | None = None) -> frozenset[str]:
        """Wait for a hint, a write of another process or the next poll; returns the hinted subjects.

        For the first `rest_s` only a hint at an attempt counts. `within_s` is for a poll that is due sooner.
        """
        deadline = time.monotonic() + (self._poll_s if within_s is None else min(self._poll_s, within_s))
        with self._condition:
            self._condition.wait_for(lambda: self._hinted or self.stopped, rest_s)
        while True:
            with self._condition:
                if self._rung or self.stopped:
                    break
            # The database may hang: it is asked without the lock, which `hint` takes on the event loop.
            left = deadline - time.monotonic()
            if left <= 0 or self._written_by_others():
                break
            with self._condition:
                self._condition.wait_for(lambda: self._rung or self.stopped, min(left, self._foreign_s))
        with self._condition:
            hinted = frozenset(self._hinted)
            self._hinted.clear()
            self._rung = False
        return hinted

    def rest(self, seconds: float) -> None:
        """Wait, ignoring hints."""
        with self._condition:
            if not self.stopped:
                self._condition.wait_for(lambda: self.stopped, seconds)

    def _written_by_others(self) -> bool:
        number, before = self._foreign_writes(), self._seen
        self._seen = number
        return number != before
