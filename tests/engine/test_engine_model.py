"""Models from transformers checkpoints: the same numbers as transformers, alone and in packs, or a refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_runs import Work, filled_adapter, hidden_of, logits_of, run
from tiny_models import KINDS, make_checkpoint, random_tokens, reference

from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.logprobs import target_logprobs
from trainmaster.engine.model import Transformer
from trainmaster.engine.ropes import Rope
from trainmaster.engine.types import EngineError

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The checkpoint of a kind, made once."""
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda kind: root / kind if (root / kind).exists() else make_checkpoint(root / kind, kind)


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    return Transformer(ModelConfig.read(directory)).load(directory, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_alone_and_in_a_pack(checkpoint: Checkpoints, kind: str) -> None:
    model, theirs = load(checkpoint(kind)), reference(checkpoint(kind))
    texts = [random_tokens(length, seed=length) for length in (40, 1, 7, 90)]
    packed = logits_of(model, texts)
    for text, together in zip(texts, packed, strict=True):
        (alone,) = logits_of(model, [text])
        with torch.no_grad():
            expected = theirs(text[None]).logits[0]
        # Processors round differently: float32 sums of some models come to 1.1e-5 on some of them, and those of
        # recurrent states, where each row depends on all before, to 1e-4.
        near = 5e-5 if model.config.linear is None else 5e-4
        torch.testing.assert_close(alone, expected, atol=near, rtol=near)
        torch.testing.assert_close(together, expected, atol=near, rtol=near)
        assert expected.std() > 0.5, "numbers so small would hide mistakes"


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gemma3_text"])
def test_positions_may_begin_anywhere(checkpoint: Checkpoints, kind: str) -> None:
    """Only differences of positions count, but rounded angles do not quite say so."""
    model, text = load(checkpoint(kind)), random_tokens(20)
    shifted, plain = (model.hidden(text, torch.arange(20) + start, PackedAttention([20])) for start in (100, 0))
    torch.testing.assert_close(shifted, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "gemma2"])
def test_full_gradients_are_those_of_transformers(checkpoint: Checkpoints, kind: str) -> None:
    """Of every weight; a tied one gets its part from both ends."""
    model, theirs = load(checkpoint(kind)), reference(checkpoint(kind))
    model.requires_grad_(True)
    work = Work(None, (12, 30))
    hidden, _ = hidden_of(model, [work])
    targets = torch.cat([text[1:] for text in work.texts])
    target_logprobs(hidden, targets, model.unembedding, None, 16).sum().backward()
    for text in work.texts:
        logits = theirs(text[None, :-1]).logits[0].log_softmax(-1)
        logits.gather(1, text[1:, None]).sum().backward()
    expected = dict(theirs.named_parameters())
    own = dict(model.named_parameters())
    assert own.keys() == expected.keys()
    assert ("lm_head.weight" in own) == (not model.config.tied)
    for name, parameter in own.items():
        assert parameter.grad is not None, name
        scale = expected[name].grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-5 * scale, rtol=1e-4, msg=name)


def test_base_is_frozen_and_keeps_no_gradient(checkpoint: Checkpoints) -> None:
    model = load(checkpoint("qwen3"))
    (outcome,) = run(model, [Work(filled_adapter(model.config), (20,))])
    assert all(each.abs().sum() > 0 for each in outcome.gradients)
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())


def test_recomputing_keeps_less_and_gives_the_same_gradients(checkpoint: Checkpoints) -> None:
    model = load(checkpoint("qwen3"))
    work = [Work(filled_adapter(model.config), (200,))]
    kept, outcomes = [], []
    for recompute in (False, True):
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden, _ = hidden_of(model, work, recompute=recompute)
        kept.append(sum(sizes.values()))
        outcomes += run(model, work, recompute=recompute)
        del hidden
    assert kept[1] < kept[0] / 3
    assert outcomes[0].equals(outcomes[1])


def test_bfloat16_stays_near_transformers(checkpoint: Checkpoints) -> None:
    model, theirs = load(checkpoint("qwen3"), torch.bfloat16), reference(checkpoint("qwen3"), dtype=torch.bfloat16)
    text = random_tokens(30)
    (logits,) = logits_of(model, [text])
    with torch.no_grad():
        expected = theirs(text[None]).logits[0].float()
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().mean() < 0.02


def test_shards_give_what_one_file_gives(checkpoint: Checkpoints, tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path / "sharded", "gemma2", shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    one, many = load(checkpoint("gemma2")), load(sharded)
    for (name, expected), (other, found) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(expected, found)


def test_weights_do_not_change_with_their_file(checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("qwen3"), tmp_path / "copy")
    model = load(directory)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with (directory / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * (directory / "model.safetensors").stat().st_size)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


OLD_FILES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama3": (
        "llama3",
        {
            "rope_theta": 500.0,
            "rope_scaling": {
                "type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        ("rope_parameters",),
    ),
    "yarn": (
        "qwen3_yarn",
        {
            "rope_theta": 500.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            # As files say whose users added the scaling.
            "max_position_embeddings": 128,
        },
        ("rope_parameters",),
    ),
    "qwen2": ("qwen2_windowed", {"rope_theta": 10000.0}, ("rope_parameters", "layer_types")),
    "gemma": ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, ("rope_parameters", "tie_word_embeddings")),
    "gemma2": ("gemma2", {}, ("rope_parameters", "layer_types", "rms_norm_eps", "hidden_activation")),
    "gemma3": (
        "gemma3_text",
        {
            "rope_theta": 900.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_local_base_freq": 50.0,
            "sliding_window_pattern": 2,
            "layer_types": None,
        },
        ("rope_parameters", "final_logit_softcapping"),
    ),
}


