"""What the preparing steps share: errors, progress, retries, how a step ends, and what it leaves for the ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from trainmaster.jobs import report
from trainmaster.jobs.inputs import PREPARED_FILE
from trainmaster.protocol import environment
from trainmaster.protocol.documents import in_memory
from trainmaster.protocol.reasons import Phase, Reason
from trainmaster.server.core.training.types import TRAIN_EXTRA

_Result = TypeVar("_Result")


class PreparingError(Exception):
    """Something that the job needs could not be prepared; the message says what, why and what to do."""

    reason = Reason.BAD_INPUT


class InputError(PreparingError):
    """What the job names is wrong; a retry would end the same way."""


class CredentialsError(PreparingError):
    """A source refuses the credentials, or wants some."""

    reason = Reason.CREDENTIALS_REFUSED


class SourceUnavailableError(PreparingError):
    """A source does not answer now; a retry may succeed."""

    reason = Reason.STORAGE_UNAVAILABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    source: str
    file: str
    number: int
    """Counted from 1."""
    unit: str = "row"

    def __str__(self) -> str:
        inside = "" if self.source.rpartition("/")[2] == self.file else f" (file {self.file})"
        return f"{self.source}{inside}, {self.unit} {self.number}"


class RowError(InputError):
    def __init__(self, origin: Origin, problem: str, column: str | None = None) -> None:
        super().__init__(origin, problem, column)  # all of it, so that it can be pickled between processes
        self.origin = origin
        self.problem = problem
        self.column = column

    def __str__(self) -> str:
        column = f", column '{self.column}'" if self.column else ""
        return f"{self.origin}{column}: {self.problem}"


PERCENT = "prepare_percent"
_LINE_EVERY_S = 15.0
_REPORT_EVERY_S = 1.0
SHARES: Mapping[str, float] = MappingProxyType({"model": 0.5, "data": 0.2, "tokens": 0.3})
"""The stages, and a guess at how much of the time goes into each."""

OnProgress = Callable[[float], None]
"""Called now and then with the share of something that is done."""


def ignore_progress(_share: float) -> None:
    pass


class PreparingProgress:
    """Reports the progress of stages that follow one another. Thread-safe."""

    def __init__(self, shares: Mapping[str, float] = SHARES, *, done: Sequence[str] = ()) -> None:
        """`done`: stages that another process has finished."""
        total = sum(shares.values())
        self._shares = {name: share / total for name, share in shares.items()}
        self._begun = list(done)
        self._reported = self._printed = time.monotonic()
        self._percent = -1.0
        self._lock = threading.Lock()

    def begin(self, stage: str) -> None:
        """Begin a stage; the ones before are done."""
        self._begun.append(stage)
        self.at(0.0)

    def at(self, share: float, doing: str = "") -> None:
        """Report which share of the stage is done; `doing` says in the log what is being done."""
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
        report.metrics({PERCENT: 100.0})


def say(message: str) -> None:
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()


def doing(message: str) -> None:
    """Write a line to the log, and make it the job's status message."""
    say(message)
    report.doing(message)


def note(message: str) -> None:
    """Write a line to the log and to the job's events."""
    say(message)
    report.note(message)


def size_text(size: float) -> str:
    """A size for people, such as `532 B` or `2.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def files_text(files: Collection[Path], kind: str = "") -> str:
    """The number and the size of files for people, such as `3 files of jsonl, 2.3 MB`."""
    count = (f"{len(files)} files" if len(files) > 1 else "1 file") + (f" of {kind}" if kind else "")
    return f"{count}, {size_text(sum(file.stat().st_size for file in files))}"


BACK_OFF_S = (2.0, 10.0, 30.0)
"""Before each retry; the clients of the sources retry by themselves before that."""


def try_again_while_unavailable(fetch: Callable[[], _Result], back_off_s: Sequence[float] = BACK_OFF_S) -> _Result:
    """Retry a few times where a source does not answer. What was fetched before is not fetched again."""
    for number, wait_s in enumerate(back_off_s, start=1):
        try:
            return fetch()
        except SourceUnavailableError as error:
            doing(f"{error}; trying again in {wait_s:.0f} s, {number} of {len(back_off_s)} times")
            time.sleep(wait_s)
    return fetch()


def run(step: Callable[[], None], install: str = TRAIN_EXTRA) -> None:
    """Run a step; a PreparingError ends the process with its reason. `install`: what installs the packages it needs."""
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
"""The argument of a process that continues with what `continue_without_credentials` hands it."""


def continue_without_credentials(module: str, document: Mapping[str, Any]) -> NoReturn:
    """Become a new process of a module, which reads a document from its standard input and has no credentials.

    For code that comes with a model: it could read the memory and the initial environment of the process that fetched.
    """
    sys.stdout.flush()
    os.dup2(in_memory(document), 0)
    left = {name: value for name, value in os.environ.items() if name not in environment.CREDENTIALS}
    os.execve(sys.executable, [sys.executable, "-s", "-P", "-m", module, HANDED], left)


def handed_over() -> dict[str, Any] | None:
    """The document with which this process continues; None where it is the first one."""
    if sys.argv[1:] != [HANDED]:
        return None
    document: dict[str, Any] = json.load(sys.stdin)
    return document


def end_at_sigterm() -> None:
    """End at SIGTERM also as the first process of a container, which the kernel exempts."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        draft.write_text(text)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def leave(prepared: Mapping[str, Any]) -> None:
    directory = Path(os.environ[environment.PREPARED_DIR])
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / PREPARED_FILE, json.dumps(prepared, indent=2) + "\n")
