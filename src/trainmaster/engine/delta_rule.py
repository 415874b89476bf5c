"""The gated delta rule: a state that decays, forgets what a key held, and holds a value for it instead.

    state = exp(decay) * state
    state = state + key' (beta * (value - key state))
    output = query state

A sequence is computed in chunks: within one, all rows are solved for together; states pass from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainmaster.engine.architectures.linear import LinearAttention

_CHUNK = 64
_NORM_EPS = 1e-6


@dataclass(slots=True, eq=False)
class Past:
    """What the rows of sequences before the next ones leave behind."""

    rows: Tensor
    """The last rows before the convolution: [sequences, taps - 1, mixed]."""
    state: Tensor
    """[sequences, value heads, key width, value width]."""

    @classmethod
    def none(cls, linear: LinearAttention, sequences: int, device: torch.device, dtype: torch.dtype) -> Past:
        size = linear.value_heads, linear.key_width, linear.value_width
        return cls(
            torch.zeros(sequences, linear.taps - 1, linear.mixed, device=device, dtype=dtype),
            torch.zeros(sequences, *size, device=device, dtype=dtype),
        )


class RecurrentRows(NamedTuple):
    """What goes into the rule: of rows, or of [sequences, rows]."""

    mixed: Tensor
    """Queries, keys and values before the convolution: [rows, mixed]."""
    decay: Tensor
    """The logarithm of what the state is multiplied by: [rows, value heads]."""
    beta: Tensor
    """How far a value replaces what its key held: [rows, value heads]."""


def convolve_and_recur(linear: LinearAttention, given: RecurrentRows, taps: Tensor, past: Past) -> tuple[Tensor, Past]:
    """The outputs [sequences, length, value heads, value width] of sequences of one length, in the type of the past.

    `taps` [mixed, taps] weigh the last rows.
    """
    mixed, decay, beta = given
    sequences, length, dtype = len(mixed), mixed.shape[1], past.state.dtype
    rows = torch.cat([past.rows, mixed.to(dtype)], dim=1)
    convolved = rows[:, :length] * taps[:, 0].to(dtype)
    for tap in range(1, linear.taps):
        convolved = convolved + rows[:, tap : tap + length] * taps[:, tap].to(dtype)
    query, key, value = torch.split_with_sizes(
        functional.silu(convolved), [linear.keys, linear.keys, linear.values], dim=-1
    )
    query, key = (_unit(each.reshape(sequences, length, linear.key_heads, linear.key_width)) for each in (query, key))
    value = value.reshape(sequences, length, linear.value_heads, linear.value_width)
    shared = linear.value_heads // linear.key_heads
    query, key = (each.repeat_interleave(shared, dim=2) for each in (query * linear.key_width**-0.5, key))
    by_head = [each.transpose(1, 2) for each in (query, key, value, decay.to(dtype), beta.to(dtype))]
    query, key, value, decay, beta = by_head
    outputs, state = (_step if length == 1 else _chunks)(query, key, value, decay, beta, past.state)
    return outputs.transpose(1, 2), Past(rows[:, length:], state)


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPS)


def _step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One row of each sequence."""
    state = state * decay.exp().unsqueeze(-1)
    held = key @ state
    state = state + key.transpose(2, 3) @ ((value - held) * beta.unsqueeze(-1))
    return query @ state, state


def _chunks(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows are [sequences, heads, length, width]; what pads the last chunk changes no state."""
    length = query.shape[2]
    chunk = min(_CHUNK, length)
    missing = -length % chunk
    by_chunk = (*query.shape[:2], -1, chunk)
    query, key, value = (
        functional.pad(each, (0, 0, 0, missing)).reshape(*by_chunk, each.shape[3]) for each in (query, key, value)
    )
    decay, beta = (functional.pad(each, (0, missing)).reshape(by_chunk) for each in (decay, beta))
    decayed = decay.cumsum(-1)
    """The logarithm of what a chunk's first state is multiplied by at each row."""
    since = (decayed.unsqueeze(-1) - decayed.unsqueeze(-2)).tril().exp().tril()
    weighed_keys, weighed_values = key * beta.unsqueeze(-1), value * beta.unsqueeze(-1)
    # A row's change depends on those of the earlier rows: (1 + L) changes = values - what the first state held.
    earlier = (weighed_keys @ key.transpose(-1, -2)) * since
    sides = torch.cat([weighed_values, weighed_keys * decayed.exp().unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(earlier, sides, upper=False, unitriangular=True)
    changes, held_by = torch.split_with_sizes(solved, [value.shape[-1], key.shape[-1]], dim=-1)
    attended = (query @ key.transpose(-1, -2)) * since
    asked = query * decayed.exp().unsqueeze(-1)
    kept = key * (decayed[..., -1:] - decayed).exp().unsqueeze(-1)
    whole = decayed[..., -1].exp()
    outputs = []
    for index in range(query.shape[2]):
        own = changes[:, :, index] - held_by[:, :, index] @ state
        outputs.append(asked[:, :, index] @ state + attended[:, :, index] @ own)
        state = state * whole[:, :, index, None, None] + kept[:, :, index].transpose(-1, -2) @ own
    return torch.cat(outputs, dim=2)[:, :, :length], state
