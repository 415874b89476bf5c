"""Iceberg tables as columnar shards on local disk: made once for a snapshot, shared by all jobs of the account.

The shards are Arrow files with about as many rows each. Each is written by a process of its own, one of this step's
or one of a gang that runs beside it (`shard_processes`); what was written stays when another fails.
`trainmaster.jobs.data_cache` gives ranks their share of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.jobs.data_cache import TABLE_FILE
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.cache import Cache, write_whole
from trainmaster.training.steps import Tell, say
from trainmaster.training.tables.shard_processes import Gang, written_by_processes
from trainmaster.training.tables.table_reader import PART_SUFFIX, Source, files_of, limit, rows_in, shard_names

KIND = "tables"
"""Of the cache's entries."""


def sharded(spec: Mapping[str, Any], access: Access, tell: Tell, gang: Gang | None = None) -> Path:
    """The directory of a table's shards.

    Args:
        spec: the initializer: `metadata_loc`, `num_data_nodes` and sizes.
        access: what may be reached.
        tell: told which share is done.
        gang: who writes the shards; None: processes of this one.

    Raises:
        InputError: there is no such table, or it has no rows, or lies where jobs may not read.
        CredentialsError: the store refuses the credentials.
        UnavailableError: it does not answer.
        WriterError: one of the gang failed.
    """
    count = spec["num_data_nodes"]
    # Who has a gang is held to its memory from outside, as they all are.
    limit(spec["head_cpu"], None if gang else spec["head_mem"])
    source = Source.reached(spec["metadata_loc"], access)
    with source.translated():
        table = source.table()
        snapshot = source.snapshot(table)
        # Asked for also where the shards are there: who may not read what they were made from shall not have them.
        snapshot.manifests(table.io)
        key = source.key(table, count)

    def make(draft: Path) -> None:
        with source.translated():
            files = len(files_of(table))
        say(f"{spec['storage_uri']}: snapshot {snapshot.snapshot_id}, {files} files, becomes {count} shards")
        paths = [draft / name for name in shard_names(count)]
        _forget_parts(draft)
        missing = {index: path for index, path in enumerate(paths) if not path.is_file()}
        written = gang.written(key, missing) if gang else written_by_processes(source, spec, missing)
        for done, index in enumerate(written, start=count - len(missing) + 1):
            say(f"{paths[index].name}: {rows_in(paths[index]):,} rows")
            tell(done / count)
        _forget_parts(draft)
        shards = [{"file": path.name, "rows": rows_in(path)} for path in paths]
        write_whole(draft / TABLE_FILE, json.dumps({"shards": shards}, indent=2) + "\n")

    return Cache(access.cache).entry(KIND, key, make)


def _forget_parts(draft: Path) -> None:
    """Remove what writers left that were killed."""
    for part in draft.glob(f".*{PART_SUFFIX}"):
        part.unlink(missing_ok=True)
