"""Writes a table's shards, each by a process of its own; shards that were written stay when another fails.

The processes are children of the initializer, or a gang of containers beside it, in which
`python -m trainmaster.training.tables.shard_writer 3` writes shard 3 if it is missing.

Members of a gang are started by others and share files: they meet in the directory that TRAINMASTER_GANG_DIR names. The
head (the initializer) writes `gang.json` there once it knows which shards are missing, and holds the cache entry's lock
until all of them exist. A writer waits for that file, and leaves a shard, or the reason why there is none. Each holds a
lock on a file of its own, which the kernel releases when the process dies, so that nobody waits for a dead one. No
credentials pass between them: each has its own, and assumes a role by itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Self

from trainmaster.jobs import inputs
from trainmaster.jobs.data_cache import TABLE_FILE
from trainmaster.protocol import environment
from trainmaster.protocol.reasons import Reason
from trainmaster.training import steps
from trainmaster.training.fetching.access import Access, initializer_access
from trainmaster.training.fetching.cache import Cache
from trainmaster.training.fetching.s3 import in_role
from trainmaster.training.steps import InputError, OnProgress, PreparingError, say, write_whole
from trainmaster.training.tables.table_reader import (
    PART_SUFFIX,
    Source,
    files_of,
    limit,
    rows_in,
    shard_names,
    write_shard,
)

KIND = "tables"
LOOK_S = 0.2
"""How often members of a gang look at what the others have left."""
_WORK_FILE = "gang.json"
_HEAD = "head"
_PART = "dataset"


def sharded(spec: Mapping[str, Any], access: Access, on_progress: OnProgress, gang: ShardGang | None = None) -> Path:
    """The directory of a table's shards. A gang writes them, or children of this process. Raises PreparingError."""
    count = spec["num_data_nodes"]
    # The memory of a gang's members, the head among them, is limited by their containers.
    limit(spec["head_cpu"], None if gang else spec["head_mem"])
    source = Source.reached(spec["metadata_loc"], access)
    with source.translated():
        table = source.table()
        snapshot = source.snapshot(table)
        # Also where the shards exist: who may not read the table may not have its shards.
        snapshot.manifests(table.io)
        key = source.key(table, count)

    def make(draft: Path) -> None:
        with source.translated():
            files = len(files_of(table))
        say(f"{spec['storage_uri']}: snapshot {snapshot.snapshot_id}, {files} files, becomes {count} shards")
        paths = [draft / name for name in shard_names(count)]
        _remove_parts(draft)
        missing = {index: path for index, path in enumerate(paths) if not path.is_file()}
        written = gang.written(key, missing) if gang else _written_by_children(source, spec, missing)
        for done, index in enumerate(written, start=count - len(missing) + 1):
            say(f"{paths[index].name}: {rows_in(paths[index]):,} rows")
            on_progress(done / count)
        _remove_parts(draft)
        shards = [{"file": path.name, "rows": rows_in(path)} for path in paths]
        write_whole(draft / TABLE_FILE, json.dumps({"shards": shards}, indent=2) + "\n")

    return Cache(access.cache).entry(KIND, key, make)


def _remove_parts(draft: Path) -> None:
    for part in draft.glob(f".*{PART_SUFFIX}"):
        part.unlink(missing_ok=True)


def _written_by_children(source: Source, spec: Mapping[str, Any], missing: Mapping[int, Path]) -> Iterator[int]:
    """Write shards; yields the number of each when it exists. Raises RuntimeError where a process was killed."""
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
        # The worker reports what killed it: it knows what the kernel did.
        raise RuntimeError("a process that wrote a shard was killed; if memory is short, name more shards") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _write(source: Source, index: int, count: int, target: Path, size: tuple[str | None, str | None]) -> None:
    limit(*size)  # after the imports, which take memory too
    with source.translated():
        write_shard(source.table(), index, count, target)


class WriterError(PreparingError):
    """A member of the gang could not write its shard."""

    def __init__(self, message: str, reason: Reason = Reason.BAD_INPUT) -> None:
        super().__init__(message)
        self.reason = reason


