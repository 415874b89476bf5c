"""The rows of a job's data, for a script of the user's own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, overload

import pyarrow as pa

from trainmaster.jobs import inputs
from trainmaster.training.data.config import DataConfig, LocalSource
from trainmaster.training.data.row_selection import Indices, select
from trainmaster.training.data.rows import write_rows
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.cache import Cache, emptied, key_of

_FORM = 2


class Rows(Sequence[dict[str, Any]]):
    """Rows as dictionaries, read from a file that is mapped into memory."""

    def __init__(self, texts: pa.ChunkedArray, indices: Indices) -> None:
        self._texts = texts
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | Rows:
        if isinstance(index, slice):
            return Rows(self._texts, self._indices[index])
        row: dict[str, Any] = json.loads(self._texts[int(self._indices[index])].as_py())
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


class Loaded(NamedTuple):
    """The rows to train on, and those to validate with."""

    train: Rows
    eval: Rows


def load() -> Loaded:
    """The rows of this job's sources after filters, projection and sampling, parted by `validation_split`.

    The order is shuffled by the job's seed, and the same on every rank and in every attempt. The first rank to ask
    reads the files; the others wait for it.

    Raises:
        RuntimeError: this process is in no job that has data.
        InputError: a source or a row is wrong.
    """
    config = DataConfig.from_document(inputs.training())
    sources = [LocalSource.from_json(each) for each in inputs.prepared()["sources"]]
    cache = Cache(Access.from_environ(os.environ).cache)
    key = key_of(
        _FORM,
        [[asdict(source)["columns"], [asdict(each) for each in source.filters]] for source in config.sources],
        [[local.format, local.slices, [cache.digest(file) for file in local.files]] for local in sources],
    )

    def make(target: Path) -> None:
        tallies = write_rows(emptied(target) / "rows.arrow", config.sources, sources)
        (target / "counts.json").write_text(json.dumps([tally.kept for tally in tallies]))

    entry = cache.entry("rows", key, make)
    selection = select(
        json.loads((entry / "counts.json").read_text()),
        [source.sampling for source in config.sources],
        validation_split=config.validation_split,
        seed=config.seed,
    )
    with pa.memory_map(str(entry / "rows.arrow")) as file:
        texts = pa.ipc.open_stream(file).read_all().column("row")
    return Loaded(train=Rows(texts, selection.train), eval=Rows(texts, selection.evaluation))
