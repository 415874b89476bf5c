"""Kernels in Triton, for GPUs: each replaces several of PyTorch's, so that a tensor is read and written once.

They compute in float32 and round once. Their modules need Triton, which comes with PyTorch for CUDA: import them only
where `serve` says so. The CPU keeps the formulas in PyTorch, to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def serve(tensor: Tensor) -> bool:
    """Whether kernels compute what this tensor goes into."""
    return tensor.is_cuda and tensor.dtype in _TYPES
