"""What tests of checkpoints share: equality to the bit, and a look for anything that could be a pickle."""

from __future__ import annotations

import math
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

_PICKLE_SUFFIXES = {".pt", ".pth", ".bin", ".pkl", ".pickle", ".metadata", ".distcp"}


def same(left: Any, right: Any) -> bool:
    """Whether two trees are alike in type, shape and every bit."""
    if isinstance(left, torch.Tensor):
        alike = isinstance(right, torch.Tensor) and left.dtype == right.dtype and left.shape == right.shape
        return alike and torch_bytes(left) == torch_bytes(right)
    if isinstance(left, (np.ndarray, np.generic)):
        return (
            type(left) is type(right)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        alike = left == right and math.copysign(1, left) == math.copysign(1, right)
        return alike or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


def torch_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def assert_no_pickle(directory: Path) -> None:
    """No file has a suffix of, begins like, or can be read as a pickle."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert path.suffix not in _PICKLE_SUFFIXES, path
        assert path.name != ".metadata", path
        assert not zipfile.is_zipfile(path), path
        assert not _is_pickle(path.read_bytes()), path


def _is_pickle(data: bytes) -> bool:
    if not data:
        return False
    try:
        for _ in pickletools.genops(data):
            pass
    except Exception:
        return False
    return True
