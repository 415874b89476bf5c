"""Reading an Iceberg table: its metadata, its shards and their rows, within limits of memory and threads."""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trainmaster.server.core.resources import quantity
from trainmaster.training.fetching import s3
from trainmaster.training.fetching.access import Access, local_path
from trainmaster.training.fetching.cache import key_of
from trainmaster.training.steps import CredentialsError, InputError, SourceUnavailableError

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyiceberg.table import FileScanTask, StaticTable
    from pyiceberg.table.snapshots import Snapshot


def limit(cpu: str | None, memory: str | None) -> None:
    if cpu is not None:
        import pyarrow as pa

        threads = max(1, math.ceil(quantity(cpu)))
        pa.set_cpu_count(threads)
        pa.set_io_thread_count(threads)
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = most if memory is None else int(quantity(memory))  # an inherited limit is for another process
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if most < 0 else min(wanted, most), most))


PART_SUFFIX = ".part"
_FORM = 2
"""Version of the shards' format: with another number, cached ones are not used."""
_REFUSALS = ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "403", "EXPIRED_TOKEN")
_ABSENCES = ("NO_SUCH_BUCKET", "NO_SUCH_KEY", "RESOURCE_NOT_FOUND", "404")
"""What pyarrow says of a store's answers."""
_NAMES_OF_COLUMNS = "schema.name-mapping.default"
"""The property that says which columns files have that name none by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A table, and how it is read; it is pickled to the processes that write its shards."""

    location: str
    access: Access
    store: Mapping[str, str]

    @classmethod
    def reached(cls, location: str, access: Access) -> Self:
        """Reads with the keys of the assumed role, or with those of the environment."""
        return cls(location=location, access=replace(access, s3_credentials=None), store=_store(access))

    def table(self) -> StaticTable:
        """The table, read through `_files` only, whatever its metadata names."""
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

    def snapshot(self, table: StaticTable) -> Snapshot:
        snapshot = table.metadata.current_snapshot()
        if snapshot is None:
            raise InputError(f"{self.location}: the table holds no rows yet")
        return snapshot

    def key(self, table: StaticTable, count: int) -> str:
        """The key of its shards: what they are made from, and how many they are.

        A copy of a table has the same ids, and the numbers of schemas are each table's own. What tells two apart is
        where the snapshot lists its files, on which store, and as what their columns are read. The place of the
        metadata itself says less: of one snapshot there may be several, and they make the same shards.
        """
        metadata, snapshot = table.metadata, self.snapshot(table)
        return key_of(
            "iceberg",
            _FORM,
            *(str(metadata.table_uuid), snapshot.snapshot_id, snapshot.manifest_list),
            self.store.get("s3.endpoint") if snapshot.manifest_list.startswith("s3") else None,
            table.schema().model_dump(mode="json"),
            metadata.properties.get(_NAMES_OF_COLUMNS),
            count,
        )

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        location = self.location
        try:
            yield
        except FileNotFoundError as error:
            raise InputError(f"{location}: there is no such table: {_line(error)}") from error
        except OSError as error:
            if error.errno is not None:
                raise  # of this machine, such as a full disk
            if any(word in str(error) for word in _REFUSALS):
                raise CredentialsError(f"{location}: {_line(error)}; {self.access.remedies.s3_keys}") from error
            if any(word in str(error) for word in _ABSENCES):
                raise InputError(f"{location}: there is no such table: {_line(error)}") from error
            raise SourceUnavailableError(f"{location}: {_line(error)}") from error
        except Exception as error:
            about_it = type(error).__module__ == "pyiceberg.exceptions" or isinstance(error, ValueError | KeyError)
            if not about_it:
                raise
            raise InputError(f"{location} cannot be read as a table of Iceberg: {_line(error)}") from error

    def _files(self) -> Any:
        from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

        access = self.access

        class Files(PyArrowFileIO):
            """Files on S3, and below the data roots: a table's metadata may name any."""

            def new_input(self, location: str) -> PyArrowFile:
                scheme, _, path = self.parse_location(location)
                if scheme == "file":
                    local_path(path, access)  # the path that is opened
                elif scheme not in ("s3", "s3a", "s3n"):
                    raise InputError(f"{location}: tables are read from s3:// and from files alone")
                return super().new_input(location)

        return Files(dict(self.store))


def shard_names(count: int) -> list[str]:
    return [f"shard-{index:05}-of-{count:05}.arrow" for index in range(count)]


def files_of(table: StaticTable) -> list[FileScanTask]:
    """The table's files, in an order that is the same in every process."""
    return sorted(table.scan().plan_files(), key=lambda task: task.file.file_path)


def write_shard(table: StaticTable, index: int, count: int, target: Path) -> None:
    """Write one of `count` shards, atomically."""
    import pyarrow as pa
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    # A unique name: a writer that was cut off may still be writing the same shard.
    part = target.with_name(f".{target.name}.{os.urandom(6).hex()}{PART_SUFFIX}")
    try:
        with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for batch in _share(table, index, count):
                # Files may have other types that are equivalent to the table's.
                writer.write_batch(batch if batch.schema.equals(schema) else batch.cast(schema))
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def rows_in(file: Path) -> int:
    import pyarrow as pa

    with pa.memory_map(str(file)) as mapped:
        reader = pa.ipc.open_file(mapped)
        return sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))


def _share(table: StaticTable, index: int, count: int) -> Iterator[RecordBatch]:
    """One of `count` equal shares of a table's rows: a span of all rows, in the order of their files."""
    from pyiceberg.expressions import AlwaysTrue
    from pyiceberg.io.pyarrow import ArrowScan

    tasks = files_of(table)
    total = sum(task.file.record_count for task in tasks)
    first, end = total * index // count, total * (index + 1) // count
    scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
    start = 0
    for task in tasks:
        size = task.file.record_count
        begins, ends = max(first - start, 0), min(end - start, size)
        if begins < ends:
            # Deleted rows are still counted: the share with the file's last rows takes the remainder.
            yield from _cut(scan.to_record_batches([task]), begins, None if ends == size else ends)
        start += size


def _cut(batches: Iterator[RecordBatch], begin: int, end: int | None) -> Iterator[RecordBatch]:
    position = 0
    for batch in batches:
        low = max(begin - position, 0)
        high = batch.num_rows if end is None else min(end - position, batch.num_rows)
        if low < high:
            yield batch.slice(low, high - low)
        position += batch.num_rows


def _store(access: Access) -> dict[str, str]:
    if access.s3_credentials is not None:
        role = access.s3_credentials()
        keys = [role["access_key_id"], role["secret_access_key"], role["token"]]
    else:
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        keys = [os.environ.get(name) for name in names]
    given = dict(zip(("access-key-id", "secret-access-key", "session-token"), keys, strict=True))
    given |= {"endpoint": s3.endpoint(), "region": s3.region()}
    return {f"s3.{name}": value for name, value in given.items() if value}


def _line(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:500]
