"""RMS norms of rows, and of sums of rows: the new residual and its norm come from one pass over both summands."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 512
"""How many programs share the rows when each one sums a part of the weight's gradient."""


def rms_norm(rows: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`rows / rms(rows) * (offset + weight)`, of rows [n, width]."""
    if torch.is_grad_enabled():
        return _Norm.apply(rows, weight, eps, offset)  # type: ignore[no-any-return]
    return _forward(rows, None, weight, eps, offset, keep=False)[0]


def add_rms_norm(rows: Tensor, added: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """The norm of `rows + added`, and that sum; the sum is rounded first, as if it were computed by itself."""
    if torch.is_grad_enabled():
        return _AddNorm.apply(rows, added, weight, eps, offset)  # type: ignore[no-any-return]
    normed, total, _ = _forward(rows, added, weight, eps, offset, keep=False)
    return normed, total


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        normed, _, scales = _forward(rows, None, weight, eps, offset, keep=True)
        ctx.save_for_backward(rows, weight, scales)
        ctx.offset = offset
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, weight, scales = ctx.saved_tensors
        grad_rows, grad_weight = _backward(
            grad, None, rows, weight, scales, ctx.offset, wants_weight=ctx.needs_input_grad[1]
        )
        return grad_rows, grad_weight, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, added: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        normed, total, scales = _forward(rows, added, weight, eps, offset, keep=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(total, weight, scales)
        ctx.offset = offset
        return normed, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return grad_total, grad_total, None, None, None
        total, weight, scales = ctx.saved_tensors
        grad_rows, grad_weight = _backward(
            grad, grad_total, total, weight, scales, ctx.offset, wants_weight=ctx.needs_input_grad[2]
        )
        return grad_rows, grad_rows, grad_weight, None, None


def _forward(
    rows: Tensor, added: Tensor | None, weight: Tensor, eps: float, offset: float, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, the sum, and 1 / rms of each row for the backward pass; what is not asked for is the rows."""
    rows = _laid(rows)
    added = None if added is None else _laid(added)
    count, width = rows.shape
    normed = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    total = rows if added is None else torch.empty_like(normed)
    scales = torch.empty(count, dtype=torch.float32, device=rows.device) if keep else rows
    if count:
        block = triton.next_power_of_2(width)
        _norm_forward[(count,)](
            rows,
            rows if added is None else added,
            weight,
            normed,
            total,
            scales,
            rows.stride(0),
            0 if added is None else added.stride(0),
            width,
            eps,
            offset,
            ADDED=added is not None,
            KEEP=keep,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return normed, total, scales


def _backward(
    grad: Tensor,
    grad_total: Tensor | None,
    rows: Tensor,
    weight: Tensor,
    scales: Tensor,
    offset: float,
    *,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the rows, with that of the sum added, and that of the weight if it is wanted."""
    grad, rows = _laid(grad), _laid(rows)
    grad_total = None if grad_total is None else _laid(grad_total)
    count, width = rows.shape
    grad_rows = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    programs = min(count, _PROGRAMS) if wants_weight else count
    parts = torch.empty((programs, width), dtype=torch.float32, device=rows.device) if wants_weight else scales
    if count:
        block = triton.next_power_of_2(width)
        _norm_backward[(programs,)](
            grad,
            grad if grad_total is None else grad_total,
            rows,
            weight,
            scales,
            grad_rows,
            parts,
            grad.stride(0),
            0 if grad_total is None else grad_total.stride(0),
            rows.stride(0),
            count,
            width,
            offset,
            TOTAL=grad_total is not None,
            WEIGHT=wants_weight,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return grad_rows, parts.sum(0).to(weight.dtype) if wants_weight else None


def _laid(rows: Tensor) -> Tensor:
    """Rows whose elements are side by side, as the kernels read them."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


@triton.jit
def _norm_forward(
    rows,
    added,
    weight,
    normed,
    total,
    scales,
    rows_stride,
    added_stride,
    width,
    eps,
    offset,
    ADDED: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(rows + row * rows_stride + columns, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(added + row * added_stride + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * width + columns, values, mask=inside)
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    result = wide * scale * factors
    tl.store(normed + row * width + columns, result.to(normed.dtype.element_ty), mask=inside)
    if KEEP:
        tl.store(scales + row, scale)


@triton.jit
def _norm_backward(
    grad,
    grad_total,
    rows,
    weight,
    scales,
    grad_rows,
    parts,
    grad_stride,
    total_stride,
    rows_stride,
    count,
    width,
    offset,
    TOTAL: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    part = tl.zeros((BLOCK,), dtype=tl.float32)
    row = program
    while row < count:
        scale = tl.load(scales + row)
        unit = tl.load(rows + row * rows_stride + columns, mask=inside, other=0.0).to(tl.float32) * scale
        own = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
        pulled = own * factors
        result = scale * (pulled - unit * (tl.sum(pulled * unit, axis=0) / width))
        if TOTAL:
            result += tl.load(grad_total + row * total_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_rows + row * width + columns, result.to(grad_rows.dtype.element_ty), mask=inside)
        if WEIGHT:
            part += own * unit
        row += tl.num_programs(0)
    if WEIGHT:
        tl.store(parts + program * width + columns, part, mask=inside)
