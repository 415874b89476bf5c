"""Joining the ranks of a job: by torch or by JAX, whichever the job class has imported."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Join this process to the others of its job for a block; nothing happens when it is alone or joined already.

    The variables are those that `torchrun` and our worker set. A class that needs another way may join in its module,
    before this is entered.
    """
    count = int(os.environ.get("WORLD_SIZE") or 1)
    if count == 1:
        yield
    elif "jax" in sys.modules and "torch" not in sys.modules:
        _join_jax(count)
        yield
    else:
        with _torch():
            yield


def _join_jax(count: int) -> None:
    import jax

    if not jax.distributed.is_initialized():  # JAX parts by itself when the interpreter ends
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, num_processes=count, process_id=int(os.environ["RANK"]))


@contextlib.contextmanager
def _torch() -> Iterator[None]:
    import torch

    if torch.distributed.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    else:
        torch.distributed.init_process_group("gloo")
    try:
        yield
    except Exception:
        # Who waits for others on GPUs when some are gone may wait for long, and the cause should be told at once.
        if not torch.cuda.is_available():
            torch.distributed.destroy_process_group()
        raise
    except BaseException:
        torch.distributed.destroy_process_group()
        raise
    # By hand: an interpreter that ends with the group's threads running may be aborted.
    torch.distributed.destroy_process_group()
