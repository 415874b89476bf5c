"""The state of random-number generators: what follows a restore is what would have followed the save."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import assert_no_pickle

from trainmaster.jobs import rng
from trainmaster.jobs.checkpoint import CorruptCheckpointError


def _draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        float(np.random.rand()),
        float(torch.rand(())),
        float(torch.randn(3).sum()),
    ]


@pytest.mark.parametrize("before", range(3))
def test_numbers_after_a_restore_are_those_after_the_save(before: int, tmp_path: Path) -> None:
    """Also in the middle of a pair of normal numbers, the second of which is kept for later."""
    for _ in range(before):
        random.gauss(0, 1)
        np.random.standard_normal()
    digests = rng.write(rng.capture(), tmp_path, 3)
    expected = [_draw() for _ in range(3)]
    _draw()
    rng.restore(rng.read(tmp_path, 3, digests=digests))
    assert [_draw() for _ in range(3)] == expected
    assert set(digests) == {"rng-3.json", "rng-3.safetensors"}
    assert_no_pickle(tmp_path)


def test_state_in_memory_is_a_copy() -> None:
    state = rng.capture()
    expected = _draw()
    rng.restore(state)
    assert _draw() == expected
    rng.restore(state)
    assert _draw() == expected


def test_missing_state_is_found(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"rng-0\.json"):
        rng.read(tmp_path, 0)


def test_changed_state_is_found(tmp_path: Path) -> None:
    digests = rng.write(rng.capture(), tmp_path, 0)
    path = tmp_path / "rng-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"rng-0\.safetensors"):
        rng.read(tmp_path, 0, digests=digests)
