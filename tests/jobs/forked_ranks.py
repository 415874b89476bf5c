"""Runs a function on several ranks that are forked from this process, which has imported PyTorch already."""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from patience import PATIENCE_S

# A child of a process whose OpenMP threads have run would wait for them for ever.
torch.set_num_threads(1)


class RankFailedError(AssertionError):
    """A rank raised, died or hung; the message has its traceback."""


def run_ranks(count: int, work: Callable[[int], Any], place: Path, *, connect: bool = True) -> list[Any]:
    """What `work(rank)` returned on every rank, as JSON; `place` is a new directory for files of this run."""
    place.mkdir(parents=True)
    children = [_fork(rank, count, work, place, connect=connect) for rank in range(count)]
    deadline = time.monotonic() + PATIENCE_S
    waiting = dict(enumerate(children))
    try:
        while waiting and time.monotonic() < deadline:
            for rank, child in list(waiting.items()):
                if os.waitpid(child, os.WNOHANG)[0]:
                    del waiting[rank]
            time.sleep(0.01)
    finally:
        for child in waiting.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    results = []
    for rank in range(count):
        said = json.loads(_read(place / f"{rank}.json") or '{"error": "it died or hung"}')
        if "error" in said:
            raise RankFailedError(f"rank {rank}: {said['error']}")
        results.append(said["result"])
    return results


def _fork(rank: int, count: int, work: Callable[[int], Any], place: Path, *, connect: bool) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the test runner, which hold nothing
        child = os.fork()
    if child:
        return child
    said: dict[str, Any]
    try:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        if connect:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{place}/meeting",
                rank=rank,
                world_size=count,
                timeout=datetime.timedelta(seconds=60),
            )
        said = {"result": work(rank)}
    except BaseException:
        said = {"error": traceback.format_exc()}
    (place / f"{rank}.new").write_text(json.dumps(said))
    os.replace(place / f"{rank}.new", place / f"{rank}.json")
    os._exit(0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
