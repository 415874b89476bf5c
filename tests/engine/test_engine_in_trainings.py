"""Models of transformers and PEFT whose weights the engine trains: losses and gradients are those that they compute."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_models import KINDS, make_checkpoint, random_tokens, reference
from torch.nn import functional
from transformers import AutoConfig

from trainmaster.engine.config import ModelConfig
from trainmaster.engine.memory import PassMemory
from trainmaster.engine.types import EngineError
from trainmaster.training.data.dataset import IGNORED
from trainmaster.training.loop import engine_model as engine_model_module
from trainmaster.training.loop.batches import Batch, Rows
from trainmaster.training.loop.engine_model import EngineModel, LackingError, engine_config
from trainmaster.training.loop.objectives import NextTokens
from trainmaster.training.loop.peers import Peers
from trainmaster.training.loop.weights import TrainedWeights

LENGTHS = (19, 1, 40)


@pytest.fixture(scope="module")
def batch() -> Batch:
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for seed, length in enumerate(LENGTHS):
        tokens = random_tokens(length, seed).tolist()
        rows["input_ids"].append(tokens)
        rows["labels"].append([token if place % 3 else IGNORED for place, token in enumerate(tokens)])
    return Rows(Dataset.from_dict(rows)).batch(torch.arange(len(LENGTHS)).numpy())


def engine_model(directory: Path, lora: LoraConfig | None = None, *, recompute: float | None = 0.0) -> EngineModel:
    model = reference(directory, dtype=torch.float64)
    config = engine_config(model.config, str(directory))
    weights = TrainedWeights(Peers(index=0, count=1, device=torch.device("cpu")), single=True)
    model = EngineModel(
        model, config, lora, weights, NextTokens(), device=torch.device("cpu"), dtype=torch.float64, recompute=recompute
    )
    torch.manual_seed(1)
    for name, parameter in model.container.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)  # it begins as zero
    return model


def computed_by_transformers(model: Any, batch: Batch, divisor: float) -> torch.Tensor:
    """The loss of a batch, sequence by sequence."""
    logits = [model(input_ids=tokens[None]).logits[0] for tokens in torch.split(batch.tokens, list(batch.lengths))]
    return functional.cross_entropy(torch.cat(logits)[batch.trained], batch.targets, reduction="sum") / divisor


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_trains_alike(model: EngineModel, batch: Batch) -> None:
    ours = model.losses(batch, torch.tensor(17.0))[0]
    ours.backward()
    gradients = gradients_of(model.container)
    theirs = computed_by_transformers(model.container, batch, 17.0)
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)  # transformers computes norms in 32 bits
    expected = {name: grad for name, grad in gradients_of(model.container).items() if grad.any()}
    assert expected
    assert {name for name, grad in gradients.items() if grad.any()} == expected.keys()
    for name, gradient in expected.items():
        atol = max(2e-6, 2e-5 * float(gradient.abs().max()))  # recurrent layers compute in 32 bits there, too
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=atol, msg=name)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # PEFT's, of experts
@pytest.mark.parametrize("adapter", [False, True], ids=["all", "adapter"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_gets_the_gradients_of_transformers_or_is_told(
    kind: str, adapter: bool, tmp_path: Path, batch: Batch
) -> None:
    directory = make_checkpoint(tmp_path, kind)
    lora = LoraConfig(r=4, lora_alpha=7, target_modules="all-linear", use_rslora=True, task_type="CAUSAL_LM")
    config = ModelConfig.read(directory)
    if "router_aux_loss_coef" in (directory / "config.json").read_text():
        with pytest.raises(LackingError, match="auxiliary loss"):
            engine_model(directory, lora if adapter else None)
    elif adapter and config.mixture is not None and config.nested is None:
        # PEFT adapts experts, too, unless they are those of a nested model.
        with pytest.raises(LackingError, match=r"no adapter of the layer model\.layers\.1\.mlp\.experts"):
            engine_model(directory, lora)
    else:
        recompute = 0.0 if adapter else 1.0
        assert_trains_alike(engine_model(directory, lora if adapter else None, recompute=recompute), batch)


def test_as_few_layers_are_recomputed_as_memory_asks_for(
    tmp_path: Path, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine_model(make_checkpoint(tmp_path, "qwen3"), recompute=None)
    layers = model.transformer.model.layers
    memory = PassMemory.of(
        model.transformer.config, bytes_each=8, gradients=sum(each.nbytes for each in model.container.parameters())
    )
    computed: list[int] = []
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: computed.append(number))
    for recomputed in range(len(layers) + 1):
        monkeypatch.setattr(engine_model_module, "free_bytes", lambda _, n=recomputed: memory.needed(LENGTHS, n))
        model.losses(batch, torch.tensor(17.0))[0].backward()
        assert Counter(computed) == {number: 1 + (number < recomputed) for number in range(len(layers))}
        computed.clear()


def test_sample_that_cannot_fit_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine_model(make_checkpoint(tmp_path, "qwen3"), recompute=None)
    monkeypatch.setattr(engine_model_module, "free_bytes", lambda _: 10**9)
    model.require_memory(40, torch.device("cpu"))
    with pytest.raises(EngineError, match=r"the longest sample has 1,000,000 tokens: .* sequences of up to [1-9]"):
        model.require_memory(1_000_000, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gemma3", {"target_modules": ["fc1"]}, "no layer of the language model"),
        ("qwen3_untied", {"target_modules": ["embed_tokens"]}, "no adapter of the layer model.embed_tokens"),
        ("qwen3", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "not .*norm"),
        ("qwen3_untied", {"target_modules": ["q_proj"], "bias": "all"}, "not .*bias"),
        ("qwen3_untied", {"target_modules": ["lm_head"]}, "no adapter of the layer lm_head"),
    ],
)
def test_adapter_that_the_engine_lacks_is_told(
    kind: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(LackingError, match=message):
        engine_model(make_checkpoint(tmp_path, kind), LoraConfig(r=2, task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("qwen3", {"attention_dropout": 0.5}, "attention_dropout is 0.5"),
        ("gpt_neox", {}, "its architecture 'gpt_neox' is not among"),
        ("qwen3", {"router_aux_loss_coef": 0.1}, "auxiliary loss"),
    ],
)
def test_model_that_the_engine_lacks_is_told(
    model_type: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(LackingError, match=message):
        engine_config(AutoConfig.for_model(model_type, **values), str(tmp_path))