class ShardGang:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def of_environment(cls) -> Self | None:
        name = os.environ.get(environment.GANG_DIR)
        return cls(Path(os.environ[environment.PREPARED_DIR], name)) if name else None

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Be the head. When the block succeeds, members that still wait for work are told that there is none."""
        with _present(self._directory / _HEAD):
            yield
            if self.work() is None:
                self._ask("", ())

    def writing(self, index: int) -> contextlib.AbstractContextManager[None]:
        return _present(self._writer(index))

    def written(self, key: str, missing: Mapping[int, Path]) -> Iterator[int]:
        """Have shards written; yields each number when it exists. Raises WriterError with the reason of a writer."""
        self._ask(key, missing)
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

    def work(self) -> dict[str, Any] | None:
        """The `key` of a cache entry, and the numbers of its missing `shards`; None until the head has written them."""
        return _read(self._directory / _WORK_FILE)

    @property
    def is_headless(self) -> bool:
        """Whether the head has ended; False before it has come."""
        return _is_gone(self._directory / _HEAD)

    def fail(self, index: int, error: BaseException) -> None:
        reason = error.reason if isinstance(error, PreparingError) else None
        message = str(error) if reason else f"{type(error).__name__}: {error}"
        write_whole(self._failure(index), json.dumps({"reason": reason, "message": message}) + "\n")

    def _ask(self, key: str, shards: Iterable[int]) -> None:
        document = {"key": key, "shards": list(shards)}
        write_whole(self._directory / _WORK_FILE, json.dumps(document, indent=2) + "\n")

    def _raise_failure(self, index: int, shard: str) -> None:
        failure = _read(self._failure(index))
        if failure is None:
            raise RuntimeError(f"the writer of {shard} was killed; if memory is short, give worker_mem, or more shards")
        if failure["reason"]:
            raise WriterError(failure["message"], Reason(failure["reason"]))
        raise RuntimeError(f"the writer of {shard} failed: {failure['message']}")

    def _writer(self, index: int) -> Path:
        return self._directory / f"writer-{index}"

    def _failure(self, index: int) -> Path:
        return self._directory / f"writer-{index}.failed.json"


@contextlib.contextmanager
def _present(place: Path) -> Iterator[None]:
    """Hold a lock file: it is locked from the moment that it exists until this process ends."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{os.urandom(6).hex()}")
    with open(draft, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.rename(draft, place)
        yield


def _is_gone(place: Path) -> bool:
    """Whether the holder of a lock file has ended; False where nobody has held it yet."""
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


def main(index: int) -> None:
    """Be a writer of a gang. It succeeds when its shard exists, when it has none to write, and when the head ends."""
    gang = ShardGang.of_environment()
    if gang is None:
        sys.exit("TRAINMASTER_GANG_DIR does not name a gang's directory")
    with gang.writing(index):
        threading.Thread(target=_end_with_head, args=(gang,), daemon=True).start()
        while (work := gang.work()) is None:
            time.sleep(LOOK_S)
        if index in work["shards"]:
            try:
                _write_for_gang(work["key"], index)
            except Exception as error:
                gang.fail(index, error)
                raise


def _write_for_gang(key: str, index: int) -> None:
    document = inputs.initializers()
    spec = document[_PART]
    count = spec["num_data_nodes"]
    access = initializer_access(_PART, spec, document)
    target = Cache(access.cache).draft(KIND, key) / shard_names(count)[index]
    limit(spec["worker_cpu"], None)

    def write() -> None:
        source = Source.reached(spec["metadata_loc"], in_role(spec.get("iam_role"), access))
        with source.translated():
            table = source.table()
            if source.key(table, count) != key:
                raise InputError(f"{source.location}: it was changed while it was read; try again")
            write_shard(table, index, count, target)

    if not target.is_file():
        steps.try_again_while_unavailable(write)


def _end_with_head(gang: ShardGang) -> None:
    """End when the head has ended: nobody wants the shard then. The next head removes what is written of it."""
    while not gang.is_headless:
        time.sleep(LOOK_S)
    os._exit(0)


if __name__ == "__main__":
    steps.end_at_sigterm()
    main(int(sys.argv[1]))
