"""Latent keys and values: widths in the cache and in kernels, choices of experts, and configs that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from packed_runs import Work, filled_adapter, logits_of, run
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, random_tokens

from trainmaster.engine import attention
from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.architectures.mixtures import ExpertGroups, Mixture, Scores
from trainmaster.engine.attention import PackedAttention, Scoring
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.memory import PassMemory
from trainmaster.engine.mixture import Router
from trainmaster.engine.model import Transformer
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.types import EngineError
from trainmaster.engine.weight_files import export_model

TEXT = random_tokens(30)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "deepseek_v3")


def load(directory: Path, dtype: torch.dtype = torch.float64) -> Transformer:
    return Transformer(ModelConfig.read(directory)).load(directory, dtype=dtype)


def changed(directory: Path, target: Path, **values: Any) -> Path:
    raw = json.loads((directory / "config.json").read_text())
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(raw | values))
    return target


def test_cache_has_keys_and_values_of_their_own_widths(directory: Path) -> None:
    model = load(directory, torch.float32)
    config = model.config
    assert (config.key_width, config.value_width, config.head_dim) == (24, 12, 8)
    sampler = Sampler(model, directory, cache_bytes=1 << 20)
    cache = sampler._requests.cache
    assert (cache.keys.shape[-2:], cache.values.shape[-2:]) == ((4, 24), (4, 12))
    page = cache.keys[:, :1].nbytes + cache.values[:, :1].nbytes
    assert cache.pages == (1 << 20) // page


def test_kernels_of_one_width_get_values_as_wide_as_keys(directory: Path) -> None:
    """As on GPUs: what is added is zero, and no gradient knows of it."""
    model = load(directory, torch.float32)
    works = [Work(filled_adapter(model.config), (21, 3)), Work(None, (5,))]
    alone = run(model, works)
    widths = set()

    def kernel(query: Any, key: Any, value: Any, ends: Any, _: Any, longest: int, scoring: Scoring) -> torch.Tensor:
        widths.add((query.shape[2], key.shape[2], value.shape[2], longest))
        with mock.patch.object(attention, "varlen_fits", return_value=False):
            return PackedAttention(ends.diff().tolist())(0, query, key, value, scoring)

    with (
        mock.patch.object(attention, "varlen_fits", return_value=True),
        mock.patch.object(attention, "has_flash_attention", return_value=False),
        mock.patch.object(attention, "varlen_attention", kernel),
    ):
        together = run(model, works)
    assert widths == {(24, 24, 24, 21)}
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)
        for grad, its in zip(one.gradients, other.gradients, strict=True):
            torch.testing.assert_close(grad, its, atol=1e-4, rtol=1e-3)


def test_memory_counts_widths_of_keys_and_values(directory: Path) -> None:
    config = ModelConfig.read(directory)
    assert config.latent is not None
    wider = replace(config, latent=replace(config.latent, value_width=1024))
    each = [PassMemory.of(known, bytes_each=2).kept for known in (config, wider)]
    # Values, and what is attended to.
    assert each[1] - each[0] == 2 * 2 * 4 * (1024 - 12)


def test_router_chooses_within_the_best_groups_by_corrected_scores_and_weighs_by_plain_ones() -> None:
    mixture = Mixture(
        layers=(True,),
        experts=6,
        chosen=2,
        width=1,
        scores=Scores.SIGMOID,
        corrected=True,
        groups=ExpertGroups(count=3, chosen=1, best=2),
        scale=2.5,
        exact=True,
    )
    router = Router(mixture, 6)
    with torch.no_grad():
        router.weight.copy_(torch.eye(6))
        router.e_score_correction_bias.copy_(torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3, 0.3]))
    chosen, weights = router(torch.tensor([[4.0, -4.0, 0.0, 0.1, 0.0, 0.5]]))
    # The best expert of all is in a group whose other one is poor.
    assert sorted(chosen[0].tolist()) == [4, 5]
    by_expert = dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))
    scores = torch.tensor([0.0, 0.5], dtype=torch.float64).sigmoid()
    assert by_expert[4] == pytest.approx((2.5 * scores / scores.sum())[0].item(), rel=1e-6)


def test_numbers_that_balance_experts_keep_their_bits_and_stay_in_exports(directory: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored = load_file(directory / "model.safetensors")[name]
    assert stored.std() > 0.1
    model = load(directory, torch.bfloat16)
    assert model.get_buffer(name).dtype == torch.float32
    assert torch.equal(model.get_buffer(name), stored)
    assert name not in dict(model.named_parameters())
    export_model(model, model.config, filled_adapter(model.config), directory, tmp_path, trained=False)
    assert torch.equal(load_file(tmp_path / "model.safetensors")[name], stored)


def test_config_as_deepseek_publishes_it_is_read_as_that_of_transformers(directory: Path, tmp_path: Path) -> None:
    raw = json.loads((directory / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    for name in ("rope_interleave", "head_dim", "qk_head_dim", "num_local_experts"):
        raw.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.read(tmp_path) == ModelConfig.read(directory)


def test_ranks_that_files_leave_out_are_those_of_the_configuration_class(directory: Path, tmp_path: Path) -> None:
    from transformers import DeepseekV3Config

    raw, theirs = json.loads((directory / "config.json").read_text()), DeepseekV3Config()
    for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        del raw[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    latent = ModelConfig.read(tmp_path).latent
    assert latent is not None
    assert (latent.query_rank, latent.rank) == (theirs.q_lora_rank, theirs.kv_lora_rank)
    widths = (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim)
    assert (latent.plain_width, latent.turned_width, latent.value_width) == widths


def test_weights_that_lie_together_compute_the_same_where_some_have_biases(tmp_path: Path) -> None:
    """As on GPUs."""
    model = load(make_checkpoint(tmp_path, "deepseek_v3_ungrouped", attention_bias=True))
    (expected,) = logits_of(model, [TEXT])
    model.lay_weights_together()
    torch.testing.assert_close(logits_of(model, [TEXT])[0], expected, atol=1e-9, rtol=1e-9)


def test_kimi_k2_is_a_deepseek_v3_by_another_name(directory: Path, tmp_path: Path) -> None:
    other = ModelConfig.read(changed(directory, tmp_path, model_type="kimi_k2"))
    assert replace(other, model_type="deepseek_v3") == ModelConfig.read(directory)


def test_kimi_as_it_is_published_is_read_and_exported_by_its_names(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "modules", "kimi_k25", tie_word_embeddings=False)
    model = load(directory)
    (expected,) = logits_of(model, [TEXT])
    weights = load_file(directory / "model.safetensors")
    published = {
        name.replace("model.language_model.", "language_model.model.")
        .replace("lm_head.", "language_model.lm_head.")
        .replace("model.vision_tower.", "vision_tower.")
        .replace("model.mm_projector.", "mm_projector."): weight
        for name, weight in weights.items()
    }
    raw = json.loads((directory / "config.json").read_text())
    raw["text_config"]["model_type"] = "kimi_k2"
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(published, directory / "model.safetensors", metadata={"format": "pt"})
    again = load(directory)
    assert torch.equal(logits_of(again, [TEXT])[0], expected)
    adapter = filled_adapter(again.config)
    export_model(again, again.config, adapter, directory, tmp_path / "merged", trained=False)
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == published.keys()
    (adapted,) = logits_of(again, [TEXT], AdapterRows([(adapter, len(TEXT))]))
    torch.testing.assert_close(logits_of(load(tmp_path / "merged"), [TEXT])[0], adapted, atol=2e-4, rtol=2e-4)


def test_layers_that_predict_several_tokens_and_indexers_stay_in_exports(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "base", "glm_moe_dsa")
    file = directory / "model.safetensors"
    extra = {"model.layers.3.eh_proj.weight": torch.randn(4, 4)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    model = load(directory)
    export_model(model, model.config, filled_adapter(model.config), directory, tmp_path / "merged", trained=False)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == load_file(file).keys()
    assert any(".indexer." in name for name in merged)


def test_length_ends_where_an_indexer_would_leave_tokens_out(tmp_path: Path) -> None:
    config = ModelConfig.read(make_checkpoint(tmp_path, "glm_moe_dsa"))
    assert config.max_positions == 400


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"n_group": 3}, "8 experts are not 3 groups"),
        ({"topk_group": 5}, "of which 5 can be chosen"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', not sigmoid"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', not noaux_tc"),
        ({"q_lora_rank": 0}, "q_lora_rank is 0, not a positive number"),
    ],
)
def test_values_that_are_not_known_are_refused(
    directory: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        ModelConfig.read(changed(directory, tmp_path, **values))


def test_latent_attention_may_have_weights_of_8_bits(tmp_path: Path) -> None:
    widths = {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    directory = make_checkpoint(tmp_path, "deepseek_v3", attention_bias=False, **widths)
    plain = load(directory, torch.float32)
    quantized = Transformer(plain.config).load(directory, fp8=True)
    adapted = {name.rpartition(".")[0] for name in quantized.wide_weights if ".0.self_attn." in name}
    names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert adapted == {f"model.layers.0.self_attn.{name}" for name in names}
    (expected,), (found,) = logits_of(plain, [TEXT]), logits_of(quantized, [TEXT])
    assert 0 < (found - expected).norm() < 0.2 * expected.norm()
