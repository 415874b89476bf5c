"""The shards of a table that an initializer of type `cache` wrote: `from trainmaster.jobs import data_cache`.

    for batch in data_cache.record_batches():
        train_on(batch.to_pydict())

Each rank gets its share of the rows; together they see each row once. Files are memory-mapped, so ranks on one machine
share them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Schema

TABLE_FILE = "table.json"
"""Lists the shards and their numbers of rows; beside them."""
DATASET_PATH = "DATASET_PATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    path: Path
    rows: int


def shards(path: str | os.PathLike[str] | None = None) -> list[Shard]:
    """All shards in a directory, by default DATASET_PATH, in order; raises RuntimeError if there are none."""
    directory = Path(path or os.environ.get(DATASET_PATH) or "")
    try:
        document = json.loads((directory / TABLE_FILE).read_bytes())
    except FileNotFoundError:
        raise RuntimeError(f"{directory} holds no shards of a table: is the job's dataset of the type cache?") from None
    return [Shard(path=directory / shard["file"], rows=shard["rows"]) for shard in document["shards"]]


def shard_files(
    rank: int | None = None, world_size: int | None = None, *, path: str | os.PathLike[str] | None = None
) -> list[Path]:
    """The files of a rank, by default this one, for readers of whole files; there may be fewer shards than ranks."""
    rank, world_size = _which(rank, world_size)
    return [shard.path for shard in shards(path)[rank::world_size]]


def schema(path: str | os.PathLike[str] | None = None) -> Schema:
    import pyarrow as pa

    with pa.memory_map(str(shards(path)[0].path)) as mapped:
        return pa.ipc.open_file(mapped).schema


def record_batches(
    rank: int | None = None, world_size: int | None = None, *, path: str | os.PathLike[str] | None = None
) -> Iterator[RecordBatch]:
    """A rank's consecutive rows, at most one more than another's; by default of RANK, WORLD_SIZE and DATASET_PATH."""
    rank, world_size = _which(rank, world_size)
    found = shards(path)
    total = sum(shard.rows for shard in found)
    first, end = total * rank // world_size, total * (rank + 1) // world_size
    start = 0
    for shard in found:
        low, high = max(first - start, 0), min(end - start, shard.rows)
        if low < high:
            yield from _rows(shard.path, low, high)
        start += shard.rows


def _rows(file: Path, low: int, high: int) -> Iterator[RecordBatch]:
    import pyarrow as pa

    with pa.memory_map(str(file)) as mapped:
        reader, position = pa.ipc.open_file(mapped), 0
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            begin, end = max(low - position, 0), min(high - position, batch.num_rows)
            if begin < end:
                yield batch.slice(begin, end - begin)
            position += batch.num_rows
            if position >= high:
                return


def _which(rank: int | None, world_size: int | None) -> tuple[int, int]:
    own = int(os.environ.get("RANK", "0")) if rank is None else rank
    size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    if not 0 <= own < size:
        raise ValueError(f"there is no rank {own} among {size}")
    return own, size
