"""Iceberg tables as columnar shards on local disk: made once for a snapshot, shared by all jobs of the account.

The shards are Arrow files with about as many rows each. Each is written by a process of its own, and one that was
written stays when another fails. `trainmaster.jobs.data_cache` gives ranks their share of them.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import resource
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.jobs.data_cache import TABLE_FILE
from trainmaster.trainers.errors import CredentialsError, InputError, UnavailableError
from trainmaster.trainers.fetching.access import Access
from trainmaster.trainers.fetching.cache import Cache, key_of, write_whole
from trainmaster.trainers.fetching.files import local_path
from trainmaster.trainers.progress import Tell, say

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyiceberg.table import FileScanTask, StaticTable

_FORM = 1
"""Of what is kept: another number, and nothing that is kept is taken any more."""
_UNITS = (
    ("Ki", 2.0**10), ("Mi", 2.0**20), ("Gi", 2.0**30), ("Ti", 2.0**40),
    ("m", 1e-3), ("k", 1e3), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12),
)  # fmt: skip
_REFUSALS = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "403", "EXPIRED_TOKEN")
_ABSENCES = ("NO_SUCH_BUCKET", "NO_SUCH_KEY", "RESOURCE_NOT_FOUND", "404")
"""What pyarrow says of a store's answers."""


def sharded(spec: Mapping[str, Any], access: Access, tell: Tell) -> Path:
    """The directory of a table's shards.

    Args:
        spec: the initializer: `metadata_loc`, `num_data_nodes` and sizes.
        access: what may be reached.
        tell: told which share is done.

    Raises:
        InputError: there is no such table, or it has no rows, or lies where jobs may not read.
        CredentialsError: the store refuses the credentials.
        UnavailableError: it does not answer.
    """
    location, count = spec["metadata_loc"], spec["num_data_nodes"]
    limit(spec["head_cpu"], spec["head_mem"])
    source = _Source(location=location, access=replace(access, s3_credentials=None), store=_store(access))
    with _translated(location, access):
        table = source.table()
        metadata = table.metadata
        snapshot = metadata.current_snapshot()
        if snapshot is None:
            raise InputError(f"{location}: the table holds no rows yet")
        key = key_of(
            "iceberg", _FORM, str(metadata.table_uuid), snapshot.snapshot_id, metadata.current_schema_id, count
        )

        def make(draft: Path) -> None:
            files = len(_files_of(table))
            say(f"{spec['storage_uri']}: snapshot {snapshot.snapshot_id}, {files} files, becomes {count} shards")
            _write_shards(source, draft, count, (spec["worker_cpu"], spec["worker_mem"]), tell)

        return Cache(access.cache).entry("tables", key, make)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A table, and how it is read; it travels to the processes that write its shards."""

    location: str
    access: Access
    store: Mapping[str, str]

    def table(self) -> StaticTable:
        """The table, read through `files` alone: what its metadata says of that is not asked."""
        from pyiceberg.catalog.noop import NoopCatalog
        from pyiceberg.serializers import FromInputFile
        from pyiceberg.table import StaticTable

        files = self._files()
        return StaticTable(
            identifier=("table", self.location),
            metadata_location=self.location,
            metadata=FromInputFile.table_metadata(files.new_input(self.location)),
            io=files,
            catalog=NoopCatalog("table"),
        )

    def _files(self) -> Any:
        from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

        access = self.access

        class Files(PyArrowFileIO):
            """Files on S3, and below the data roots: a table's metadata may name any."""

            def new_input(self, location: str) -> PyArrowFile:
                scheme, _, path = self.parse_location(location)
                if scheme == "file":
                    local_path(path, access)  # the very path that is opened
                elif scheme not in ("s3", "s3a", "s3n"):
                    raise InputError(f"{location}: tables are read from s3:// and from files alone")
                return super().new_input(location)

        return Files(dict(self.store))


def _write_shards(source: _Source, draft: Path, count: int, size: tuple[str | None, str | None], tell: Tell) -> None:
    """Write the shards that are not there yet, and what they are."""
    names = [f"shard-{index:05}-of-{count:05}.arrow" for index in range(count)]
    missing = [index for index, name in enumerate(names) if not (draft / name).is_file()]
    # A fresh process for each: threads of the libraries do not survive a fork, and limits are for one shard.
    pool = ProcessPoolExecutor(
        min(count, len(os.sched_getaffinity(0))), multiprocessing.get_context("spawn"), max_tasks_per_child=1
    )
    try:
        written = {
            pool.submit(write_shard, source, index, count, draft / names[index], size): names[index]
            for index in missing
        }
        for done, future in enumerate(as_completed(written), start=count - len(missing) + 1):
            say(f"{written[future]}: {future.result():,} rows")
            tell(done / count)
    except BrokenProcessPool as error:
        raise MemoryError("a process that wrote a shard was killed; name more shards, where memory is short") from error
    finally:
        pool.shutdown(cancel_futures=True)
    shards = [{"file": name, "rows": _rows(draft / name)} for name in names]
    write_whole(draft / TABLE_FILE, json.dumps({"shards": shards}, indent=2) + "\n")


