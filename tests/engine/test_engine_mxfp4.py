"""GPT-OSS as it is published: experts of 4 bits, which are read as 16 bits and exported so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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

TEXT = random_tokens(30)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "gpt_oss")


@pytest.fixture
def quantized(plain: Path, tmp_path: Path) -> Path:
    """The same with random experts of 4 bits."""
    directory = shutil.copytree(plain, tmp_path / "quantized")
    generator = torch.Generator().manual_seed(0)
    weights = load_file(directory / "model.safetensors")
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        size = (experts, outputs, inputs // 32)
        weights[f"{name}_blocks"] = torch.randint(256, (*size, 16), generator=generator).to(torch.uint8)
        weights[f"{name}_scales"] = torch.randint(120, 128, size, generator=generator).to(torch.uint8)
    save_file(weights, directory / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def load(directory: Path) -> Transformer:
    return Transformer(ModelConfig.read(directory)).load(directory)


def test_experts_are_those_that_transformers_reads(quantized: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    unpacked: Any = convert_moe_packed_tensors
    weights, found = load_file(quantized / "model.safetensors"), dict(load(quantized).named_parameters())
    for layer in range(3):
        for product in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{product}"
            expected = unpacked(weights[f"{name}_blocks"], weights[f"{name}_scales"]).float()
            assert torch.equal(found[name], expected)
            assert expected.std() > 0.1


def test_merged_model_has_16_bits_and_loads_in_transformers(quantized: Path, tmp_path: Path) -> None:
    model = load(quantized)
    adapter = filled_adapter(model.config)
    (expected,) = logits_of(model, [TEXT], AdapterRows([(adapter, len(TEXT))]))
    export_model(model, model.config, adapter, quantized, tmp_path / "merged", trained=False)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert weights["model.layers.0.mlp.experts.down_proj"].dtype == torch.bfloat16
    with torch.no_grad():
        found = reference(tmp_path / "merged")(TEXT[None]).logits[0]
    # Experts are rounded to 16 bits after the merge.
    assert (found - expected).abs().mean() < 0.05 < (found - logits_of(model, [TEXT])[0]).abs().mean()
    torch.testing.assert_close(logits_of(load(tmp_path / "merged"), [TEXT])[0], found, atol=1e-4, rtol=1e-4)


def test_other_quantizations_are_refused(plain: Path, tmp_path: Path) -> None:
    raw = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(EngineError, match="quantized"):
        ModelConfig.read(tmp_path)


def test_rope_of_files_that_say_nothing_about_it_is_that_of_the_configuration_class(
    plain: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    raw = json.loads((plain / "config.json").read_text())
    del raw["rope_parameters"], raw["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (rope,) = set(ModelConfig.read(tmp_path).ropes)
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    assert rope is not None
    said = theirs.rope_parameters
    assert (rope.theta, rope.kind, rope.factor) == (said["rope_theta"], "yarn", said["factor"])
    assert (rope.original_positions, rope.whole_pairs) == (4096, False)
    assert ModelConfig.read(tmp_path).windows == (20, None, 20)
    assert theirs.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
