"""Cross-entropy in one pass computes what plain logits give, with gradients, in chunks of any size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import VOCABULARY
from torch.nn import functional

from trainmaster.engine.architectures.family import LayerNorms
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.cross_entropy import cross_entropy
from trainmaster.engine.model import Unembedding

ROWS, WIDTH = 37, 24


def made(config: ModelConfig, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, Unembedding]:
    torch.manual_seed(0)
    unembedding = Unembedding(config)
    torch.nn.init.normal_(unembedding.weight)
    hidden = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    return hidden, torch.randint(VOCABULARY, (ROWS,)), unembedding.to(dtype)


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_positions=8,
        norm_eps=1e-6,
        activation="silu",
        tied=False,
        windows=(None,),
        ropes=(),
        attention_scale=1.0,
        norms=LayerNorms(),
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("chunk", [None, 1, 10, ROWS])
def test_loss_and_gradients_are_those_of_plain_logits(
    config: ModelConfig, softcap: float | None, chunk: int | None
) -> None:
    hidden, targets, unembedding = made(replace(config, logit_softcap=softcap))
    divisor = torch.tensor(7.0)
    found = cross_entropy(hidden, targets, unembedding, divisor, chunk)
    (2 * found.loss).backward()
    ours = hidden.grad, unembedding.weight.grad
    hidden.grad = unembedding.weight.grad = None
    logits = hidden @ unembedding.weight.t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    expected = functional.cross_entropy(logits, targets, reduction="sum") / divisor
    (2 * expected).backward()
    torch.testing.assert_close(found.loss, expected)
    for own, theirs in zip(ours, (hidden.grad, unembedding.weight.grad), strict=True):
        torch.testing.assert_close(own, theirs)
    torch.testing.assert_close(found.entropy, torch.distributions.Categorical(logits=logits).entropy().sum())
    assert int(found.correct) == int((logits.argmax(1) == targets).sum())


def test_frozen_unembedding_gets_no_gradient(config: ModelConfig) -> None:
    hidden, targets, unembedding = made(config)
    unembedding.requires_grad_(False)
    cross_entropy(hidden, targets, unembedding, torch.tensor(1.0)).loss.backward()
    assert hidden.grad is not None
    assert unembedding.weight.grad is None


def test_nothing_to_train_on_has_no_loss(config: ModelConfig) -> None:
    hidden, targets, unembedding = made(config)
    found = cross_entropy(hidden[:0], targets[:0], unembedding, torch.tensor(1.0))
    found.loss.backward()
    assert float(found.loss.detach()) == float(found.entropy) == int(found.correct) == 0
    assert not hidden.grad.any()


def test_16_bits_are_summed_in_32(config: ModelConfig) -> None:
    wide = made(config, torch.float32)
    exact = cross_entropy(*wide, torch.tensor(1.0))
    narrow = made(config, torch.bfloat16)
    found = cross_entropy(*narrow, torch.tensor(1.0))
    assert found.loss.dtype == torch.float32
    assert float(found.loss.detach()) == pytest.approx(float(exact.loss.detach()), rel=0.01)
