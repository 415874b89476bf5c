"""Weights that are computed in 16 bits: their originals take the steps, however the gradients are summed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainmaster.training.loop import weights
from trainmaster.training.loop.peers import Peers
from trainmaster.training.loop.weights import TrainedWeights

ALONE = Peers(index=0, count=1, device=torch.device("cpu"))


def stepped(*, single: bool, batches: int, max_norm: float = float("inf")) -> tuple[list[torch.Tensor], float]:
    """Three weights and a fourth of 32 bits after two steps, and the norm of the last gradients."""
    torch.manual_seed(0)
    originals = [nn.Parameter(torch.randn(5, number)) for number in (3, 4, 1)]
    other = nn.Parameter(torch.randn(2))
    optimizer = torch.optim.AdamW([*originals, other], lr=0.1)
    trained = TrainedWeights(ALONE, single=single)
    trained.others.append(other)
    copies = [trained.copy_of(each, torch.bfloat16) for each in originals]
    for _ in range(2):
        for number in range(batches):
            loss = sum((copy.float() * (number + 1) - 1).square().sum() for copy in copies) + other.square().sum()
            trained.backward(loss / batches, last=number == batches - 1)
        norm = trained.step(optimizer, max_norm=max_norm)
        trained.follow()
    for original, copy in zip(originals, copies, strict=True):
        assert torch.equal(copy, original.to(torch.bfloat16))
        assert copy.grad is original.grad is None
    return [*originals, other], float(norm)


@pytest.mark.parametrize("max_norm", [float("inf"), 0.5])
@pytest.mark.parametrize("bucket_bytes", [1, 70, 1 << 20])
def test_gradients_are_widened_a_few_at_a_time_to_the_same_end(
    monkeypatch: pytest.MonkeyPatch, bucket_bytes: int, max_norm: float
) -> None:
    monkeypatch.setattr(weights, "BUCKET_BYTES", bucket_bytes)
    few, norm = stepped(single=True, batches=1, max_norm=max_norm)
    all_at_once, same_norm = stepped(single=False, batches=1, max_norm=max_norm)
    assert norm == pytest.approx(same_norm, rel=1e-6)
    assert all(map(torch.equal, few, all_at_once))


def test_originals_keep_steps_that_are_too_small_for_16_bits() -> None:
    original = nn.Parameter(torch.ones(1))
    trained = TrainedWeights(ALONE, single=True)
    copy = trained.copy_of(original, torch.bfloat16)
    optimizer = torch.optim.SGD([original], lr=1e-4)
    for _ in range(3):
        trained.backward(copy.float().sum(), last=True)
        trained.step(optimizer, max_norm=float("inf"))
        trained.follow()
    assert float(original.detach()) == pytest.approx(1 - 3e-4)
    assert float(copy.detach()) == 1.0
