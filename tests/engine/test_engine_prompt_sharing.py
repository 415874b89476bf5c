"""Prompts that begin alike are computed once: at the same time, one after another, and within one snapshot only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_checkpoint, random_tokens

from trainmaster.engine.config import ModelConfig
from trainmaster.engine.continuations import PIECE
from trainmaster.engine.model import Transformer
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import SampleRequest, SampleResult

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LENGTH = 2 * PIECE + 40
PAGE_BYTES = 2 * 3 * 16 * 2 * 16 * 4
"""Of the tiny model: keys and values of 3 layers, 16 tokens, 2 heads of width 16, in float32."""


class Counting:
    """Counts the rows that a model computes."""

    def __init__(self, model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        hidden = model.hidden

        def counted(tokens: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
            self.rows += len(tokens)
            return hidden(tokens, *given, **more)

        monkeypatch.setattr(model, "hidden", counted)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(params=DEVICES)
def model(request: pytest.FixtureRequest, checkpoint: Path) -> Transformer:
    return Transformer(ModelConfig.read(checkpoint)).load(checkpoint, request.param)


@pytest.fixture
def sampler(model: Transformer, checkpoint: Path) -> Iterator[Sampler]:
    sampler = Sampler(model, checkpoint)
    yield sampler
    assert all_pages_are_free(sampler)


def all_pages_are_free(sampler: Sampler) -> bool:
    requests = sampler._requests
    kept = requests.prompt_pages.free
    requests.prompt_pages.free_up(requests.cache.pages)
    return kept == requests.cache.free == requests.cache.pages


def asked(name: str, *, length: int = LENGTH, other_from: int | None = None, **fields: Any) -> SampleRequest:
    prompt = random_tokens(length, 0).tolist()
    if other_from is not None:
        prompt[other_from:] = random_tokens(length - other_from, 1 + int(name)).tolist()
    given: dict[str, Any] = {"prompt": tuple(prompt), "max_tokens": 6, "temperature": 0.0, "stop_tokens": ()}
    return SampleRequest(request_id=name, **(given | fields))


def run(sampler: Sampler) -> dict[str, SampleResult]:
    ended: dict[str, Any] = {}
    while sampler.pending:
        ended.update(sampler.step())
    assert all(isinstance(result, SampleResult) for result in ended.values())
    return ended


def alone(model: Transformer, checkpoint: Path, request: SampleRequest) -> SampleResult:
    sampler = Sampler(model, checkpoint)
    sampler.submit(request, WeightsSnapshot(transformer=model))
    return run(sampler)[request.request_id]


def same(model: Transformer, one: SampleResult, other: SampleResult) -> bool:
    """To the last bit, on the CPU."""
    pairs = list(zip(one.sequences, other.sequences, strict=True))
    if model.device.type == "cpu":
        return all(np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs) for a, b in pairs)
    return all(np.array_equal(a.tokens, b.tokens) and np.allclose(a.logprobs, b.logprobs, atol=1e-3) for a, b in pairs)


def most_rows(prompts: int) -> int:
    """What is computed at most of so many prompts that share all but the last part: that part, tokens, spare rows."""
    return LENGTH + prompts * (LENGTH - 2 * PIECE) + 6 * max(16, prompts) + 16 * 8


def test_prompt_is_computed_once_for_requests_at_the_same_time(
    sampler: Sampler, model: Transformer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(model, checkpoint, asked("alone"))
    counting = Counting(model, monkeypatch)
    snapshot = WeightsSnapshot(transformer=model)
    for index in range(8):
        sampler.submit(asked(f"{index}"), snapshot)
    for result in run(sampler).values():
        assert same(model, result, expected)
    assert counting.rows <= most_rows(8)


def test_prompt_is_computed_once_for_requests_one_after_another(
    sampler: Sampler, model: Transformer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    sampler.submit(asked("first", num_samples=3), snapshot)
    run(sampler)
    later = asked("0", other_from=2 * PIECE + 7)
    expected = alone(model, checkpoint, later)
    counting = Counting(model, monkeypatch)
    sampler.submit(later, snapshot)
    assert same(model, run(sampler)["0"], expected)
    assert counting.rows < PIECE


def test_prompts_share_no_more_than_is_alike(sampler: Sampler, model: Transformer, checkpoint: Path) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    requests = [asked(f"{index}", other_from=30 * index) for index in range(12)]
    for request in requests:
        sampler.submit(request, snapshot)
    ended = run(sampler)
    for request in requests:
        assert same(model, ended[request.request_id], alone(model, checkpoint, request))


def test_other_weights_share_nothing(sampler: Sampler, model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler.submit(asked("first"), WeightsSnapshot(transformer=model))
    run(sampler)
    counting = Counting(model, monkeypatch)
    sampler.submit(asked("second"), WeightsSnapshot(transformer=model))
    run(sampler)
    assert counting.rows >= LENGTH


def test_scored_prompts_are_computed_whole(sampler: Sampler, model: Transformer, checkpoint: Path) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    for index in range(3):
        sampler.submit(asked(f"{index}", prompt_logprobs=True), snapshot)
    for result in run(sampler).values():
        assert result.prompt_logprobs is not None
        assert np.isfinite(result.prompt_logprobs[1:]).all()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_cancelled_request_leaves_its_part_to_those_that_wait(
    sampler: Sampler, model: Transformer, checkpoint: Path, steps: int
) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    for name in ("first", "second", "third"):
        sampler.submit(asked(name), snapshot)
    ended: dict[str, Any] = {}
    for _ in range(steps):
        ended.update(sampler.step())
    assert sampler.cancel("first")
    sampler.submit(asked("late"), snapshot)
    ended.update(run(sampler))
    expected = alone(model, checkpoint, asked("alone"))
    assert sorted(ended) == ["late", "second", "third"]
    assert all(same(model, result, expected) for result in ended.values())


def test_part_of_a_request_that_is_cancelled_unread_goes_to_a_longer_one(
    sampler: Sampler, model: Transformer, checkpoint: Path
) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    sampler.submit(asked("short", length=PIECE + 1), snapshot)
    sampler.submit(asked("long"), snapshot)
    sampler._requests.admit()
    assert sampler.cancel("short")
    expected = alone(model, checkpoint, asked("alone"))
    assert same(model, run(sampler)["long"], expected)
    sampler.submit(asked("again"), snapshot)
    assert same(model, run(sampler)["again"], expected)


def test_kept_parts_make_room_for_new_prompts(model: Transformer, checkpoint: Path) -> None:
    snapshot = WeightsSnapshot(transformer=model)
    narrow = Sampler(model, checkpoint, cache_bytes=80 * PAGE_BYTES)
    for index in range(6):
        request = asked(f"{index}", other_from=PIECE * (index % 3), num_samples=1 + index % 2)
        expected = alone(model, checkpoint, request)
        narrow.submit(request, snapshot)
        assert same(model, run(narrow)[f"{index}"], expected)
    requests = [asked(f"{index}", other_from=PIECE * (index % 3), num_samples=2) for index in range(9)]
    for request in requests:
        narrow.submit(request, snapshot)
    ended = run(narrow)
    assert all(same(model, ended[each.request_id], alone(model, checkpoint, each)) for each in requests)
    assert all_pages_are_free(narrow)
