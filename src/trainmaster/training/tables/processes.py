"""Shards that processes of this one write, as many at a time as there are cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from trainmaster.training.tables.limits import limit
from trainmaster.training.tables.table_reader import Source, write_shard


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
