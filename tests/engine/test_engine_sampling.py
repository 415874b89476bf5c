"""The choice of tokens from logits, and where a continuation ends."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from data_tokenizer import make_tokenizer
from trainmaster.engine.continuations import StringWatch, end_tokens, read_tokenizer
from trainmaster.engine.logprobs import Rule, choose, draws_of, likeliest, logprobs_of, tempered_logprobs_of
from trainmaster.engine.types import EngineError

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, float("-inf"), 0.5, -4.0])
DRAWS = 8_000


def shares(rule: Rule, logits: Tensor = LOGITS) -> np.ndarray:
    """How often each token is chosen when the draws are spread evenly."""
    draws = [(draw + 0.5) / DRAWS for draw in range(DRAWS)]
    chosen = choose(logits.expand(DRAWS, -1), [rule] * DRAWS, draws)
    return np.bincount(chosen.numpy(), minlength=logits.numel()) / DRAWS


def expected(logits: Tensor, temperature: float, kept: list[int]) -> np.ndarray:
    probabilities = (logits.double() / temperature).softmax(-1).numpy()
    mask = np.zeros_like(probabilities)
    mask[kept] = 1
    return probabilities * mask / (probabilities * mask).sum()


RULES = [
    (Rule(), 1.0, [0, 1, 2, 3, 5, 6]),
    (Rule(temperature=0.4), 0.4, [0, 1, 2, 3, 5, 6]),
    (Rule(temperature=5.0), 5.0, [0, 1, 2, 3, 5, 6]),
    (Rule(top_k=2), 1.0, [0, 3]),
    (Rule(top_k=3), 1.0, [0, 2, 3]),
    (Rule(top_k=100), 1.0, [0, 1, 2, 3, 5, 6]),
    # 3 has 0.64, 0 has 0.24: the token that passes the border is still in.
    (Rule(top_p=0.6), 1.0, [3]),
    (Rule(top_p=0.7), 1.0, [0, 3]),
    (Rule(top_p=1e-9), 1.0, [3]),
    # Of what the two likeliest have, 3 has 0.73.
    (Rule(top_k=2, top_p=0.7), 1.0, [3]),
    (Rule(top_k=2, top_p=0.75), 1.0, [0, 3]),
    # Hot enough, each has about a sixth.
    (Rule(temperature=1000.0, top_p=0.3), 1000.0, [0, 3]),
]
"""Rules, each with its temperature and the tokens that it leaves."""


@pytest.mark.parametrize(("rule", "temperature", "kept"), RULES)
def test_choose_draws_spread_evenly_gives_each_token_its_probability(
    rule: Rule, temperature: float, kept: list[int]
) -> None:
    assert shares(rule) == pytest.approx(expected(LOGITS, temperature, kept), abs=2 / DRAWS)


@pytest.mark.parametrize("rule", [Rule(temperature=0), Rule(top_k=1), Rule(temperature=1e-40), Rule(temperature=1e-3)])
def test_choose_greedy_or_nearly_so_takes_the_likeliest_token(rule: Rule) -> None:
    assert shares(rule)[3] == 1


def test_choose_the_largest_draw_never_gives_an_impossible_token() -> None:
    logits = torch.tensor([[0.0, 1.0, float("-inf"), float("-inf")]])
    for rule in (Rule(), Rule(top_k=3), Rule(top_p=0.999)):
        assert choose(logits, [rule], [np.nextafter(1, 0)]).item() in (0, 1)
        assert choose(logits.flip(1), [rule], [0.0]).item() in (2, 3)


def test_choose_rows_of_many_rules_are_chosen_as_each_would_be_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 300, generator=generator) * 3
    rules = [
        Rule(temperature=temperature, top_k=top_k, top_p=top_p)
        for temperature in (0.0, 0.7, 1.0, 2.0)
        for top_k, top_p in ((-1, 1.0), (5, 1.0), (0, 0.5), (40, 0.9), (1, 1.0))
    ] * 2
    draws = torch.rand(40, generator=generator, dtype=torch.float64).tolist()
    alone = [choose(logits[row : row + 1], [rules[row]], [draws[row]]).item() for row in range(40)]
    assert choose(logits, rules, draws).tolist() == alone
    assert len(set(alone)) > 10


def test_draws_follow_from_seed_and_sample_alone() -> None:
    def first(seed: int | None, index: int) -> list[float]:
        draw = draws_of(seed, index)
        return [draw() for _ in range(3)]

    assert first(7, 0) == first(7, 0)
    streams = [first(seed, index) for seed in (0, 7, -7, 2**64 - 1, 2**70 + 5) for index in (0, 1)]
    streams += [first(None, 0), first(None, 0)]
    assert len({tuple(stream) for stream in streams}) == len(streams)
    assert all(0 <= draw < 1 for stream in streams for draw in stream)


@pytest.mark.parametrize(("rule", "temperature", "kept"), RULES)
def test_tempered_logprobs_are_of_what_was_drawn_from(rule: Rule, temperature: float, kept: list[int]) -> None:
    tokens = torch.tensor(kept)
    found = tempered_logprobs_of(LOGITS.expand(len(kept), -1), [rule] * len(kept), tokens)
    np.testing.assert_allclose(found.exp().numpy(), expected(LOGITS, temperature, kept)[kept], rtol=1e-5)


def test_tempered_logprob_of_a_greedy_choice_is_certain_and_of_nan_is_nan() -> None:
    logits = torch.stack([LOGITS, torch.full_like(LOGITS, float("nan"))])
    for rule in (Rule(temperature=0.0), Rule(top_k=1)):
        certain, lost = tempered_logprobs_of(logits, [rule] * 2, torch.tensor([3, 0])).tolist()
        assert certain == 0.0
        assert lost != lost


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1)) * 4
    tokens = torch.tensor([0, 49, 7, 7, 3, 20])
    truth = logits.double().log_softmax(-1)
    assert torch.allclose(logprobs_of(logits, tokens).double(), truth[range(6), tokens], atol=1e-6)
    best, values = likeliest(logits, 4)
    assert best.tolist() == truth.argsort(dim=-1, descending=True)[:, :4].tolist()
    assert torch.allclose(values.double(), truth.gather(1, best), atol=1e-6)


# Where a continuation ends.

PIECES = ["a", "b", "ab", " ", "é", "ü", "日", "😀", "<|end|>"]
SPACE = "▁"


@functools.cache
def byte_level() -> Tokenizer:
    """Tokens are bytes, but some pairs that cut characters in the middle are one."""
    return make_tokenizer(merges=(("a", "b"), ("Ã", "©"), ("©", "a"), ("¼", "Ã"))).backend_tokenizer


@functools.cache
def with_byte_fallback() -> tuple[Tokenizer, dict[str, int]]:
    """Tokens are words with the space before them, or bytes, as in models of the first Llama's kind."""
    words = [SPACE, "a", "b", "ab", SPACE + "a", SPACE + "ab"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer, vocabulary


def found_at(tokenizer: Tokenizer, strings: list[str], prompt: list[int], tokens: list[int]) -> int | None:
    watch = StringWatch(tokenizer, strings, prompt)
    return next((place for place, token in enumerate(tokens) if watch.finds_with(token)), None)


def first_place(tokenizer: Tokenizer, strings: list[str], prompt: list[int], tokens: list[int]) -> int | None:
    """By writing everything from the beginning, over and over."""
    before = len(tokenizer.decode(prompt, skip_special_tokens=False))
    for place in range(len(tokens)):
        text = tokenizer.decode(prompt + tokens[: place + 1], skip_special_tokens=False)[before:]
        if any(string in text for string in strings):
            return place
    return None


@settings(max_examples=100)
@given(st.data())
def test_strings_in_text_of_bytes_are_found_with_their_last_token(data: st.DataObject) -> None:
    tokenizer = byte_level()
    text = data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map("".join))
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 262)), max_size=3)):
        tokens.insert(place, byte)  # bytes that are no character, and specials
    strings = data.draw(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map("".join), min_size=1))
    prompt = tokenizer.encode("ba").ids
    assert found_at(tokenizer, strings, prompt, tokens) == first_place(tokenizer, strings, prompt, tokens)