@pytest.mark.parametrize("name", OLD_FILES)
def test_configuration_in_the_older_form_means_the_same(checkpoint: Checkpoints, tmp_path: Path, name: str) -> None:
    kind, changes, dropped = OLD_FILES[name]
    current = ModelConfig.read(checkpoint(kind))
    raw = json.loads((checkpoint(kind) / "config.json").read_text())
    raw = {key: value for key, value in (raw | changes).items() if key not in dropped}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.read(tmp_path) == current


def test_gemma_defaults_are_those_of_its_configuration_class(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 7,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", **sizes}))
    gemma2 = ModelConfig.read(tmp_path)
    assert (gemma2.attention_softcap, gemma2.logit_softcap, gemma2.attention_scale) == (50.0, 30.0, 1 / 16)
    assert gemma2.windows == (4096, None, 4096, None, 4096, None, 4096)
    assert gemma2.head_dim == 256
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text", **sizes}))
    gemma3 = ModelConfig.read(tmp_path)
    assert gemma3.windows == (4096, 4096, 4096, 4096, 4096, None, 4096)
    assert gemma3.ropes[4:6] == (Rope(theta=1e4), Rope(theta=1e6))
    assert (gemma3.attention_softcap, gemma3.logit_softcap, gemma3.tied) == (None, None, True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"model_type": "mamba"},
        "architecture 'mamba' is not among deepseek_v2, deepseek_v3",
    ),
    "no language model": ({"model_type": "gemma3"}, "no text_config"),
    "another language model": (
        {"model_type": "gemma3", "text_config": {"model_type": "llama"}},
        "its language model is of type 'llama', not 'gemma3_text'",
    ),
    "quantized outside": (
        {"model_type": "gemma3", "text_config": {}, "quantization_config": {"quant_method": "fp8"}},
        "quantized",
    ),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
    "rope": (
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
        "'proportional'; default, linear, dynamic, llama3, yarn and longrope are known",
    ),
    "rope the wrong way round": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 1, "beta_slow": 2}},
        r"the low-frequency bound \(2\) must be below the high-frequency bound \(1\)",
    ),
    "no factor": ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is None"),
    "partial rope": ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "layers": ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "'linear_attention'"),
    "some layers": ({"layer_types": ["full_attention"]}, "each of 3 layers"),
    "activation": ({"hidden_act": "relu"}, "activation 'relu'"),
    "both ways": ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "no size": ({"hidden_size": None}, "hidden_size is None"),
    "half a layer": ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
    "negative": ({"vocab_size": -5}, "vocab_size is -5"),
    "heads": ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(checkpoint: Checkpoints, tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    raw = json.loads((checkpoint("qwen3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(EngineError, match=message):
        ModelConfig.read(tmp_path)


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no config\.json"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match="cannot be read"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(EngineError, match="not a JSON object"):
        ModelConfig.read(tmp_path)


def test_weights_that_do_not_fit_are_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = shutil.copytree(checkpoint("qwen3"), tmp_path / "copy")
    config, file = ModelConfig.read(directory), directory / "model.safetensors"
    weights = load_file(file)
    norm = "model.layers.1.self_attn.q_norm.weight"

    def refusal(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, file)
        with pytest.raises(EngineError) as refused:
            Transformer(config).load(directory)
        return str(refused.value)

    assert f"has no weight {norm}" in refusal({name: each for name, each in weights.items() if name != norm})
    assert "does not: model.extra.weight" in refusal({**weights, "model.extra.weight": torch.zeros(1)})
    assert f"{norm} is [3]" in refusal({**weights, norm: torch.zeros(3)})
    assert "int32" in refusal({**weights, norm: torch.zeros(16, dtype=torch.int32)})
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(EngineError, match="cannot be read"):
        Transformer(config).load(directory)
    file.unlink()
    with pytest.raises(EngineError, match="has no weights"):
        Transformer(config).load(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "lost.safetensors")}))
    with pytest.raises(EngineError, match=r"lost\.safetensors cannot be read"):
        Transformer(config).load(directory)
    index.write_text("{}")
    with pytest.raises(EngineError, match=r"index\.json cannot be read"):
        Transformer(config).load(directory)


def test_a_tied_checkpoint_may_have_the_unembedding_too(checkpoint: Checkpoints, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = shutil.copytree(checkpoint("qwen3"), tmp_path / "copy")
    weights = load_file(directory / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 0}, directory / "model.safetensors")
    model = load(directory)
    assert model.unembedding.weight is model.model.embed_tokens.weight
