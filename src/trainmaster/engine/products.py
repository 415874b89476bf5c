"""Matrix products whose rows do not depend on how many rows there are.

Clients train and sample together in one product, and each must get to the last bit what it would get alone. The CPU's
library (MKL, as PyTorch brings it) computes an element by the same sums for any number of rows, with one exception:
a thread that is left with fewer than four rows takes a kernel with other roundings. Threads share the rows in strips,
so which numbers of rows leave one of them with so few depends on how many threads there are (with two: up to 11; with
sixteen: up to 27), but no multiple of four does. Rows are therefore filled up to a multiple of 16, which leaves room
for wider kernels. Where a layer's width is no multiple of four, roundings depend also on where a row lies, and nothing
is promised; but no family has such layers, and the vocabulary's size is free. GPUs choose kernels by shape as they
like: there, nothing is filled up and nothing promised.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 16
"""Products on the CPU have a multiple of this many rows."""


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias`, for rows [n, in] and weight [out, in]."""
    missing = _missing(rows)
    if not missing:
        return functional.linear(rows, weight, bias)
    return functional.linear(functional.pad(rows, (0, 0, 0, missing)), weight, bias)[: len(rows)]


def back_product(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows @ weight`, for rows [n, out] and weight [out, in]."""
    missing = _missing(rows)
    if not missing:
        return rows @ weight
    return (functional.pad(rows, (0, 0, 0, missing)) @ weight)[: len(rows)]


def wide_product(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows @ weight.T` in at least float32: 16 bits would round logits of 30 to eighths."""
    if rows.dtype in (torch.bfloat16, torch.float16) and rows.is_cuda:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return product(rows, weight).to(torch.promote_types(rows.dtype, torch.float32))


def _missing(rows: Tensor) -> int:
    return -len(rows) % ROWS if rows.device.type == "cpu" else 0
