"""Decoding: chooses the next token, computes its logprob, and detects the end of a continuation.

Every row is computed by itself, so a result does not depend on the rest of the batch.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainmaster.engine.types import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 and below: from all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


def draws_of(seed: int | None, index: int) -> Callable[[], float]:
    """A generator of numbers in [0, 1), one per token, for sample `index` of a request.

    The numbers depend on the seed and the index alone, not on the device. Without a seed they are random.
    """
    known = secrets.randbits(64) if seed is None else seed % 2**64
    return np.random.default_rng([known, index]).random


def choose(logits: Tensor, rules: Sequence[Rule], draws: Sequence[float]) -> Tensor:
    """Choose a token for each row: int64 [rows].

    Args:
        logits: float32 [rows, vocabulary].
        rules: One for each row.
        draws: A number in [0, 1) for each row; greedy rows do not use theirs.
    """
    greedy = [row for row, rule in enumerate(rules) if rule.is_greedy]
    open_ = [row for row, rule in enumerate(rules) if not rule.is_greedy and not rule.is_filtered]
    filtered = [row for row, rule in enumerate(rules) if not rule.is_greedy and rule.is_filtered]
    tokens = torch.empty(len(rules), dtype=torch.int64, device=logits.device)
    for rows, how in ((greedy, _greedy), (open_, _open), (filtered, _filtered)):
        if rows:
            own_logits = logits if len(rows) == len(rules) else logits[rows]
            tokens[rows] = how(own_logits, [rules[row] for row in rows], [draws[row] for row in rows])
    return tokens


def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logprobs of one token in each row by the model's own distribution, at temperature 1: [rows]."""
    return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(dim=-1)


def tempered_logprobs_of(logits: Tensor, rules: Sequence[Rule], tokens: Tensor) -> Tensor:
    """The logprobs of tokens by the distribution they were drawn from, with temperature, top_k and top_p: [rows].

    A greedy choice is certain: 0.
    """
    found = torch.zeros(len(rules), dtype=torch.float32, device=logits.device)
    for row, rule in enumerate(rules):
        own, token = logits[row : row + 1], tokens[row]
        if rule.is_greedy:
            found[row] = own[0, token] - own[0, token]  # NaN where the model gives nothing but NaN
            continue
        weights, ids = _left(own, [rule]) if rule.is_filtered else (_weights(own, [rule]), None)
        place = token if ids is None else (ids[0] == token).nonzero()[0, 0]
        found[row] = (weights[0, place].double() / weights[0].sum(dtype=torch.float64)).log()
    return found


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of each row, int64 [rows, count], and their logprobs."""
    values, tokens = logits.topk(count, dim=-1)
    return tokens, values - logits.logsumexp(dim=-1, keepdim=True)


def _greedy(logits: Tensor, rules: Sequence[Rule], draws: Sequence[float]) -> Tensor:  # noqa: ARG001
    return logits.argmax(dim=-1)


def _open(logits: Tensor, rules: Sequence[Rule], draws: Sequence[float]) -> Tensor:
    return _drawn(_weights(logits, rules).cumsum(dim=-1, dtype=torch.float64), draws)


def _filtered(logits: Tensor, rules: Sequence[Rule], draws: Sequence[float]) -> Tensor:
    weights, ids = _left(logits, rules)
    places = _drawn(weights.cumsum(dim=-1, dtype=torch.float64), draws)
    return ids.gather(1, places[:, None]).squeeze(1)


def _left(logits: Tensor, rules: Sequence[Rule]) -> tuple[Tensor, Tensor]:
    """The weights of the tokens that top_k and then top_p leave, the likeliest first, and their ids."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = _weights(ordered, rules)
    size = logits.shape[-1]
    counts = _column([rule.top_k if 0 < rule.top_k < size else size for rule in rules], logits.device)
    weights = weights.masked_fill(torch.arange(size, device=logits.device) >= counts, 0.0)
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    # A rule without top_p must not lose tokens to rounding; and the first token is always left.
    shares = _column([rule.top_p if rule.top_p < 1 else float("inf") for rule in rules], logits.device)
    left_out = cumulated - weights >= cumulated[:, -1:] * shares
    left_out[:, 0] = False
    return weights.masked_fill(left_out, 0.0), ids


