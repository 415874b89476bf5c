"""Causal attention of each sequence to itself, where sequences lie end to end without padding.

Training and sampling see the same sequence in other shapes, and the CPU's library sums in an order that depends on
them. There, attention is computed in the next wider type: what is left of another order is lost when it is rounded
back, and sampled tokens have the log-probabilities that training computes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
_HEAD_DIMS = range(8, 257, 8)
"""What PyTorch's kernels for sequences of various lengths take."""


class Attention(Protocol):
    """Attention over the rows of a pack. Which rows see which is its own affair."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """What the rows attend to, [rows, query heads, width].

        Args:
            layer: Which of the model's layers asks.
            query: [rows, query heads, width].
            key: [rows, key-value heads, width].
            value: The same.
            scale: Of the scores.
            window: How many of the last rows each row sees, itself among them; None: all before it.
            softcap: The bound that scores bend to; None: none.
        """


class PackedAttention:
    """Sequences of the given lengths, end to end: each row sees those before it in its own sequence.

    On the CPU they are computed one by one, so that none depends on its neighbours. On a GPU PyTorch's kernel takes all
    at once, in 16 bits and without softcap; what it cannot do is computed one by one as well.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)
        self._rows = sum(lengths)
        self._ends: Tensor | None = None

    def __call__(
        self,
        layer: int,  # noqa: ARG002
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """As the protocol says."""
        if len(query) != self._rows:
            raise ValueError(f"sequences of {self._rows} rows in all cannot share {len(query)}")
        kernel = _varlen_kernel() if query.is_cuda and softcap is None and _fits(query) else None
        if kernel is not None:
            if self._ends is None:
                ends = torch.tensor([0, *itertools.accumulate(self._lengths)], dtype=torch.int32)
                self._ends = ends.to(query.device)
            return kernel(query, key, value, self._ends, max(self._lengths), scale, window)
        sequences = zip(*(torch.split(each, self._lengths) for each in (query, key, value)), strict=True)
        return torch.cat([attend(*each, scale=scale, window=window, softcap=softcap) for each in sequences])


def computed_in(query: Tensor) -> torch.dtype:
    """The type that attention is computed in."""
    return _WIDER.get(query.dtype, query.dtype) if query.device.type == "cpu" else query.dtype


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention of the last rows of one sequence to all of it.

    Args:
        query: [n, query heads, width]: of the last n positions.
        key: [m, key-value heads, width], m ≥ n.
        value: The same.
        scale: As for `Attention`.
        window: The same.
        softcap: The same.
    """
    groups = query.shape[1] // key.shape[1]
    given, dtype = query.dtype, computed_in(query)
    query, key, value = (each.to(dtype).transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    rows, columns = query.shape[2], key.shape[2]
    if softcap is None and rows == columns and (window is None or window >= columns):
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    elif softcap is None:
        mask = _seen(rows, columns, window, query.device)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    else:
        scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
        scores = scores.masked_fill(~_seen(rows, columns, window, query.device), float("-inf"))
        attended = (
            torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value) @ value
        )
    return attended.squeeze(0).transpose(0, 1).to(given)


def _seen(rows: int, columns: int, window: int | None, device: torch.device) -> Tensor:
    """Which columns each of the last rows sees: bool [rows, columns]."""
    behind = torch.arange(columns - rows, columns, device=device)[:, None] - torch.arange(columns, device=device)
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def _fits(query: Tensor) -> bool:
    return query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] in _HEAD_DIMS


@functools.cache
def _varlen_kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor, int, float, int | None], Tensor] | None:
    """PyTorch's kernel for sequences end to end, if it has one that takes what is asked of it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before 2.10
        return None
    known = inspect.signature(varlen_attn).parameters.keys()
    if not known >= {"scale", "window_size"}:  # the first that had it
        return None
    shares_heads = "enable_gqa" in known

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float, window: int | None
    ) -> Tensor:
        options: dict[str, Any] = {"enable_gqa": True} if shares_heads else {}
        if not shares_heads:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
        seen = (window - 1 if window else -1, 0)
        attended = varlen_attn(
            query, key, value, ends, ends, longest, longest, scale=scale, window_size=seen, **options
        )
        return cast(Tensor, attended)

    return kernel
