"""Copies between the host and a GPU that neither waits for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def on_device(values: np.ndarray | Sequence[float], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A copy on a GPU, of the values' own type if there is no `dtype`: work that starts later on the stream sees it."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))  # on the host, whatever torch's default device is
    tensor = tensor if dtype is None else tensor.to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Fetched:
    """Tensors on their way to the host, all in one copy. On a GPU they are of one type."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [each.shape for each in tensors]
        self._arrived: torch.cuda.Event | None = None
        if not tensors[0].is_cuda:
            self._tensors = [each.detach().cpu() for each in tensors]
            return
        joined = torch.cat([each.detach().flatten() for each in tensors])
        copy = torch.empty(joined.shape, dtype=joined.dtype, pin_memory=True).copy_(joined, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()
        ends = [0, *itertools.accumulate(each.numel() for each in tensors)]
        self._tensors = [copy[start:end] for start, end in itertools.pairwise(ends)]

    @property
    def is_here(self) -> bool:
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def arrays(self) -> list[np.ndarray]:
        """Waits for the tensors, and for nothing that was started after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [each.view(shape).numpy() for each, shape in zip(self._tensors, self._shapes, strict=True)]
