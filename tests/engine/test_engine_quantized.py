"""Weights of 8 bits under an adapter: the numbers that a GPU multiplies, which the CPU multiplies one type wider."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_runs import filled_adapter, logits_of
from safetensors.torch import load_file
from tiny_models import make_checkpoint, random_tokens
from torch import Tensor

from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.engine import Engine
from trainmaster.engine.layers import Linear, together
from trainmaster.engine.memory import PassMemory
from trainmaster.engine.model import Transformer
from trainmaster.engine.products import AdapterShare, Factors, adapted_outputs
from trainmaster.engine.quantized import LARGEST, QuantizedPart, check_fp8, quantize, quantized_rows
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.types import (
    AdamOptions,
    Datum,
    EngineError,
    LoraOptions,
    Pass,
    PassResult,
    SampleRequest,
    SampleResult,
    Trained,
)

LORA = LoraOptions(rank=8, seed=1)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


# Rows


def test_each_number_is_at_most_half_a_step_away() -> None:
    rows = drawn(40, 256, seed=1) * torch.logspace(-20, 20, 40)[:, None]
    found = quantized_rows([rows])
    off = (found.dequantized() - rows).abs()
    # Three digits after the first one; below the least of e4m3's normal numbers, steps are 2**-9 of the scale.
    steps = torch.maximum(rows.abs() / 16, found.scales[:, None] / 1024)
    assert bool((off <= steps * 1.0001).all())
    assert apart(found.dequantized(), rows) < 0.03
    assert torch.equal(found.values.float().abs().amax(1), torch.full((40,), LARGEST))


def test_row_of_zeros_and_row_that_is_not_finite_concern_no_other() -> None:
    rows = drawn(4, 32, seed=2)
    rows[0], rows[1, 5], rows[2, 7] = 0, torch.nan, torch.inf
    found = quantized_rows([rows]).dequantized()
    assert torch.equal(found[0], torch.zeros(32))
    assert not found[1].isfinite().all()
    assert not found[2].isfinite().all()
    assert torch.equal(found[3], quantized_rows([rows[3:]]).dequantized()[0])


def test_parts_of_a_row_share_its_scale_after_their_factors() -> None:
    parts, factors = [drawn(5, 16, seed=3), 50 * drawn(5, 32, seed=4)], drawn(48, seed=5).abs()
    found, exact = quantized_rows(parts, factors), torch.cat(parts, dim=1) * factors
    assert torch.equal(found.scales, exact.abs().amax(1) / LARGEST)
    assert apart(found.dequantized(), exact) < 0.04


# Layers


def layers_of(*widths: int, bias: bool = False) -> list[Linear]:
    layers = []
    for seed, width in enumerate(widths):
        layer = Linear(f"layer{seed}", 48, width, bias=bias).requires_grad_(False)
        layer.weight.copy_(drawn(width, 48, seed=seed) * torch.rand(width, 1))
        if layer.bias is not None:
            layer.bias.copy_(drawn(width, seed=90 + seed))
        layers.append(layer)
    return layers


def dequantized(layer: Linear) -> Tensor:
    assert isinstance(layer.quantized, QuantizedPart)
    whole, index = layer.quantized.whole, layer.quantized.index
    part = whole.part(index, index + 1)
    return part.values.double() * part.scales.double()[:, None]


@pytest.mark.parametrize("bias", [False, True])
def test_layers_compute_and_pull_with_the_numbers_that_they_hold(bias: bool) -> None:
    layers = layers_of(32, 16, 16, bias=bias)
    originals = [layer.weight.clone() for layer in layers]
    quantize(layers, torch.device("cpu"))
    for layer, original in zip(layers, originals, strict=True):
        assert layer.weight.dtype == torch.float8_e4m3fn
        assert 0 < apart(dequantized(layer), original) < 0.04
    rows = drawn(7, 48, seed=10).requires_grad_()
    rounded = quantized_rows([rows.detach()]).dequantized().double()
    outputs = together(layers, rows, None)
    for layer, output in zip(layers, outputs, strict=True):
        exact = rounded @ dequantized(layer).t() + (0 if layer.bias is None else layer.bias.double())
        assert apart(output, exact) < 1e-6
        assert torch.equal(output, layer(rows))
    pulls = [drawn(7, width, seed=20 + width) for width in (32, 16, 16)]
    sum((output * pull).sum() for output, pull in zip(outputs, pulls, strict=True)).backward()
    weights = torch.cat([dequantized(layer) for layer in layers])
    scales = torch.cat([layer.quantized.whole.scales for layer in layers[:1]])
    pulled = quantized_rows(pulls, scales).dequantized().double() @ (weights / scales.double()[:, None])
    assert rows.grad is not None
    assert apart(rows.grad, pulled) < 1e-6
    assert apart(rows.grad, torch.cat(pulls, dim=1).double() @ weights) < 0.05


def test_adapter_gets_the_gradients_that_whole_weights_give() -> None:
    """Its factors see the rows and the gradients as they are."""
    (layer,) = layers_of(32)
    plain = copy.deepcopy(layer)
    quantize([layer], torch.device("cpu"))
    found = []
    for each in (layer, plain):
        factors = Factors(*(torch.nn.Parameter(drawn(*shape, seed=sum(shape))) for shape in ((4, 48), (32, 4))))
        share = AdapterShare(2, 9, 0.5, factors, factors.a.detach(), factors.b.detach())
        rows = drawn(12, 48, seed=3).requires_grad_()
        (whole,) = together([each], rows, None)
        output = adapted_outputs(whole, rows, [share])
        (output * drawn(12, 32, seed=4)).sum().backward()
        found.append((factors.a.grad, factors.b.grad, rows.grad, output))
    (a, b, pulled, output), (exact_a, exact_b, exact_pulled, exact_output) = found
    assert torch.equal(a, exact_a)
    assert torch.equal(b, exact_b)
    assert 0 < apart(pulled, exact_pulled) < 0.05
    assert 0 < apart(output, exact_output) < 0.05


def test_part_of_the_layers_is_computed_as_among_all() -> None:
    layers = layers_of(32, 16, 16)
    quantize(layers, torch.device("cpu"))
    rows = drawn(5, 48, seed=1)
    everything = together(layers, rows, None)
    for chosen in ((0,), (1, 2), (0, 2), (2, 1)):
        for place, output in zip(chosen, together([layers[place] for place in chosen], rows, None), strict=True):
            assert torch.equal(output, everything[place])


def test_layers_whose_widths_do_not_fit_stay_as_they_are() -> None:
    layers = layers_of(32, 20, 16)
    original = layers[1].weight
    rows = drawn(5, 48, seed=1)
    expected = layers[1](rows)
    quantize(layers, torch.device("cpu"))
    assert layers[1].weight is original
    assert torch.equal(together(layers, rows, None)[1], expected)
    for output, layer in zip(together(layers, rows, None), layers, strict=True):
        assert torch.equal(output, layer(rows))


# Models


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("quantized"), "qwen3", initializer_range=0.06)


def data(count: int = 4) -> tuple[Datum, ...]:
    random = np.random.default_rng(0)
    texts = [random.integers(0, 256, 33) for _ in range(count)]
    weights = np.ones(32, np.float32)
    return tuple(Datum(tokens=text[:-1], inputs={"target_tokens": text[1:], "weights": weights}) for text in texts)


def run(engine: Engine, *, backward: bool = True) -> PassResult:
    (result,) = engine.run([Pass(model_id="m", data=data(), loss="cross_entropy", backward=backward)])
    assert isinstance(result, PassResult), result
    return result


def losses(engine: Engine, steps: int) -> list[float]:
    engine.create_model("m", Trained.ADAPTER, LORA)
    found = []
    for _ in range(steps):
        result = run(engine)
        found.append(result.metrics["loss:sum"] / result.metrics["loss_tokens:sum"])
        engine.optim_step("m", AdamOptions(learning_rate=3e-3))
    return found


def test_training_takes_about_the_course_that_it_takes_with_whole_weights(directory: Path) -> None:
    ours, theirs = (losses(Engine(directory, fp8=fp8), 40) for fp8 in (True, False))
    assert theirs[-1] < 0.5 * theirs[0]
    assert ours != theirs
    assert all(abs(mine - exact) < 0.03 * theirs[0] for mine, exact in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma2", "phi3", "qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_model_is_about_what_it_is_with_whole_weights(tmp_path: Path, kind: str) -> None:
    checkpoint = make_checkpoint(tmp_path, kind, initializer_range=0.06)
    config = ModelConfig.read(checkpoint)
    ours, theirs = (Transformer(config).load(checkpoint, fp8=fp8) for fp8 in (True, False))
    assert ours.is_quantized
    assert {each.dtype for each in ours.parameters()} == {torch.float32, torch.float8_e4m3fn}
    narrow = {name for name, each in ours.named_parameters() if each.dtype == torch.float8_e4m3fn}
    assert narrow == theirs.wide_weights
    assert all(".self_attn." in name or ".mlp." in name or ".linear_attn." in name for name in narrow)
    assert not any("experts." in name and "shared" not in name for name in narrow)
    texts = [random_tokens(length, seed=length) for length in (5, 40)]
    with torch.no_grad():
        # A few tokens get other experts.
        most = 0.15 if config.mixture is None else 0.6
        assert 0 < apart(torch.cat(logits_of(ours, texts)), torch.cat(logits_of(theirs, texts))) < most


def test_samples_have_the_logprobs_of_training_to_the_last_bit(directory: Path) -> None:
    engine = Engine(directory, fp8=True)
    engine.create_model("m", Trained.ADAPTER, LORA)
    run(engine)
    engine.optim_step("m", AdamOptions(learning_rate=3e-3))
    expected = run(engine, backward=False).outputs
    sampler = Sampler(engine.base, directory)
    for index, datum in enumerate(data()):
        prompt = (*datum.tokens.tolist(), int(datum.inputs["target_tokens"][-1]))
        request = SampleRequest(request_id=str(index), prompt=prompt, max_tokens=1, prompt_logprobs=True)
        sampler.submit(request, engine.snapshot("m"))
    found: dict[str, Any] = {}
    while sampler.pending:
        found |= dict(sampler.step())
    for index, output in enumerate(expected):
        result = found[str(index)]
        assert isinstance(result, SampleResult)
        assert result.prompt_logprobs is not None
        assert np.array_equal(np.asarray(result.prompt_logprobs[1:], np.float32), output["logprobs"])


def test_merged_model_is_that_of_the_files_and_the_adapter(tmp_path: Path, directory: Path) -> None:
    engines = [Engine(directory, fp8=fp8) for fp8 in (True, False)]
    losses(engines[0], 2)
    engines[1].create_model("m", Trained.ADAPTER, LORA)
    engines[1].load_state("m", engines[0].state("m"), optimizer=False)
    merged = []
    for name, engine in zip(("ours", "theirs"), engines, strict=True):
        engine.export(engine.snapshot("m"), tmp_path / name, merged=True)
        merged.append(load_file(tmp_path / name / "model.safetensors"))
    assert merged[0].keys() == merged[1].keys()
    for name, weight in merged[0].items():
        assert torch.equal(weight, merged[1][name]), name


def test_recomputing_layers_changes_nothing(directory: Path) -> None:
    model = Transformer(ModelConfig.read(directory)).load(directory, fp8=True)
    tokens = random_tokens(30, seed=1)
    found = []
    for recompute in (0.0, 1.0):
        adapter = filled_adapter(model.config, seed=1, train_unembed=False)
        hidden = hidden_of(model, tokens, adapter, recompute)
        hidden.sum().backward()
        found.append((hidden.detach(), [each.grad for each in adapter.parameters()]))
    assert torch.equal(found[0][0], found[1][0])
    for kept, again in zip(found[0][1], found[1][1], strict=True):
        assert kept is not None
        assert torch.equal(kept, again)


def hidden_of(model: Transformer, tokens: Tensor, adapter: Adapter, recompute: float) -> Tensor:
    rows = AdapterRows([(adapter, len(tokens))])
    attention = PackedAttention([len(tokens)])
    return model.hidden(tokens, torch.arange(len(tokens)), attention, rows, recompute=recompute)


def test_memory_of_a_pass_counts_what_is_computed_together() -> None:
    config = ModelConfig.of({"model_type": "llama", **LLAMA}, Path("config.json"))
    plain, narrow = (PassMemory.of(config, bytes_each=2, fp8=fp8) for fp8 in (False, True))
    assert narrow.kept - plain.kept == 2 * (64 + 32)
    assert narrow.needed([100], 2) > plain.needed([100], 2)


LLAMA = {
    "vocab_size": 70,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


# Refusals


def test_full_weights_are_refused(directory: Path) -> None:
    engine, whole = Engine(directory, fp8=True), Engine(directory)
    with pytest.raises(EngineError, match="train an adapter, or start the service with precision bfloat16"):
        engine.create_model("m", Trained.ALL)
    whole.create_model("m", Trained.ALL)
    with pytest.raises(EngineError, match="train an adapter"):
        engine.snapshot_from(whole.state("m"))
    engine.create_model("frozen", Trained.NOTHING)


def test_model_without_a_fitting_layer_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 60, "head_dim": 6, "intermediate_size": 100}
    checkpoint = make_checkpoint(tmp_path, "llama", **sizes)
    with pytest.raises(EngineError, match="widths are multiples of 16"):
        Engine(checkpoint, fp8=True)


def test_gpu_without_the_tensor_cores_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(EngineError, match=r"capability 8\.9 or higher.* NVIDIA A100 has 8\.0; use bfloat16"):
        check_fp8(device, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_fp8(device, torch.bfloat16)
    with pytest.raises(EngineError, match=r"bfloat16, and not in torch\.float32"):
        check_fp8(device, torch.float32)
