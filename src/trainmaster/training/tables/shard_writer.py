"""A writer of a gang: `python -m trainmaster.training.tables.shard_writer 3` writes the shard 3, if it is missing.

It ends well when its shard is there, when there is nothing for it to do, and when the head has ended, whatever became
of that.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from trainmaster.jobs import inputs
from trainmaster.training import initializer, steps
from trainmaster.training.errors import InputError
from trainmaster.training.fetching.cache import Cache
from trainmaster.training.tables import KIND
from trainmaster.training.tables.shard_processes import LOOK_S, Gang, Work
from trainmaster.training.tables.table_reader import Source, limit, shard_names, write_shard

_PART = "dataset"


def main(index: int) -> None:
    """Be the writer with this number, to the end."""
    gang = Gang.of_environment()
    if gang is None:
        sys.exit("TRAINMASTER_GANG_DIR does not name a gang's directory")
    with gang.writing(index):
        threading.Thread(target=_end_with_head, args=(gang,), daemon=True).start()
        while (work := gang.work()) is None:
            time.sleep(LOOK_S)
        if index in work.shards:
            try:
                _write(work, index)
            except Exception as error:
                gang.fail(index, error)
                raise


def _write(work: Work, index: int) -> None:
    document = inputs.initializers()
    spec = document[_PART]
    count = spec["num_data_nodes"]
    access = initializer.access_of(_PART, spec, document)
    target = Cache(access.cache).draft(KIND, work.key) / shard_names(count)[index]
    limit(spec["worker_cpu"], None)

    def write() -> None:
        source = Source.reached(spec["metadata_loc"], initializer.in_role(spec, access))
        with source.translated():
            table = source.table()
            if source.key(table, count) != work.key:
                raise InputError(f"{source.location}: it was changed while it was read; try again")
            write_shard(table, index, count, target)

    if not target.is_file():
        initializer.patiently(write)


def _end_with_head(gang: Gang) -> None:
    """Without one nobody wants the shard. The part of it that is written is the next head's to remove."""
    while not gang.is_headless:
        time.sleep(LOOK_S)
    os._exit(0)


if __name__ == "__main__":
    steps.end_when_told()
    main(int(sys.argv[1]))
