"""Weights of fewer than 16 bits in published checkpoints, which are read as 16 bits.

A weight that is quantized is several tensors: numbers of a few bits, and the scales of blocks of them. What their names
end in says which form it is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainmaster.engine.architectures.quantization import FP8_BLOCK, INT4_GROUP

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class _Form:
    endings: tuple[str, ...]
    """Of the names of the tensors that make up a weight, after the weight's own."""
    restored: Callable[[Sequence[Tensor]], Tensor]


def tensors_of(weight: str, names: Container[str]) -> tuple[str, ...]:
    """The tensors of a checkpoint that make up a weight: itself alone, unless it is quantized."""
    form = _form_of(weight, names)
    return (weight,) if form is None else tuple(weight + ending for ending in form.endings)


def restored(weight: str, names: Container[str], tensors: Sequence[Tensor]) -> Tensor:
    """The weight that `tensors_of` it make up."""
    form = _form_of(weight, names)
    return tensors[0] if form is None else form.restored(tensors)


def _fp8(tensors: Sequence[Tensor]) -> Tensor:
    """Numbers of 8 bits, and a scale for each block of 128 rows and 128 columns."""
    numbers, scales = tensors
    rows, columns = numbers.shape
    spread = scales.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return (numbers.float() * spread[:rows, :columns]).to(torch.bfloat16)


def _int4(tensors: Sequence[Tensor]) -> Tensor:
    """Eight numbers in 32 bits, the first in the lowest ones, and a scale for each 32 numbers of a row."""
    packed, scales, shape = tensors
    rows, columns = shape.tolist()
    places = torch.arange(0, 32, 4, device=packed.device)
    numbers = (packed.unsqueeze(-1) >> places & 15).flatten(1)[:, :columns] - 8
    spread = scales.float().repeat_interleave(INT4_GROUP, 1)
    return (numbers.float() * spread[:rows, :columns]).to(torch.bfloat16)


def _mxfp4(tensors: Sequence[Tensor]) -> Tensor:
    """Blocks of 32 numbers of 4 bits with a common exponent; the matrices of experts lie the other way round."""
    blocks, scales = tensors
    known = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16, device=blocks.device)
    # The first of two numbers is in the lower bits.
    places = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    numbers = torch.ldexp(known[places.long()], (scales.to(torch.int32) - _EXPONENT_BIAS).unsqueeze(-1))
    return numbers.to(torch.bfloat16).flatten(-2).transpose(1, 2)


_FORMS = (
    _Form(("", "_scale_inv"), _fp8),
    _Form(("_packed", "_scale", "_shape"), _int4),
    _Form(("_blocks", "_scales"), _mxfp4),
)


def _form_of(weight: str, names: Container[str]) -> _Form | None:
    return next((form for form in _FORMS if all(weight + ending in names for ending in form.endings)), None)
