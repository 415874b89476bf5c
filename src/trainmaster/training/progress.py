"""How far a preparing step is: for the job's events and metrics, and as plain lines in its log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from trainmaster.jobs import report

PERCENT = "prepare_percent"
"""The metric."""
_LINE_EVERY_S = 15.0
_REPORT_EVERY_S = 1.0

SHARES: Mapping[str, float] = MappingProxyType({"model": 0.5, "data": 0.2, "tokens": 0.3})
"""The stages, and a guess at how much of the time goes into each."""

Tell = Callable[[float], None]
"""Told now and then which share of something is done."""


def tell_nobody(_share: float) -> None:
    """For work that nobody follows."""


class Progress:
    """Tells of stages that come one after another. May be told from any thread."""

    def __init__(self, shares: Mapping[str, float] = SHARES, *, done: Sequence[str] = ()) -> None:
        """Begin, or go on after the stages that another process has done."""
        total = sum(shares.values())
        self._shares = {name: share / total for name, share in shares.items()}
        self._begun = list(done)
        self._reported = self._printed = time.monotonic()
        self._percent = -1.0
        self._lock = threading.Lock()

    def begin(self, stage: str) -> None:
        """From now on shares are those of this stage; the ones before are done."""
        self._begun.append(stage)
        self.at(0.0)

    def at(self, share: float, doing: str = "") -> None:
        """Say which share of the stage is done, and what is being done."""
        with self._lock:
            before = sum(self._shares[name] for name in self._begun[:-1])
            percent = 100 * (before + min(1.0, max(0.0, share)) * self._shares[self._begun[-1]])
            now = time.monotonic()
            if percent > self._percent and (now - self._reported >= _REPORT_EVERY_S or share in (0.0, 1.0)):
                self._reported, self._percent = now, percent
                report.metrics({PERCENT: round(percent, 1)})
            if doing and now - self._printed >= _LINE_EVERY_S:
                self._printed = now
                say(f"{doing}: {share:.0%}")

    def finish(self) -> None:
        """All is done."""
        report.metrics({PERCENT: 100.0})


def say(message: str) -> None:
    """A line in the log."""
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()


def doing(message: str) -> None:
    """A line in the log, and the status message of the job for as long as it is true."""
    say(message)
    report.doing(message)


def note(message: str) -> None:
    """A line in the log and among the job's events."""
    say(message)
    report.note(message)


def size_text(size: float) -> str:
    """A size for people.

    >>> size_text(532), size_text(2_300_000)
    ('532 B', '2.3 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
