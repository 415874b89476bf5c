"""The ranks of a data-parallel training: how they find each other, and sums over all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainmaster.jobs.process import TIMEOUT_S

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    index: int
    count: int
    device: torch.device

    @classmethod
    def join(cls, backend: str) -> Peers:
        """Connect the ranks that torchrun's environment declares; each has the GPU of its number on the node."""
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count > 1 and not dist.is_initialized():
            # NCCL needs a GPU.
            dist.init_process_group(backend if cuda else "gloo", timeout=timedelta(seconds=TIMEOUT_S))
        return cls(index=dist.get_rank() if count > 1 else 0, count=count, device=device)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def total(self, number: int) -> int:
        """The sum of all ranks' numbers."""
        return number if self.count == 1 else int(self.sum(torch.tensor(number, device=self.device)))

    def first_on_node(self, make: Callable[[], T]) -> T:
        """What a function makes, called by the first rank of a node before the others: these find it in the cache."""
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        made = make() if first else None
        if self.count > 1:
            dist.barrier()
        return make() if made is None else made
