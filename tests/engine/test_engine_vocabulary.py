"""What is read from rows of logits, and pulled back, against PyTorch's formulas; see `kernel_runs` for where."""

from __future__ import annotations

import pytest
import torch
from kernel_runs import DEVICE, DIGITS, TYPES, apart, drawn
from torch import Tensor

from trainmaster.engine.kernels import vocabulary
from trainmaster.engine.kernels.vocabulary import pull_logits, row_measures, row_totals


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small vocabulary is several of them."""
    monkeypatch.setattr(vocabulary, "_BLOCK", 32)


def some_logits(rows: int = 6, width: int = 100) -> Tensor:
    return 5 * drawn(rows, width, dtype=torch.float32, seed=1)


def some_targets(each: int, rows: int = 6, width: int = 100) -> Tensor:
    return torch.randint(0, width, (rows, each), generator=torch.Generator().manual_seed(each)).to(DEVICE)


@pytest.mark.parametrize("each", [1, 3])
def test_rows_give_totals_logprobs_and_measures(each: int) -> None:
    logits, targets = some_logits(), some_targets(each)
    exact = logits.double().log_softmax(1)
    found, bare = row_measures(logits, targets), row_totals(logits, targets)
    assert apart(found.totals, logits.double().logsumexp(1)) < 1e-6
    assert apart(found.logprobs, exact.gather(1, targets)) < 1e-6
    assert apart(found.entropies, -(exact.exp() * exact).sum(1)) < 1e-5
    assert torch.equal(found.likeliest, logits.argmax(1))
    assert torch.equal(bare.totals, found.totals)
    assert torch.equal(bare.logprobs, found.logprobs)


@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("each", [1, 3])
def test_logits_get_the_gradients_of_their_logprobs(each: int, dtype: torch.dtype, softcap: float | None) -> None:
    raw, targets = some_logits(), some_targets(each)
    if each > 1:
        targets[2, 1] = targets[2, 0]  # twice the same token
    grads = drawn(6, each, dtype=torch.float32, seed=4)
    wide = raw.double().requires_grad_()
    capped = softcap * torch.tanh(wide / softcap) if softcap else wide
    (capped.log_softmax(1).gather(1, targets) * grads.double()).sum().backward()
    logits = capped.detach().float()
    totals = row_totals(logits, targets).totals
    found = pull_logits(logits, totals, targets, grads, torch.empty(6, 100, dtype=dtype, device=DEVICE), softcap)
    assert wide.grad is not None
    assert apart(found, wide.grad) < 2 * DIGITS[dtype]


def test_large_and_missing_logits_are_no_trouble() -> None:
    logits, targets = some_logits() + 1e4, some_targets(1)
    logits[:, 40:] = float("-inf")
    logits[torch.arange(6), targets[:, 0]] = 1e4
    found = row_measures(logits, targets)
    exact = logits.double().log_softmax(1)
    assert apart(found.logprobs, exact.gather(1, targets)) < 1e-3
    assert found.entropies.isfinite().all()


def test_logits_that_are_no_numbers_give_none() -> None:
    logits, targets = some_logits(), some_targets(1)
    logits[1, 70] = float("nan")
    assert row_totals(logits, targets).logprobs.isnan().flatten().tolist() == [row == 1 for row in range(6)]
