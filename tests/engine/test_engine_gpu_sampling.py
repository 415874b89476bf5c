"""Sampling by the steps of a GPU, with adapters in a stack, and the same logprobs as training; see `kernel_runs`.

On a GPU they are CUDA graphs; in the interpreter the same kernels run one by one, and tests have fewer sequences.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_runs import DEVICE, INTERPRETED, TYPES
from tiny_models import make_checkpoint, random_tokens

from trainmaster.engine import adapter_stack, graph_steps
from trainmaster.engine import sampler as sampler_module
from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.cache import BLOCK
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.continuations import StringWatch
from trainmaster.engine.kernels import adapter_products, cached_attention, token_choice
from trainmaster.engine.logprobs import target_logprobs
from trainmaster.engine.model import Transformer
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import EngineError, LoraOptions, SampledSequence, SampleRequest, SampleResult, StopReason

SIZES: dict[str, Any] = {"max_position_embeddings": 2048}
if not INTERPRETED:
    SIZES |= {"hidden_size": 256, "intermediate_size": 384, "initializer_range": 0.06}
NEW_TOKENS = 4 if INTERPRETED else 24
LENGTHS = (5, 48) if INTERPRETED else (5, 48, 300, 700)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 128}),
    "windows": ("gemma3_text", {"head_dim": 128, "sliding_window": 16}),
    "softcaps": ("gemma2", {"head_dim": 64, "sliding_window": 16}),
    "fused": ("phi3", {"num_key_value_heads": 2}),
    "interleaved": ("glm4", {"head_dim": 64}),
}
if INTERPRETED:  # with all that attention may have
    KINDS = {"softcaps": ("gemma2", {"sliding_window": 16})}
KINDS["qwen3"] = ("qwen3", {"head_dim": 24 if INTERPRETED else 64})
EXACT = 2e-4
"""The mean difference of logprobs that are computed in float32 in other shapes."""


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a GPU on the CPU, with few programs, that still share rows."""
    if INTERPRETED:
        monkeypatch.setattr(sampler_module, "_has_graphs", lambda _: True)
        monkeypatch.setattr(sampler_module, "PIECE", BLOCK)  # prompts share as small parts
        monkeypatch.setattr(cached_attention, "_PROGRAMS", 4)
        monkeypatch.setattr(adapter_products, "_PROGRAMS", 2)
        monkeypatch.setattr(token_choice, "_PIECE", 128)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def loaded(root: Path, kind: str, dtype: torch.dtype) -> Transformer:
    family, changes = KINDS[kind]
    directory = root / kind
    if not directory.exists():
        make_checkpoint(directory, family, **(SIZES | changes))
    return Transformer(ModelConfig.read(directory)).load(directory, DEVICE, dtype)


@pytest.fixture
def model(root: Path) -> Transformer:
    return loaded(root, "qwen3", torch.float32)


@pytest.fixture
def sampler(model: Transformer, root: Path) -> Iterator[Sampler]:
    """One whose pages are all given back in the end."""
    sampler = Sampler(model, root / "qwen3")
    yield sampler
    assert sampler.pending == 0
    sampler.step()
    assert sampler._requests.prompt_pages.free == sampler._requests.cache.pages


