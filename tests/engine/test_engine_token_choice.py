"""The choice of tokens on a GPU, by evenly spread draws, against what each rule leaves; see `kernel_runs` for where."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_runs import DEVICE, drawn
from torch import Tensor

from trainmaster.engine.cache import AttentionKind, KeyValueCache, Layout, PageTable
from trainmaster.engine.decoding import DecodeSlots, Joining
from trainmaster.engine.kernels import token_choice
from trainmaster.engine.kernels.token_choice import RowRules, choose_tokens
from trainmaster.engine.logprobs import Rule, tempered_logprobs_of

SIZE = 56
"""Of the vocabulary: no whole number of pieces."""
PIECE = 16


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_choice, "_PIECE", PIECE)


def rules_of(rule: Rule, draws: Tensor) -> RowRules:
    """As running sequences with this rule have them."""
    layout = Layout.of([None], 64)
    cache = KeyValueCache(layout, heads=1, width=8, pages=8, device=torch.device(DEVICE), dtype=torch.float32)
    slots = DecodeSlots(cache, sequences=1, longest=64)
    room = cache.take(0, 1, 1)
    assert isinstance(room, PageTable)
    assert room.tables[AttentionKind.FULL].size
    slots.join([Joining(slot=0, rooms=(room,), length=4, position=3, rule=rule)])
    return slots.rules(torch.zeros(len(draws), dtype=torch.int64, device=DEVICE), draws)


def chosen(logits: Tensor, rule: Rule, draws: Tensor, *, tempered: bool = False) -> tuple[Tensor, Tensor]:
    rows = logits.expand(len(draws), -1).contiguous()
    filtered = rule.is_filtered and not rule.is_greedy
    return choose_tokens(rows, rules_of(rule, draws.to(DEVICE)), filtered=filtered, tempered=tempered)


def even_draws(count: int) -> Tensor:
    return (torch.arange(count) + 0.5) / count


def some_logits(seed: int = 1) -> Tensor:
    return 2 * drawn(SIZE, dtype=torch.float32, seed=seed)


def shares_of(logits: Tensor, rule: Rule) -> Tensor:
    """What each token's share of the draws has to be: by logprobs of the CPU, 0 for those that the rule leaves out."""
    rows = logits.double().cpu()
    weights = ((rows - rows.max()) / rule.temperature).exp()
    order = rows.argsort(descending=True)
    if 0 < rule.top_k < SIZE:
        weights[order[rule.top_k :]] = 0
    if rule.top_p < 1:
        before = weights[order].cumsum(0) - weights[order]
        weights[order[before >= rule.top_p * weights.sum()]] = 0
    return weights / weights.sum()


