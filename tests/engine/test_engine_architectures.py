"""Every architecture beside transformers in float64, where a mistake has nothing to hide behind."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from packed_runs import Work, filled_adapter, hidden_of, logits_of, run
from safetensors.torch import load_file
from tiny_models import KINDS, make_checkpoint, random_tokens, reference

from trainmaster.engine.adapter_files import export_adapter, read_adapter
from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.architectures import FAMILIES, NESTED
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.logprobs import target_logprobs
from trainmaster.engine.model import Transformer
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import SampleRequest, SampleResult
from trainmaster.engine.weight_files import export_model

Checkpoints = Callable[[str], Path]
NEARLY = {"atol": 1e-9, "rtol": 1e-9}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """The checkpoint of a kind, made once."""
    root = tmp_path_factory.mktemp("checkpoints")
    return lambda kind: root / kind if (root / kind).exists() else make_checkpoint(root / kind, kind)


def load(directory: Path, dtype: torch.dtype = torch.float64) -> Transformer:
    return Transformer(ModelConfig.read(directory)).load(directory, dtype=dtype)


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Lets transformers' models compute in float64 where they say float32: in norms, angles and softmaxes."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def their_logits(model: Any, text: torch.Tensor) -> torch.Tensor:
    with in_double():
        logits: torch.Tensor = model(text[None], use_cache=False).logits[0]
    return logits


def test_every_architecture_is_tested() -> None:
    tested = {model_type for model_type, _ in KINDS.values()}
    tested |= {NESTED[model_type].language_model for model_type in tested & NESTED.keys()}
    # What is one family by two names has the config class of one.
    tested |= {name for name, family in FAMILIES.items() if any(family is FAMILIES.get(other) for other in tested)}
    assert tested == {*FAMILIES, *NESTED}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_float64_are_those_of_transformers(checkpoint: Checkpoints, kind: str) -> None:
    model, theirs = load(checkpoint(kind)), reference(checkpoint(kind), dtype=torch.float64)
    texts = [random_tokens(length, seed=length) for length in (40, 1, 7, 90)]
    for text, own in zip(texts, logits_of(model, texts), strict=True):
        torch.testing.assert_close(own, their_logits(theirs, text).detach(), **NEARLY)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_float64_are_those_of_transformers(checkpoint: Checkpoints, kind: str) -> None:
    """Of every weight, summed over the sequences of a pack."""
    model, theirs = load(checkpoint(kind)), reference(checkpoint(kind), dtype=torch.float64)
    model.requires_grad_(True)
    work = Work(None, (12, 30))
    hidden, _ = hidden_of(model, [work])
    targets = torch.cat([text[1:] for text in work.texts])
    target_logprobs(hidden, targets, model.unembedding, None, 16).sum().backward()
    for text in work.texts:
        logits = their_logits(theirs, text[:-1]).log_softmax(-1)
        logits.gather(1, text[1:, None]).sum().backward()
    expected = {name: each for name, each in theirs.named_parameters() if each.grad is not None}
    own = {their_name(model.config, name): each for name, each in model.named_parameters()}
    assert own.keys() == expected.keys()
    for name, parameter in own.items():
        scale = expected[name].grad.abs().max().item()
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=1e-6 * scale, rtol=1e-5, msg=name)


def their_name(config: ModelConfig, name: str) -> str:
    return config.nested.namings[0].theirs(name) if config.nested else name


FAMILY_KINDS = [
    "mistral",
    "phi3",
    "phi3_longrope",
    "olmo2",
    "smollm3_windowed",
    "granite",
    "glm4",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "deepseek_v2_groups",
    "deepseek_v3",
    "glm4_moe",
    "glm_moe_dsa",
    "kimi_k25",
]


def adapted(directory: Path, text: torch.Tensor, **options: Any) -> tuple[Transformer, Adapter, torch.Tensor]:
    """A model in float64 with an adapter, and the logits of both."""
    model = load(directory)
    adapter = filled_adapter(model.config, **options)
    (found,) = logits_of(model, [text], AdapterRows([(adapter, len(text))]))
    return model, adapter, found


@pytest.mark.parametrize("kind", FAMILY_KINDS)
def test_adapter_loads_in_peft_and_here(checkpoint: Checkpoints, tmp_path: Path, kind: str) -> None:
    import peft

    text = random_tokens(40)
    model, adapter, found = adapted(checkpoint(kind), text)
    export_adapter(adapter, checkpoint(kind), tmp_path)
    theirs = reference(checkpoint(kind), dtype=torch.float64)
    with warnings.catch_warnings():
        # A name that PEFT does not find would be a warning, no more.
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*(tie_word_embeddings|(rank|alpha)_pattern keys).*")
        wrapped = peft.PeftModel.from_pretrained(theirs, tmp_path, autocast_adapter_dtype=False)
    torch.testing.assert_close(found, their_logits(wrapped, text).detach(), **NEARLY)
    if model.config.mixture is None:  # PEFT keeps the experts of a layer in one factor
        named = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        assert named.keys() == load_file(tmp_path / "adapter_model.safetensors").keys()
    export_adapter(adapter, checkpoint(kind), tmp_path / "tinker", tinker_names=True)
    for directory in (tmp_path, tmp_path / "tinker"):
        again = dict(read_adapter(model.config, directory).named_parameters())
        assert all(torch.equal(again[name], each) for name, each in adapter.named_parameters())
    (plain,) = logits_of(model, [text])
    assert (plain - found).abs().max() > 0.1


@pytest.mark.parametrize("kind", FAMILY_KINDS)
def test_merged_model_loads_in_transformers_and_here(checkpoint: Checkpoints, tmp_path: Path, kind: str) -> None:
    text = random_tokens(40)
    model, adapter, found = adapted(checkpoint(kind), text)
    export_model(model, model.config, adapter, checkpoint(kind), tmp_path, trained=False)
    # Weights are merged in float32.
    near = {"atol": 2e-4, "rtol": 2e-4}
    torch.testing.assert_close(their_logits(reference(tmp_path, dtype=torch.float64), text).detach(), found, **near)
    torch.testing.assert_close(logits_of(load(tmp_path), [text])[0], found, **near)


@pytest.mark.parametrize("kind", FAMILY_KINDS)
def test_sampling_and_training_agree_and_no_adapter_knows_of_another(checkpoint: Checkpoints, kind: str) -> None:
    model = load(checkpoint(kind), torch.float32)
    adapters = [filled_adapter(model.config, seed=seed, rank=rank) for seed, rank in ((1, 3), (2, 8))]
    works = [Work(adapters[0], (21, 3)), Work(None, (5,)), Work(adapters[1], (100, 1))]
    together = run(model, works)
    for work, outcome in zip(works, together, strict=True):
        assert outcome.equals(run(model, [work])[0])
    sampler = Sampler(model, checkpoint(kind), context_length=200)
    prompts = {str(length): tuple(random_tokens(length, seed=7).tolist()) for length in (3, 40, 130)}
    for name, prompt in prompts.items():
        snapshot = WeightsSnapshot(transformer=model, adapter=adapters[int(name) % 2])
        asked = SampleRequest(request_id=name, prompt=prompt, max_tokens=30, seed=1, prompt_logprobs=True)
        sampler.submit(asked, snapshot)
    results: dict[str, Any] = {}
    while sampler.pending:
        results |= dict(sampler.step())
    for name, prompt in prompts.items():
        result = results[name]
        assert isinstance(result, SampleResult)
        assert result.prompt_logprobs is not None
        tokens = torch.tensor([*prompt, *result.sequences[0].tokens.tolist()])
        rows = AdapterRows([(adapters[int(name) % 2], len(tokens) - 1)])
        with torch.no_grad():
            hidden = model.hidden(tokens[:-1], torch.arange(len(tokens) - 1), PackedAttention([len(tokens) - 1]), rows)
            truth = target_logprobs(hidden, tokens[1:], model.unembedding, rows).numpy()
        difference = np.abs(truth - np.concatenate([result.prompt_logprobs[1:], result.sequences[0].logprobs]))
        assert difference.mean() < 1e-7
        assert difference.max() < 1e-5


def test_longrope_ends_where_its_angles_would_change(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """transformers turns all tokens of a longer sequence by the long factors, and only those of a longer one."""
    config = ModelConfig.read(checkpoint("phi3_longrope"))
    assert config.max_positions == 200
    raw = json.loads((checkpoint("phi3_longrope") / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    older = {"type": "su", **{name: scaling[name] for name in ("short_factor", "long_factor")}}
    raw |= {"rope_scaling": older, "rope_theta": 500.0, "partial_rotary_factor": 0.75}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.read(tmp_path) == config