@settings(max_examples=100)
@given(st.data())
def test_strings_in_text_of_words_and_bytes_are_found_with_their_last_token(data: st.DataObject) -> None:
    tokenizer, vocabulary = with_byte_fallback()
    words = st.sampled_from([*range(256, 262)]).map(lambda token: [token])
    characters = st.sampled_from("éü日😀").map(lambda character: list(character.encode()))
    tokens = [*itertools.chain(*data.draw(st.lists(words | characters, min_size=1, max_size=12)))]
    pieces = st.sampled_from([" a", " ab", "b", " ", "é", "日", "a"])
    strings = data.draw(st.lists(st.lists(pieces, min_size=1, max_size=3).map("".join), min_size=1))
    prompt = [vocabulary["a"], vocabulary["b"]]
    assert found_at(tokenizer, strings, prompt, tokens) == first_place(tokenizer, strings, prompt, tokens)


def test_string_that_begins_with_the_first_tokens_space_is_found() -> None:
    tokenizer, vocabulary = with_byte_fallback()
    assert found_at(tokenizer, [" ab"], [vocabulary["a"]], [vocabulary[SPACE + "ab"]]) == 0


def test_string_that_begins_in_the_prompt_is_not_found() -> None:
    tokenizer = byte_level()
    prompt, tokens = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("x.", "y.y"))
    assert found_at(tokenizer, [".y"], prompt, tokens) == 2


def test_character_that_begins_in_the_prompt_is_found_when_it_ends() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("日", add_special_tokens=False).ids
    assert found_at(tokenizer, ["日"], tokens[:1], tokens[1:]) == 1


def test_string_after_many_bytes_that_are_no_text_is_found() -> None:
    tokenizer = byte_level()
    broken = tokenizer.encode("日", add_special_tokens=False).ids[0]
    tokens = [broken] * 50 + tokenizer.encode("日b", add_special_tokens=False).ids
    assert found_at(tokenizer, ["日"], [], tokens) == 52


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config.json": {"eos_token_id": 5}}, {5}),
        ({"config.json": {"eos_token_id": [5, 6]}}, {5, 6}),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [7, 8]}}, {7, 8}),
        ({"config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": None}}, {0}),
        ({"config.json": {"eos_token_id": None}}, set()),
        ({}, set()),
    ],
)
def test_end_tokens_are_what_the_checkpoint_says(tmp_path: Path, files: dict[str, Any], ends: set[int]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_tokens(tmp_path) == ends


def test_tokenizer_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json.*stop at token ids"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(EngineError, match="cannot be read"):
        read_tokenizer(tmp_path)