def write_shard(source: _Source, index: int, count: int, target: Path, size: tuple[str | None, str | None]) -> int:
    """Write one of so many shards, whole or not at all; how many rows it has. The work of a process of its own."""
    import pyarrow as pa
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    limit(*size)  # with all that it takes to begin in place
    with _translated(source.location, source.access):
        table = source.table()
        schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
        part = target.with_name(f".{target.name}.part")
        rows = 0
        with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for batch in _share(table, index, count):
                writer.write_batch(_conforming(batch, schema))
                rows += batch.num_rows
        os.replace(part, target)
        return rows


def _share(table: StaticTable, index: int, count: int) -> Iterator[RecordBatch]:
    """One of so many shares of a table's rows, all about as large: a span of all rows, in the order of their files."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan

    tasks = _files_of(table)
    total = sum(task.file.record_count for task in tasks)
    first, end = total * index // count, total * (index + 1) // count
    scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
    start = 0
    for task in tasks:
        size = task.file.record_count
        begins, ends = max(first - start, 0), min(end - start, size)
        if begins < ends:
            # Rows that were deleted since are still in the count: whoever has the file's last rows takes what is left.
            yield from _cut(scan.to_record_batches([task]), begins, None if ends == size else ends)
        start += size


def _files_of(table: StaticTable) -> list[FileScanTask]:
    """The table's files, in an order that is the same for all who ask."""
    return sorted(table.scan().plan_files(), key=lambda task: task.file.file_path)


def _cut(batches: Iterator[RecordBatch], begin: int, end: int | None) -> Iterator[RecordBatch]:
    """Of rows in batches those from `begin` on, before `end`."""
    position = 0
    for batch in batches:
        low = max(begin - position, 0)
        high = batch.num_rows if end is None else min(end - position, batch.num_rows)
        if low < high:
            yield batch.slice(low, high - low)
        position += batch.num_rows


def _conforming(batch: RecordBatch, schema: Any) -> RecordBatch:
    """The batch in the table's own types: files may have others of the same meaning."""
    return batch if batch.schema.equals(schema) else batch.cast(schema)


def _rows(file: Path) -> int:
    import pyarrow as pa

    with pa.memory_map(str(file)) as mapped:
        reader = pa.ipc.open_file(mapped)
        return sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))


def limit(cpu: str | None, memory: str | None) -> None:
    """Hold this process to a number of threads and to an amount of memory, where they are given."""
    if cpu is not None:
        import pyarrow as pa

        threads = max(1, math.ceil(quantity(cpu)))
        pa.set_cpu_count(threads)
        pa.set_io_thread_count(threads)
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = most if memory is None else int(quantity(memory))  # what was inherited is another process's
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if most < 0 else min(wanted, most), most))


def quantity(text: str) -> float:
    """What a quantity says.

    >>> quantity("500m"), quantity("2"), quantity("1.5Gi")
    (0.5, 2.0, 1610612736.0)
    """
    for unit, factor in _UNITS:
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)


def _store(access: Access) -> dict[str, str]:
    """How the store is reached: the keys of the role, or those of the environment."""
    given: dict[str, str | None]
    if access.s3_credentials is not None:
        keys = access.s3_credentials()
        given = {
            "access-key-id": keys["access_key_id"],
            "secret-access-key": keys["secret_access_key"],
            "session-token": keys["token"],
        }
    else:
        given = {
            "access-key-id": os.environ.get("AWS_ACCESS_KEY_ID"),
            "secret-access-key": os.environ.get("AWS_SECRET_ACCESS_KEY"),
            "session-token": os.environ.get("AWS_SESSION_TOKEN"),
        }
    given["endpoint"] = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    given["region"] = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return {f"s3.{name}": value for name, value in given.items() if value}


@contextlib.contextmanager
def _translated(location: str, access: Access) -> Iterator[None]:
    """What the libraries raise as our own errors."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{location}: there is no such table: {_line(error)}") from error
    except OSError as error:
        if error.errno is not None:
            raise  # of this machine: its disk is full, say
        if any(word in str(error) for word in _REFUSALS):
            raise CredentialsError(f"{location}: {_line(error)}; {access.remedies.s3_keys}") from error
        if any(word in str(error) for word in _ABSENCES):
            raise InputError(f"{location}: there is no such table: {_line(error)}") from error
        raise UnavailableError(f"{location}: {_line(error)}") from error
    except Exception as error:
        about_it = type(error).__module__ == "pyiceberg.exceptions" or isinstance(error, ValueError | KeyError)
        if not about_it:
            raise
        raise InputError(f"{location} cannot be read as a table of Iceberg: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:500]