RULES = [
    Rule(),
    Rule(temperature=0.4),
    Rule(top_p=0.6),
    Rule(top_k=8, top_p=0.7, temperature=1.7),
    Rule(top_k=SIZE),
    Rule(top_k=10 * SIZE, top_p=0.5),
    Rule(top_k=-1, top_p=1.0),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tokens_are_drawn_as_often_as_the_rule_says(rule: Rule) -> None:
    logits, count = some_logits(), 12
    tokens, logprobs = chosen(logits, rule, even_draws(count))
    found = torch.bincount(tokens.cpu(), minlength=SIZE)
    expected = shares_of(logits, rule)
    assert not found[expected == 0].any()
    # Even draws, in the order of the vocabulary: the running sums differ by less than one draw.
    assert (found.cumsum(0) - count * expected.cumsum(0)).abs().max() <= 1.0
    exact = logits.double().log_softmax(0)
    assert torch.allclose(logprobs.double(), exact[tokens], atol=1e-5)


@pytest.mark.parametrize("rule", RULES[1:4], ids=str)
def test_logprobs_may_be_those_of_the_rule(rule: Rule) -> None:
    logits = some_logits(2)
    tokens, logprobs = chosen(logits, rule, even_draws(6), tempered=True)
    rows = logits.expand(6, -1)
    assert torch.allclose(logprobs, tempered_logprobs_of(rows, [rule] * 6, tokens), atol=1e-5)


@pytest.mark.parametrize("tempered", [False, True])
def test_likeliest_token_is_chosen_without_temperature(tempered: bool) -> None:
    logits = some_logits()
    for rule in (Rule(temperature=0.0), Rule(top_k=1), Rule(temperature=0.0, top_p=0.1)):
        tokens, logprobs = chosen(logits, rule, torch.tensor([0.0, 0.9]), tempered=tempered)
        expected = 0.0 if tempered else float(logits.log_softmax(0).max())
        assert tokens.tolist() == [int(logits.argmax())] * 2
        assert logprobs.tolist() == pytest.approx([expected] * 2, abs=1e-5)


@pytest.mark.parametrize("rule", [Rule(top_p=1e-50), Rule(temperature=1e-300), Rule(top_k=2**40, top_p=1e-12)], ids=str)
def test_rule_at_its_limit_leaves_the_likeliest_token(rule: Rule) -> None:
    logits = some_logits()
    tokens, logprobs = chosen(logits, rule, torch.tensor([0.0, 0.5, 0.9999]), tempered=True)
    assert tokens.tolist() == [int(logits.argmax())] * 3
    assert logprobs.tolist() == pytest.approx([0.0] * 3, abs=1e-6)


@pytest.mark.parametrize("rule", [Rule(temperature=1e300), Rule(temperature=3e38), Rule(top_k=2**32 + 1)], ids=str)
def test_options_beyond_32_bits_are_no_error(rule: Rule) -> None:
    logits, draws = some_logits(), even_draws(8)
    tokens, _ = chosen(logits, rule, draws)
    cumulated = shares_of(logits, rule).cumsum(0)
    assert tokens.cpu().tolist() == torch.searchsorted(cumulated, draws.double()).tolist()


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-25, 1.0])
def test_draw_at_either_end_finds_a_token_that_is_left(draw: float) -> None:
    logits = some_logits()
    logits[[0, 1, PIECE, SIZE - 1, SIZE - 2]] = -30.0
    for rule in (Rule(top_k=4), Rule(top_p=0.5), Rule(top_k=9, top_p=0.9)):
        tokens, _ = chosen(logits, rule, torch.tensor([draw]))
        left = shares_of(logits, rule).nonzero().flatten().tolist()
        assert tokens.item() == (left[0] if draw == 0.0 else left[-1])


def test_pieces_without_a_finite_logit_are_never_chosen() -> None:
    logits = some_logits()
    logits[PIECE : 3 * PIECE] = float("-inf")
    for rule in (Rule(), Rule(top_k=7), Rule(temperature=0.0)):
        tokens, logprobs = chosen(logits, rule, even_draws(4))
        assert logprobs.isfinite().all()
        assert (logits[tokens] > float("-inf")).all()


def test_logits_that_are_no_numbers_give_no_logprob() -> None:
    for bad in (float("nan"), float("inf")):
        logits = some_logits()
        logits[40] = bad
        for rule in (Rule(), Rule(top_k=3), Rule(temperature=0.0)):
            tokens, logprobs = chosen(logits, rule, even_draws(2))
            assert not logprobs.isfinite().any()
            assert ((tokens >= 0) & (tokens < SIZE)).all()


def test_draw_between_two_pieces_finds_a_token_that_is_left() -> None:
    """Sums in another order may be larger than the draw, which is then less than nothing into the next piece."""
    count = 16 * PIECE - 20
    logits = drawn(17 * PIECE, dtype=torch.float32, seed=1).cpu()
    logits[::PIECE] = -8.0  # the first of each piece is left out
    pieces = logits.numpy().reshape(-1, PIECE)
    tops = pieces.max(axis=1)
    kept = np.where(pieces >= np.sort(logits.numpy())[-count], np.exp(pieces - tops[:, None]), 0).sum(axis=1)
    of_pieces = np.append(kept * np.exp(tops - tops.max()), np.zeros(15, np.float32))
    draws = torch.from_numpy(np.cumsum(of_pieces)[8:15] / of_pieces.sum())
    tokens, _ = chosen(logits.to(DEVICE), Rule(top_k=count), draws)
    assert (tokens % PIECE != 0).all()
