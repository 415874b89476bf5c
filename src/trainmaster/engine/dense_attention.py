"""Attention of packed sequences by cuDNN on Hopper GPUs and later: near twice as fast as PyTorch's Flash Attention.

cuDNN prepares each shape for some tens of milliseconds, so sequences are computed at a few lengths, one after another.
Nothing is copied for that: a sequence ends with rows of the next ones, which nothing of its own sees, and whose results
and gradients are dropped. Sequences of one length that follow each other are computed together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_ROWS_OF_CALL = 768
"""On average at least: many short sequences are faster by one kernel for all."""
_STEPS = 8
"""Lengths that are computed, from each power of two to the next."""
_LEAST_STEP = 64
_WIDEST = 128
"""Heads with more columns have no backward pass here."""
_HOPPER = (9, 0)
_CUDNN = 90300
"""The least version."""


@dataclass(frozen=True, slots=True)
class Run:
    """A sequence, or several of one length that follow each other."""

    start: int
    count: int
    length: int
    padded: int
    """The length that is computed; several sequences have that very length."""

    def seen(self, rows: Tensor) -> Tensor:
        """Of rows [n, heads, width], the run's and those that follow: [count, heads, padded, width]."""
        missing = self.start + self.count * self.padded - len(rows)
        own = rows[self.start :]
        if missing > 0:
            own = functional.pad(own, (0, 0, 0, 0, 0, missing))
        row, head, column = own.stride()
        shape = (self.count, own.shape[1], self.padded, own.shape[2])
        return own.as_strided(shape, (self.padded * row, head, row, column))

    def alone(self, rows: Tensor) -> Tensor:
        """The same with zeros in place of the rows that follow."""
        own = rows[self.start : self.start + self.count * self.length]
        if self.padded > self.length:
            own = functional.pad(own, (0, 0, 0, 0, 0, self.padded - self.length))
        return own.view(self.count, self.padded, *own.shape[1:]).transpose(1, 2)

    def of(self, result: Tensor) -> Tensor:
        """The run's own rows, [count x length, heads, width], of a result."""
        return result.transpose(1, 2)[:, : self.length].flatten(0, 1)


def runs_of(lengths: Sequence[int]) -> list[Run]:
    found: list[Run] = []
    start = 0
    for length in lengths:
        step = max(_LEAST_STEP, (1 << (length - 1).bit_length()) // (2 * _STEPS))
        padded = -(-length // step) * step
        if found and length == padded == found[-1].length:
            found[-1] = replace(found[-1], count=found[-1].count + 1)
        else:
            found.append(Run(start, 1, length, padded))
        start += length
    return found


def is_faster(query: Tensor, lengths: Sequence[int], window: int | None) -> bool:
    """Whether there is such a kernel for these sequences, and it pays."""
    return (
        query.shape[-1] <= _WIDEST
        and (window is None or window >= max(lengths))
        and sum(lengths) >= _ROWS_OF_CALL * len(runs_of(lengths))
        and _has_kernel(query.device)
        and not torch.are_deterministic_algorithms_enabled()
    )


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip or not hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention"):
        return False
    version: int = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return version >= _CUDNN and torch.cuda.get_device_capability(device) >= _HOPPER


def dense_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Of sequences end to end, each row of the earlier ones of its sequence."""
    attended: Tensor = _Dense.apply(query, key, value, runs_of(lengths), scale)  # type: ignore[no-untyped-call]
    return attended


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run], scale: float) -> Tensor:
        parts, totals = [], []
        for run in runs:
            seen = (run.seen(each) for each in (query, key, value))
            found, total, *rest = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *seen, None, True, 0.0, True, False, scale=scale
            )
            parts.append(run.of(found))
            totals.append(total)
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        # Of random numbers, which there are none of without dropout.
        ctx.save_for_backward(query, key, value, attended, *rest[4:6], *totals)
        ctx.rest = runs, scale
        return attended

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, attended, seed, offset, *totals = ctx.saved_tensors
        runs, scale = ctx.rest
        parts: list[list[Tensor]] = []
        for run, total in zip(runs, totals, strict=True):
            seen = [run.seen(each) for each in (query, key, value, attended)]
            found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                run.alone(grad), *seen, total, seed, offset, None, None, None, run.padded, run.padded, 0.0, True,
                scale=scale,
            )  # fmt: skip
            parts.append([run.of(each) for each in found])
        grads = parts[0] if len(parts) == 1 else [torch.cat(each) for each in zip(*parts, strict=True)]
        return *grads, None, None
