"""The processes that write a table's shards: children of this one, or a gang that runs beside it.

A gang's members are started by others and share the files. They meet in the directory that TRAINMASTER_GANG_DIR names.
The head leaves `gang.json` there once it knows which shards are missing, and holds the entry's lock until all of them
exist; a writer waits for it, and leaves a shard, or the reason why there is none. Each holds a lock on a file of its
own, which the kernel releases when the process dies, so that nobody waits for a dead one. No credentials pass between
them: each has its own, and assumes a role by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from trainmaster.protocol import environment
from trainmaster.protocol.reasons import Reason
from trainmaster.training.errors import PreparingError
from trainmaster.training.fetching.cache import write_whole
from trainmaster.training.tables.table_reader import Source, limit, write_shard


def written_by_processes(source: Source, spec: Mapping[str, Any], missing: Mapping[int, Path]) -> Iterator[int]:
    """Write shards; each one's number, once it is there.

    Raises:
        RuntimeError: a process was killed.
    """
    if not missing:
        return
    count, size = spec["num_data_nodes"], (spec["worker_cpu"], spec["worker_mem"])
    # A fresh process for each: threads of the libraries do not survive a fork, and limits are for one shard.
    pool = ProcessPoolExecutor(
        min(len(missing), len(os.sched_getaffinity(0))), multiprocessing.get_context("spawn"), max_tasks_per_child=1
    )
    try:
        futures = {pool.submit(_write, source, index, count, path, size): index for index, path in missing.items()}
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    except BrokenProcessPool as error:
        # By whom is for the worker to tell, which knows what the kernel killed.
        raise RuntimeError("a process that wrote a shard was killed; if memory is short, name more shards") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _write(source: Source, index: int, count: int, target: Path, size: tuple[str | None, str | None]) -> None:
    """The work of a process of its own."""
    limit(*size)  # with all that it takes to begin in place
    with source.translated():
        write_shard(source.table(), index, count, target)


LOOK_S = 0.2
"""How often members look at what the others have left."""
_WORK_FILE = "gang.json"
_HEAD = "head"


class WriterError(PreparingError):
    """One of the gang could not write its shard."""

    def __init__(self, message: str, reason: Reason = Reason.BAD_INPUT) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the head has its gang do."""

    key: str
    """Of the entry that the shards are for."""
    shards: tuple[int, ...]
    """Those that are missing; each is written by the member with its number."""


class Gang:
    """A gang, as its members see it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def of_environment(cls) -> Self | None:
        """The gang that this process belongs to, if it does."""
        name = os.environ.get(environment.GANG_DIR)
        return cls(Path(os.environ[environment.PREPARED_DIR], name)) if name else None

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Be its head. At a good end, whoever waits for work is told that there is none left."""
        with _present(self._directory / _HEAD):
            yield
            if self.work() is None:
                self._ask(Work(key="", shards=()))

    def writing(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Be one of its writers."""
        return _present(self._writer(index))

    def written(self, key: str, missing: Mapping[int, Path]) -> Iterator[int]:
        """Have shards written; each one's number, once it is there.

        Raises:
            WriterError: a writer says why it cannot.
            RuntimeError: one has failed otherwise, or was killed.
        """
        self._ask(Work(key=key, shards=tuple(missing)))
        waiting = dict(missing)
        while waiting:
            for index, path in list(waiting.items()):
                is_gone = _is_gone(self._writer(index))  # before the look at its shard, which it may leave just now
                if path.is_file():
                    del waiting[index]
                    yield index
                elif is_gone:
                    self._raise_failure(index, path.name)
            time.sleep(LOOK_S if waiting else 0)

    def work(self) -> Work | None:
        """What there is to do; None while the head has not said."""
        document = _read(self._directory / _WORK_FILE)
        return Work(key=document["key"], shards=tuple(document["shards"])) if document else None

    @property
    def is_headless(self) -> bool:
        """Whether the head has ended. Before it has come it has not."""
        return _is_gone(self._directory / _HEAD)

    def fail(self, index: int, error: BaseException) -> None:
        """Leave for the head why a writer failed."""
        reason = error.reason if isinstance(error, PreparingError) else None
        message = str(error) if reason else f"{type(error).__name__}: {error}"
        write_whole(self._failure(index), json.dumps({"reason": reason, "message": message}) + "\n")

    def _ask(self, work: Work) -> None:
        document = {"key": work.key, "shards": work.shards}
        write_whole(self._directory / _WORK_FILE, json.dumps(document, indent=2) + "\n")

    def _raise_failure(self, index: int, shard: str) -> None:
        said = _read(self._failure(index))
        if said is None:
            raise RuntimeError(f"the writer of {shard} was killed; if memory is short, give worker_mem, or more shards")
        if said["reason"]:
            raise WriterError(said["message"], Reason(said["reason"]))
        raise RuntimeError(f"the writer of {shard} failed: {said['message']}")

    def _writer(self, index: int) -> Path:
        return self._directory / f"writer-{index}"

    def _failure(self, index: int) -> Path:
        return self._directory / f"writer-{index}.failed.json"


@contextlib.contextmanager
def _present(place: Path) -> Iterator[None]:
    """Hold a file that is locked for as long as this process holds it, and from the moment that it is there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{os.urandom(6).hex()}")
    with open(draft, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.rename(draft, place)
        yield


def _is_gone(place: Path) -> bool:
    """Whether whoever held a file has ended; who has not come yet has not."""
    try:
        with open(place) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    except (FileNotFoundError, BlockingIOError):
        return False


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        return document
    except FileNotFoundError:
        return None
