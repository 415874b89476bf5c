"""Recurrent layers: the rule itself, states of running requests, and what checkpoints have beside the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from packed_runs import Work, filled_adapter, logits_of, run
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, random_tokens, reference

from trainmaster.engine import recurrences
from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.architectures.linear import LinearAttention
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.delta_rule import Past, RecurrentRows, convolve_and_recur
from trainmaster.engine.logprobs import target_logprobs
from trainmaster.engine.model import Transformer
from trainmaster.engine.recurrent_states import RecurrentStates
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import EngineError, SampleRequest, SampleResult
from trainmaster.engine.weight_files import export_model

SIZES = LinearAttention(layers=(True,), key_heads=2, value_heads=4, key_width=6, value_width=5, taps=4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_5_moe")


@pytest.fixture(scope="module")
def model(directory: Path) -> Transformer:
    return Transformer(ModelConfig.read(directory)).load(directory)


def drawn(length: int) -> tuple[RecurrentRows, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    mixed, decay, beta, taps = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((1, length, SIZES.mixed), (1, length, 4), (1, length, 4), (SIZES.mixed, 4))
    )
    return RecurrentRows(mixed, -decay.abs(), beta.sigmoid()), taps


def by_the_formula(given: RecurrentRows, taps: torch.Tensor) -> torch.Tensor:
    """Row by row and head by head."""
    mixed, decay, beta = (each[0] for each in given)
    padded = torch.cat([torch.zeros(3, SIZES.mixed, dtype=torch.float64), mixed])
    rows = torch.nn.functional.silu(torch.stack([(padded[t : t + 4].T * taps).sum(1) for t in range(len(mixed))]))
    outputs = torch.zeros(len(mixed), 4, 5, dtype=torch.float64)
    for head in range(4):
        state = torch.zeros(6, 5, dtype=torch.float64)
        for t in range(len(mixed)):
            query, key, value = rows[t].split([12, 12, 20])
            query, key = (each.view(2, 6)[head // 2] for each in (query, key))
            query, key = (each / (each.square().sum() + 1e-6).sqrt() for each in (query, key))
            state = state * decay[t, head].exp()
            state = state + torch.outer(key, beta[t, head] * (value.view(4, 5)[head] - key @ state))
            outputs[t, head] = query @ state / 6**0.5
    return outputs


@pytest.mark.parametrize("length", [1, 7, 64, 150])
def test_rule_is_that_of_the_formula_in_any_pieces(length: int) -> None:
    given, taps = drawn(length)
    expected = by_the_formula(given, taps)
    for cuts in ([length], [1] * min(length, 3) + [length - min(length, 3)], [length // 2, length - length // 2]):
        past, found, start = Past.none(SIZES, 1, torch.device("cpu"), torch.float64), [], 0
        for count in filter(None, cuts):
            piece = RecurrentRows(*(each[:, start : start + count] for each in given))
            outputs, past = convolve_and_recur(SIZES, piece, taps, past)
            found.append(outputs[0])
            start += count
        torch.testing.assert_close(torch.cat(found), expected, atol=1e-10, rtol=1e-10)


def asked(name: str, length: int, **fields: Any) -> SampleRequest:
    prompt = tuple(random_tokens(length, seed=length).tolist())
    given = {"max_tokens": 20, "seed": 3, "stop_tokens": (), "prompt_logprobs": True}
    return SampleRequest(request_id=name, prompt=prompt, **(given | fields))


def sampled(sampler: Sampler) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    while sampler.pending:
        ended |= dict(sampler.step())
    return ended


@pytest.mark.parametrize("at_once", [False, True])
def test_samples_of_long_prompts_have_the_logprobs_of_training(
    directory: Path, model: Transformer, at_once: bool
) -> None:
    """Several for each prompt, which is read in pieces; places are used again. As on the CPU, and as on GPUs."""
    adapter = filled_adapter(model.config, seed=1)
    snapshot = WeightsSnapshot(transformer=model, adapter=adapter)
    sampler = Sampler(model, directory, max_sequences=4)
    with mock.patch.object(recurrences, "_all_at_once", return_value=at_once):
        for round_number in range(2):
            for length in (1, 5, 300, 470):
                sampler.submit(asked(f"{round_number} {length}", length, num_samples=3), snapshot)
        sampler.submit(asked("cancelled", 40, num_samples=2), snapshot)
        sampler.step()
        sampler.cancel("cancelled")
        results = sampled(sampler)
    assert len(results) == 8
    for name, result in results.items():
        assert isinstance(result, SampleResult)
        assert result.prompt_logprobs is not None
        prompt = random_tokens(int(name.split()[1]), seed=int(name.split()[1]))
        assert len({tuple(each.tokens.tolist()) for each in result.sequences}) == 3
        for sequence in result.sequences:
            tokens = torch.cat([prompt, torch.from_numpy(sequence.tokens).long()])
            rows = AdapterRows([(adapter, len(tokens) - 1)])
            with torch.no_grad():
                attention = PackedAttention([len(tokens) - 1])
                hidden = model.hidden(tokens[:-1], torch.arange(len(tokens) - 1), attention, rows)
                truth = target_logprobs(hidden, tokens[1:], model.unembedding, rows).numpy()
            difference = np.abs(truth - np.concatenate([result.prompt_logprobs[1:], sequence.logprobs]))
            assert difference.mean() < 1e-7
            assert difference.max() < 1e-5


def test_sequences_computed_at_once_get_what_each_gets_alone(model: Transformer) -> None:
    """As on GPUs: shorter ones are padded, and neither outputs nor gradients know of it."""
    works = [Work(filled_adapter(model.config, seed=seed), lengths) for seed, lengths in ((1, (70, 3)), (2, (1, 130)))]
    alone = run(model, works)
    with mock.patch.object(recurrences, "_all_at_once", return_value=True):
        together = run(model, works)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)
        for grad, its in zip(one.gradients, other.gradients, strict=True):
            torch.testing.assert_close(grad, its, atol=1e-4, rtol=1e-3)


def test_states_are_given_out_with_pages_and_back() -> None:
    states = RecurrentStates(SIZES, torch.device("cpu"), torch.float64)
    prompt, own, other, later = "prompt", "own", "other", "later"
    first = states.place([prompt], 0)
    states.keep(0, [first], Past(torch.ones(1, 3, SIZES.mixed).double(), torch.ones(1, 4, 6, 5).double()))
    forked = [states.place([prompt, own], 4), states.place([other], 0)]
    assert len({first, *forked}) == 3
    assert states.past(0, forked).state[:, 0, 0, 0].tolist() == [1.0, 0.0]
    states.give_back(prompt)
    states.give_back(prompt)
    again = states.place([later], 0)
    assert again == first
    assert not states.past(0, [again]).state.any()
    assert states.bytes_each == 8 * (3 * SIZES.mixed + 4 * 6 * 5)


def test_weights_that_the_model_does_not_use_stay_in_its_exports(directory: Path, tmp_path: Path) -> None:
    """Such as those that predict several tokens."""
    file = tmp_path / "base" / "model.safetensors"
    file.parent.mkdir()
    for path in directory.iterdir():
        (file.parent / path.name).write_bytes(path.read_bytes())
    extra = {"mtp.fc.weight": torch.randn(4, 4)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    model = Transformer(ModelConfig.read(file.parent)).load(file.parent)
    adapter = filled_adapter(model.config)
    export_model(model, model.config, adapter, file.parent, tmp_path / "merged", trained=False)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert torch.equal(merged["mtp.fc.weight"], extra["mtp.fc.weight"])
    assert any(name.startswith("model.visual.") for name in merged)
    text = random_tokens(30)
    (expected,) = logits_of(model, [text], AdapterRows([(adapter, 30)]))
    with torch.no_grad():
        found = reference(tmp_path / "merged")(text[None]).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_heads_that_cannot_be_shared_evenly_are_refused(directory: Path, tmp_path: Path) -> None:
    raw = json.loads((directory / "config.json").read_text())
    raw["text_config"]["linear_num_value_heads"] = 3
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(EngineError, match="3 value heads cannot share 2 key heads evenly"):
        ModelConfig.read(tmp_path)
    del raw["text_config"]["layer_types"]
    raw["text_config"] |= {"linear_num_value_heads": 4, "full_attention_interval": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.read(tmp_path)
    assert config.attends == (False, True, False)
    assert [rope is None for rope in config.ropes] == [True, False, True]