def _weights(logits: Tensor, rules: Sequence[Rule]) -> Tensor:
    """Probabilities relative to the likeliest token's: so no temperature is too small."""
    # Not below what float32 can divide by.
    temperatures = _column([max(rule.temperature, 1e-30) for rule in rules], logits.device).to(torch.float32)
    return ((logits - logits.amax(dim=-1, keepdim=True)) / temperatures).exp()


def _drawn(cumulated: Tensor, draws: Sequence[float]) -> Tensor:
    """For each row, the index at which the running sum of weights passes its draw."""
    totals = cumulated[:, -1:]
    thresholds = torch.minimum(totals * _column(draws, cumulated.device), totals.nextafter(torch.zeros_like(totals)))
    places = torch.searchsorted(cumulated, thresholds, right=True).squeeze(1)
    # Rows of a model that gives NaN have no such place.
    return places.clamp(max=cumulated.shape[-1] - 1)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None].to(device)


# A continuation ends at a token, or at a string in its text, wherever the borders of tokens lie.

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no character, or not a complete one yet."""
_CONTEXT_TOKENS = 4
"""Tokens of the prompt to decode with: some tokenizers drop the space before the first token."""
_UNFINISHED_TOKENS = 3
"""A character has at most 4 bytes and a token at least one: so many tokens may wait for the last byte."""


def end_tokens(directory: Path) -> frozenset[int]:
    """The end-of-text tokens of a checkpoint: from its generation config, else from the model's config."""
    for name in ("generation_config.json", "config.json"):
        settings = _settings(directory / name)
        ids = settings.get("eos_token_id")
        if ids is None:
            ids = (settings.get("text_config") or {}).get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def read_tokenizer(directory: Path) -> Tokenizer:
    """Read the tokenizer of a checkpoint."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise EngineError(f"stop strings need the model's tokenizer.json, and {directory} has none; stop at token ids")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise EngineError(f"stop strings need the model's tokenizer, and {path} cannot be read: {error}") from error


class StringWatch:
    """Looks for strings in the text of a stream of tokens.

    A character may span several tokens, and how a token decodes may depend on the one before. So a token is decoded
    together with those before it, and an incomplete character waits for the rest of it.

    Args:
        tokenizer: The model's.
        strings: The strings to look for; none is empty.
        prompt: The tokens before the first one; a string that starts in their text is not found.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._kept_chars = max(map(len, strings)) - 1
        self._text = ""
        """The end of the settled text, long enough to hold the start of a string."""
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        """The last settled tokens, and those that are not settled."""
        self._settled = len(self._window)
        self._known = self._decoded(self._window).rstrip(UNFINISHED)
        """The text of the settled tokens of the window."""

    def finds_with(self, token: int) -> bool:
        """Take the next token; returns whether the text now contains one of the strings."""
        self._window.append(token)
        text = self._decoded(self._window)
        waits = text.endswith(UNFINISHED)
        fresh = self._text + text[len(self._known) :]
        if self._has(fresh.rstrip(UNFINISHED) if waits else fresh):
            return True
        if not waits:
            self._settle(len(self._window), text)
        elif len(self._window) - self._settled > _UNFINISHED_TOKENS:
            upto = len(self._window) - _UNFINISHED_TOKENS
            self._settle(upto, self._decoded(self._window[:upto]))
        return False

    def _settle(self, upto: int, text: str) -> None:
        grown = self._text + text[len(self._known) :]
        self._text = grown[-self._kept_chars :] if self._kept_chars else ""
        self._window = self._window[self._settled :]
        self._settled = upto - self._settled
        self._known = self._decoded(self._window[: self._settled])

    def _has(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    settings = json.loads(path.read_text(encoding="utf-8"))
    return settings if isinstance(settings, dict) else {}