def trained_adapter(model: Transformer, seed: int, rank: int = 8, **options: Any) -> Adapter:
    adapter = Adapter(model.config, LoraOptions(rank=rank, seed=seed, **options), device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    with torch.no_grad():
        for factors in adapter.factors.values():
            factors.b.normal_(std=0.05, generator=generator)
    return adapter


def request(name: str = "it", length: int = 40, **fields: Any) -> SampleRequest:
    """Never stops by itself, unless `fields` say so."""
    prompt = tuple(random_tokens(length, 7).tolist())
    given: dict[str, Any] = {"prompt": prompt, "max_tokens": NEW_TOKENS, "seed": 1, "stop_tokens": ()}
    return SampleRequest(request_id=name, **(given | fields))


def run(sampler: Sampler) -> dict[str, SampleResult | EngineError]:
    ended: dict[str, SampleResult | EngineError] = {}
    while sampler.pending:
        ended.update(sampler.step())
    return ended


def sampled(sampler: Sampler, snapshot: WeightsSnapshot, **fields: Any) -> SampleResult:
    sampler.submit(request(**fields), snapshot)
    (result,) = run(sampler).values()
    assert isinstance(result, SampleResult)
    return result


def logprobs_in_training(
    model: Transformer, adapter: Adapter | None, prompt: Sequence[int], sequence: SampledSequence
) -> np.ndarray:
    tokens = torch.tensor([*prompt, *sequence.tokens.tolist()], device=DEVICE)
    rows = AdapterRows([(adapter, len(tokens) - 1)])
    with torch.no_grad():
        positions = torch.arange(len(tokens) - 1, device=DEVICE)
        hidden = model.hidden(tokens[:-1], positions, PackedAttention([len(tokens) - 1]), rows)
        found = target_logprobs(hidden, tokens[1:], model.unembedding, rows)
    return found[len(prompt) - 1 :].float().cpu().numpy()


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapter"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_training(root: Path, kind: str, dtype: torch.dtype, adapted: bool) -> None:
    model, exact = loaded(root, kind, dtype), loaded(root, kind, torch.float32)
    adapter = trained_adapter(model, 1) if adapted else None
    sampler = Sampler(model, root / kind)
    snapshot = WeightsSnapshot(transformer=model, adapter=adapter)
    asked = {f"{length}": request(f"{length}", length, num_samples=2) for length in LENGTHS}
    for each in asked.values():
        sampler.submit(each, snapshot)
    apart, rounded = [], []
    for name, result in run(sampler).items():
        assert isinstance(result, SampleResult)
        for sequence in result.sequences:
            trained = logprobs_in_training(model, adapter, asked[name].prompt, sequence)
            apart.append(np.abs(sequence.logprobs - trained))
            rounded.append(np.abs(trained - logprobs_in_training(exact, adapter, asked[name].prompt, sequence)))
    # In 16 bits, both are as far from each other as each is from what 32 bits would give.
    assert np.mean(apart) < EXACT + 1.5 * np.mean(rounded)


def test_adapters_of_all_kinds_are_sampled_from_together_as_alone(
    sampler: Sampler, model: Transformer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than a step takes."""
    monkeypatch.setattr(graph_steps, "MOST_ADAPTERS", 4 if INTERPRETED else 32)
    adapters = [
        None,
        trained_adapter(model, 1, rank=4),
        trained_adapter(model, 2, rank=100),
        trained_adapter(model, 3, rank=8),
        trained_adapter(model, 4, train_mlp=False),
        trained_adapter(model, 5, train_attn=False, train_unembed=False),
        *(trained_adapter(model, 6 + index) for index in range(0 if INTERPRETED else 40)),
    ]
    snapshots = {f"{index}": WeightsSnapshot(transformer=model, adapter=each) for index, each in enumerate(adapters)}
    together: dict[str, Any] = {}
    for name, snapshot in snapshots.items():  # they join while others run
        sampler.submit(request(name, 20 + int(name), temperature=0.0), snapshot)
        together.update(sampler.step())
    together.update(run(sampler))
    distinct = set()
    compared = list(snapshots.items())[: 4 if INTERPRETED else 8]
    for name, snapshot in compared:
        alone = sampled(Sampler(model, root / "qwen3"), snapshot, length=20 + int(name), temperature=0.0)
        assert together[name].sequences[0].tokens.tolist() == alone.sequences[0].tokens.tolist()
        assert np.allclose(together[name].sequences[0].logprobs, alone.sequences[0].logprobs, atol=1e-3)
        distinct.add(tuple(alone.sequences[0].tokens.tolist()))
    assert len(distinct) > len(compared) - 3
    assert len(together) == len(adapters)


def test_seed_gives_the_same_samples_again(sampler: Sampler, model: Transformer) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    rule = {"num_samples": 3, "length": 37, "temperature": 0.8} | ({} if INTERPRETED else {"top_p": 0.95, "top_k": 50})
    first, again = (sampled(sampler, snapshot, **rule) for _ in range(2))
    found = [each.tokens.tolist() for each in first.sequences]
    assert found == [each.tokens.tolist() for each in again.sequences]
    assert len({tuple(each) for each in found}) == 3
    other = sampled(sampler, snapshot, **(rule | {"seed": 2}))
    assert [each.tokens.tolist() for each in other.sequences] != found


def test_logprobs_may_be_those_of_the_rule(model: Transformer, root: Path) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    tempered = Sampler(model, root / "qwen3", tempered_logprobs=True)
    rule = {"top_k": 4, "temperature": 0.7, "max_tokens": NEW_TOKENS, "topk_sample_logprobs": 4}
    sequence = sampled(tempered, snapshot, **rule).sequences[0]
    assert sequence.topk is not None
    for token, logprob, ids, own in zip(sequence.tokens, sequence.logprobs, *sequence.topk, strict=True):
        weights = np.exp((own - own[0]) / 0.7)
        assert np.isclose(np.exp(logprob), (weights / weights.sum())[ids.tolist().index(token)], atol=1e-4)
    greedy = sampled(tempered, snapshot, temperature=0.0).sequences[0]
    assert not greedy.logprobs.any()


def test_stop_token_ends_a_continuation_and_no_other(sampler: Sampler, model: Transformer) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    free = sampled(sampler, snapshot, num_samples=4)
    stop = int(free.sequences[0].tokens[NEW_TOKENS // 2])
    stopped = sampled(sampler, snapshot, num_samples=4, stop_tokens=(stop,))
    for long, short in zip(free.sequences, stopped.sequences, strict=True):
        tokens = long.tokens.tolist()
        kept = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert short.tokens.tolist() == kept
        assert short.stop_reason is (StopReason.STOP if stop in tokens else StopReason.LENGTH)


def test_cancelled_requests_leave_the_others_as_they_are(sampler: Sampler, model: Transformer) -> None:
    snapshot, count = WeightsSnapshot(transformer=model), 5 if INTERPRETED else 30
    expected = sampled(sampler, snapshot, temperature=0.0)
    for index in range(count):
        sampler.submit(request(f"{index}", 30 + index, max_tokens=60), snapshot)
    sampler.submit(request("kept", temperature=0.0), snapshot)
    ended: dict[str, SampleResult | EngineError] = {}
    for step in range(count + 10):
        ended.update(sampler.step())
        assert sampler.cancel(f"{step}") == (step < count)
        if step == count - 3:
            sampler.submit(request("late", temperature=0.0), snapshot)
    ended.update(run(sampler))
    assert ended["late"].sequences[0].tokens.tolist() == expected.sequences[0].tokens.tolist()  # type: ignore[union-attr]


def test_cancelled_request_leaves_its_slot_to_one_that_waits(model: Transformer, root: Path) -> None:
    narrow = Sampler(model, root / "qwen3", max_sequences=2)
    for name in ("one", "two", "three"):
        narrow.submit(request(name, temperature=0.0), WeightsSnapshot(transformer=model))
    narrow.step()
    assert narrow.cancel("one")
    ended = run(narrow)
    assert [type(ended[name]) for name in ("two", "three")] == [SampleResult] * 2


def test_prompt_that_cannot_be_read_ends_no_other_request(
    sampler: Sampler, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    expected = sampled(sampler, snapshot, temperature=0.0)
    sampler.submit(request("running", temperature=0.0), snapshot)
    sampler.step()
    for name in ("failing", "waiting"):  # for what the other one reads
        sampler.submit(request(name, 100, temperature=0.0), snapshot)
    ended: dict[str, SampleResult | EngineError] = {}
    with monkeypatch.context() as patch:
        patch.setattr(graph_steps, "PromptAttention", failing)
        ended.update(sampler.step())
    ended.update(run(sampler))
    assert "out of memory" in str(ended["failing"])
    assert ended["running"].sequences[0].tokens.tolist() == expected.sequences[0].tokens.tolist()  # type: ignore[union-attr]
    alone = sampled(sampler, snapshot, length=100, temperature=0.0)
    assert ended["waiting"].sequences[0].tokens.tolist() == alone.sequences[0].tokens.tolist()  # type: ignore[union-attr]


def failing(*given: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


def test_stop_string_that_cannot_be_looked_for_ends_its_request_alone(
    sampler: Sampler, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    expected = sampled(sampler, snapshot, temperature=0.0)
    monkeypatch.setattr(StringWatch, "finds_with", failing)
    sampler.submit(request("watched", stop_strings=("never",)), snapshot)
    sampler.submit(request("sound", temperature=0.0), snapshot)
    ended = run(sampler)
    assert "out of memory" in str(ended["watched"])
    assert ended["sound"].sequences[0].tokens.tolist() == expected.sequences[0].tokens.tolist()  # type: ignore[union-attr]


def test_adapter_that_has_no_memory_leaves_its_place_empty(
    sampler: Sampler, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (WeightsSnapshot(transformer=model, adapter=trained_adapter(model, seed)) for seed in (1, 2))
    expected = sampled(sampler, first, temperature=0.0)
    (stack,) = sampler._steps._stacks.values()  # type: ignore[attr-defined]
    monkeypatch.setattr(stack, "places", 1)
    stack._owners, stack._used = stack._owners[:1], stack._used[:1]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_mul", failing)
        sampler.submit(request("second"), second)
        assert "out of memory" in str(run(sampler)["second"])
    again = sampled(sampler, first, temperature=0.0)
    assert np.allclose(again.sequences[0].logprobs, expected.sequences[0].logprobs, atol=1e-4)


@pytest.mark.parametrize("room", [0.0, float("inf")])
def test_higher_rank_keeps_other_adapters_only_where_there_is_room(
    sampler: Sampler, model: Transformer, monkeypatch: pytest.MonkeyPatch, room: float
) -> None:
    snapshots = [
        WeightsSnapshot(transformer=model, adapter=trained_adapter(model, seed, rank))
        for seed, rank in ((1, 8), (2, 32))
    ]
    monkeypatch.setattr(graph_steps, "_room_for_stack", lambda _: room)
    monkeypatch.setattr(adapter_stack, "_LEAST_PLACES", 1)
    expected = [sampled(sampler, snapshot, temperature=0.0) for snapshot in snapshots]
    (stack,) = sampler._steps._stacks.values()  # type: ignore[attr-defined]
    assert (stack.rank, stack.places) == (32, 2 if room else 1)
    taken = sum(group.a.nbytes + group.b.nbytes for group in stack._groups.values())
    assert taken == adapter_stack.AdapterStack.bytes_of(
        [each.adapter for each in snapshots][2 - stack.places :], model.dtype
    )
    again = [sampled(sampler, snapshot, temperature=0.0) for snapshot in snapshots]
    assert [each.sequences[0].tokens.tolist() for each in again] == [
        each.sequences[0].tokens.tolist() for each in expected
    ]


@pytest.mark.parametrize("fields", [{"top_k": 2**32 + 1}, {"temperature": 1e300}, {"top_p": 1e-50}], ids=str)
def test_options_beyond_32_bits_end_no_request(sampler: Sampler, model: Transformer, fields: dict[str, Any]) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    sampler.submit(request("odd", max_tokens=2, **fields), snapshot)
    sampler.submit(request("plain", max_tokens=2), snapshot)
    assert [type(each) for each in run(sampler).values()] == [SampleResult] * 2


@pytest.mark.parametrize("length", [1, 16, 32])
def test_prompts_of_one_token_and_of_whole_blocks_continue(
    sampler: Sampler, model: Transformer, root: Path, length: int
) -> None:
    asked = request(length=length, num_samples=2, max_tokens=3)
    sampler.submit(asked, WeightsSnapshot(transformer=model))
    (result,) = run(sampler).values()
    assert isinstance(result, SampleResult)
    for sequence in result.sequences:
        trained = logprobs_in_training(model, None, asked.prompt, sequence)
        assert np.allclose(sequence.logprobs, trained, atol=1e-3)


def test_requests_wait_for_room_and_all_end(model: Transformer, root: Path) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    expected = sampled(Sampler(model, root / "qwen3"), snapshot, temperature=0.0)
    page = 2 * len(model.model.layers) * 16 * 2 * model.config.head_dim * 4
    narrow = Sampler(model, root / "qwen3", cache_bytes=24 * page, max_sequences=5)
    count = 6 if INTERPRETED else 20
    for index in range(count):
        narrow.submit(request(f"{index}", num_samples=1 + index % 3, temperature=0.0), snapshot)
    ended = run(narrow)
    assert len(ended) == count
    for result in ended.values():
        assert isinstance(result, SampleResult)
        for sequence in result.sequences:
            assert sequence.tokens.tolist() == expected.sequences[0].tokens.tolist()


def test_prompts_are_scored(sampler: Sampler, model: Transformer) -> None:
    adapter = trained_adapter(model, 3)
    length = 60 if INTERPRETED else 600
    asked = request(length=length, prompt_logprobs=True, topk_prompt_logprobs=2, max_tokens=1, temperature=0.0)
    sampler.submit(asked, WeightsSnapshot(transformer=model, adapter=adapter))
    (result,) = run(sampler).values()
    assert isinstance(result, SampleResult)
    sequence = dataclasses.replace(result.sequences[0], tokens=np.array(asked.prompt[1:], np.int32))
    expected = logprobs_in_training(model, adapter, asked.prompt[:1], sequence)
    assert result.prompt_logprobs is not None
    assert np.isnan(result.prompt_logprobs[0])
    assert np.allclose(result.prompt_logprobs[1:], expected, atol=1e-3)
    assert result.topk_prompt_logprobs is not None
    assert (result.topk_prompt_logprobs[1][1:, 0] >= result.prompt_logprobs[1:] - 1e-3).all()


def test_request_for_no_tokens_ends(sampler: Sampler, model: Transformer) -> None:
    result = sampled(sampler, WeightsSnapshot(transformer=model), max_tokens=0, num_samples=2)
    assert [len(each.tokens) for each in result.sequences] == [0, 0]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no greatest of numbers that are all NaN")
def test_diverged_weights_are_an_error_of_their_own_requests(sampler: Sampler, model: Transformer) -> None:
    broken = trained_adapter(model, 1)
    next(iter(broken.factors.values())).b.data.fill_(float("nan"))
    snapshot = WeightsSnapshot(transformer=model)
    expected = sampled(sampler, snapshot, temperature=0.0)
    sampler.submit(request("broken"), WeightsSnapshot(transformer=model, adapter=broken))
    sampler.submit(request("sound", temperature=0.0), snapshot)
    ended = run(sampler)
    assert "diverged" in str(ended["broken"])
    assert ended["sound"].sequences[0].tokens.tolist() == expected.sequences[0].tokens.tolist()  # type: ignore[union-attr]


def test_other_weights_are_sampled_from_at_the_same_time_and_freed(
    sampler: Sampler, model: Transformer, root: Path
) -> None:
    other = loaded(root, "qwen3", torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    expected = [
        sampled(Sampler(each, root / "qwen3"), WeightsSnapshot(transformer=each), temperature=0.0)
        for each in (model, other)
    ]
    for name, each in (("model", model), ("other", other)):
        sampler.submit(request(name, temperature=0.0), WeightsSnapshot(transformer=each))
    ended = run(sampler)
    for name, alone in zip(("model", "other"), expected, strict=True):
        assert ended[name].sequences[0].tokens.tolist() == alone.sequences[0].tokens.tolist()  # type: ignore[union-attr]
    assert expected[0].sequences[0].tokens.tolist() != expected[1].sequences[0].tokens.tolist()
    decoders = sampler._steps._decoders  # type: ignore[attr-defined]
    assert len(decoders) == 2
    del other, each, name
    ended.clear()
    gc.collect()
    assert len(decoders) == 1
