"""Attention of packed sequences by PyTorch's Flash Attention, called without what surrounds it.

`torch.nn.attention.varlen` goes through a dispatcher in Python for each layer, and in some versions wants as many key
heads as query heads. The operators underneath take fewer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_FORWARD = {"cum_seq_q", "cum_seq_k", "max_q", "is_causal", "scale", "window_size_left", "window_size_right"}
_BACKWARD = {*_FORWARD, "logsumexp", "rng_state", "unused"}


@functools.cache
def has_flash_attention() -> bool:
    """Whether this version's operators have the arguments that are passed here."""
    try:
        forward = torch.ops.aten._flash_attention_forward.default._schema
        backward = torch.ops.aten._flash_attention_backward.default._schema
    except AttributeError:
        return False
    named = [{each.name for each in schema.arguments} for schema in (forward, backward)]
    return named[0] >= _FORWARD and named[1] >= _BACKWARD and len(forward.returns) == 5


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Of sequences end to end, each row of the earlier ones of its sequence, or of the last `window`.

    `ends` are the running sums of the sequences' lengths, from 0 on: int32.
    """
    attended: Tensor = _Flash.apply(query, key, value, ends, longest, scale, window)  # type: ignore[no-untyped-call]
    return attended


def _options(scale: float, window: int | None) -> dict[str, Any]:
    return {"scale": scale, "window_size_left": window - 1 if window else -1, "window_size_right": 0}


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor,
        longest: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        causal = window is None
        attended, totals, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, ends, ends, longest, longest, 0.0, causal, False, **_options(scale, window)
        )
        ctx.save_for_backward(query, key, value, ends, attended, totals)
        ctx.rest = longest, scale, window
        return attended  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, ends, attended, totals = ctx.saved_tensors
        longest, scale, window = ctx.rest
        # Of random numbers, which there are none of without dropout.
        state, unused = torch.empty(2, dtype=torch.uint64, device=grad.device), torch.empty(0, device=grad.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad,
            query,
            key,
            value,
            attended,
            totals,
            ends,
            ends,
            longest,
            longest,
            0.0,
            window is None,
            state,
            unused,
            **_options(scale, window),
        )
        return *grads, None, None, None, None
