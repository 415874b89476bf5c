"""What the preparing steps share: how they report progress, how they end, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from trainmaster.jobs import report
from trainmaster.jobs.inputs import PREPARED_FILE
from trainmaster.protocol import environment
from trainmaster.protocol.documents import in_memory
from trainmaster.protocol.reasons import Phase, Reason
from trainmaster.server.core.training.types import TRAIN_EXTRA
from trainmaster.training.errors import PreparingError

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


def run(step: Callable[[], None], install: str = TRAIN_EXTRA) -> None:
    """Do a step's work; what goes wrong on purpose ends the process with its reason and one line.

    Args:
        step: the work.
        install: how the packages are installed that it needs.
    """
    report.phase(Phase.PREPARING)
    try:
        step()
    except PreparingError as error:
        report.fail(error.reason, str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trainmaster"):
            raise
        report.fail(Reason.BAD_INPUT, f"the package {error.name} is not installed where jobs run: {install}")


HANDED = "handed"
"""The argument of a process that goes on with what `go_on_without_credentials` hands it."""


def go_on_without_credentials(module: str, document: Mapping[str, Any]) -> NoReturn:
    """Become a new process of a module, which reads a document from its standard input and holds no credentials.

    For code that comes with a model: it could read the memory and the first environment of the process that fetched.
    """
    sys.stdout.flush()
    os.dup2(in_memory(document), 0)
    left = {name: value for name, value in os.environ.items() if name not in environment.CREDENTIALS}
    os.execve(sys.executable, [sys.executable, "-s", "-P", "-m", module, HANDED], left)


def handed_over() -> Any:
    """The document with which this process goes on; None where it is the first one."""
    return json.load(sys.stdin) if sys.argv[1:] == [HANDED] else None


def end_when_told() -> None:
    """End at SIGTERM, as any process does but the first one of a container, which the kernel lets off."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def leave(prepared: Mapping[str, Any]) -> None:
    """Write `prepared.json` for the ranks of this node."""
    directory = Path(os.environ[environment.PREPARED_DIR])
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f".{PREPARED_FILE}"
    draft.write_text(json.dumps(prepared, indent=2) + "\n")
    os.replace(draft, directory / PREPARED_FILE)
