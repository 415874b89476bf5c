"""Checkpoints of fewer than 16 bits: DeepSeek V3 as it is published (FP8), and Kimi K2 (4 bits in integers of 32)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from packed_runs import filled_adapter, logits_of
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, random_tokens, reference

from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.model import Transformer
from trainmaster.engine.types import EngineError
from trainmaster.engine.weight_files import export_model

Tensors = dict[str, torch.Tensor]
TEXT = random_tokens(30)
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
GROUP: dict[str, Any] = {"type": "int", "num_bits": 4, "group_size": 32, "symmetric": True, "strategy": "group"}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": GROUP, "targets": ["Linear"], "input_activations": None}},
}


def fp8(name: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    scales = torch.zeros(-(-rows // 128), -(-columns // 128))
    numbers = torch.zeros_like(weight)
    for row, column in torch.cartesian_prod(*(torch.arange(size) for size in scales.shape)).tolist():
        block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
        scales[row, column] = weight[block].abs().max() / 448
        numbers[block] = weight[block] / scales[row, column]
    return {name: numbers.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def int4(name: str, weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, 32)
    scales = grouped.abs().amax(-1, keepdim=True) / 7
    numbers = ((grouped / scales).round().clamp(-8, 7) + 8).to(torch.int64).view(rows, columns // 8, 8)
    packed = (numbers << torch.arange(0, 32, 4)).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    scale = scales.squeeze(-1).to(torch.bfloat16)
    return {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": torch.tensor(weight.shape)}


def quantized(directory: Path, quantize: Callable[[str, torch.Tensor], Tensors], config: dict[str, Any]) -> Path:
    """A checkpoint, in place, with the products of its layers quantized."""
    weights: Tensors = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        is_product = name.endswith("_proj.weight") and ".layers." in name and weight.shape[1] % 32 == 0
        is_product = is_product and "vision_tower" not in name
        weights |= quantize(name, weight) if is_product else {name: weight}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    raw.get("text_config", raw)["quantization_config"] = config
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


FORMS = {
    "fp8": ("deepseek_v3", fp8, FP8, {"intermediate_size": 384, "moe_intermediate_size": 160, "hidden_size": 256}),
    "int4": ("deepseek_v3", int4, INT4, {"intermediate_size": 160, "kv_lora_rank": 32}),
    "int4 of a language model": ("kimi_k25", int4, INT4, {}),
}


@pytest.fixture(params=FORMS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in 32 bits, and the same quantized."""
    kind, quantize, config, changes = FORMS[request.param]
    plain = make_checkpoint(tmp_path / "plain", kind, **changes)
    return plain, quantized(shutil.copytree(plain, tmp_path / "quantized"), quantize, config)


def load(directory: Path) -> Transformer:
    return Transformer(ModelConfig.read(directory)).load(directory)


def test_weights_are_those_before_up_to_the_steps_of_a_form(case: tuple[Path, Path]) -> None:
    plain, quantized = (dict(load(directory).named_parameters()) for directory in case)
    changed = {name for name, weight in plain.items() if not torch.equal(weight, quantized[name])}
    assert {"model.layers.0.mlp.gate_proj.weight", "model.layers.1.self_attn.q_a_proj.weight"} <= changed
    assert all("proj" in name for name in changed)
    for name in changed:
        difference = (plain[name] - quantized[name]).abs().max()
        assert 0 < difference < 0.1 * plain[name].abs().max(), name


def test_merged_model_has_16_bits_and_loads_in_transformers(case: tuple[Path, Path], tmp_path: Path) -> None:
    _, directory = case
    model = load(directory)
    adapter = filled_adapter(model.config)
    (expected,) = logits_of(model, [TEXT], AdapterRows([(adapter, len(TEXT))]))
    export_model(model, model.config, adapter, directory, tmp_path / "merged", trained=False)
    assert "quantization_config" not in (tmp_path / "merged" / "config.json").read_text()
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert not [name for name in weights if name.endswith(("_scale_inv", "_packed", "_scale", "_shape"))]
    with torch.no_grad():
        found = reference(tmp_path / "merged")(TEXT[None]).logits[0]
    # Products are rounded to 16 bits after the merge.
    assert (found - expected).abs().mean() < 0.1 < (found - logits_of(model, [TEXT])[0]).abs().mean()
    torch.testing.assert_close(logits_of(load(tmp_path / "merged"), [TEXT])[0], found, atol=1e-3, rtol=1e-3)


def test_fp8_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    kind, quantize, config, changes = FORMS["fp8"]
    directory = quantized(make_checkpoint(tmp_path, kind, **changes), quantize, config)
    weights, found = load_file(directory / "model.safetensors"), dict(load(directory).named_parameters())
    theirs: Any = Fp8Dequantize(mock.Mock())
    names = [name.removesuffix("_scale_inv") for name in weights if name.endswith("_scale_inv")]
    # It takes the blocks of the others for smaller ones, all of one size.
    own = [name for name in names if name in found and all(size % 128 == 0 or size < 128 for size in found[name].shape)]
    assert any(len(weights[f"{name}_scale_inv"]) == 3 for name in own)
    for name in own:
        expected = theirs._dequantize_one(weights[name], weights[f"{name}_scale_inv"], torch.bfloat16)
        assert torch.equal(found[name], expected.float())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**FP8, "weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\], not \[128, 128\]"),
        ({**INT4, "format": "int-quantized"}, "format is 'int-quantized', not 'pack-quantized'"),
        ({**INT4, "config_groups": {"g": {"weights": GROUP | {"num_bits": 8}}}}, "num_bits of g is 8, not 4"),
        ({**INT4, "config_groups": {"g": {"weights": GROUP, "input_activations": {"num_bits": 8}}}}, "inputs"),
        ({"quant_method": "gptq"}, "use the checkpoint in 16 or 32 bits"),
    ],
)
def test_quantizations_that_cannot_be_read_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    raw = json.loads((make_checkpoint(tmp_path, "deepseek_v3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    with pytest.raises(EngineError, match=message):
        ModelConfig.read(tmp_path)
