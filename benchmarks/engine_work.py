"""What all cases of `engine_tokens` share: the tokens that they get, how a step is timed, and what they answer with."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.kernels import Profile

RANK = 32
BATCHES = 3
"""Batches of other lengths each, over and over: no step finds memory and kernels just as the last one left them."""
LEARNING_RATE = 1e-5
WARM_TOKENS = 32
"""Of each continuation before sampling is measured: enough to compile kernels and to make graphs."""


class NotAvailableError(Exception):
    """This case needs something that is not installed, or that the engine does not have."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all cases of a run have in common."""

    model: str
    device: str
    dtype: str
    seconds: float
    """Training is measured for so long at least."""
    vocabulary: int
    sequences: int
    """Of a step."""
    shortest: int
    longest: int
    equal: int
    """Their tokens: from one to the other, with as many short as long ones by the factor; or all the same."""
    together: int
    """Tokens, filling among them, that are computed at once."""
    prompt: int
    new_tokens: int
    shared_prompt: int
    """Tokens of a prompt that many requests share."""
    groups: int
    group_size: int
    """Prompts of a GRPO step, and samples of each."""
    curve_steps: int
    curve_sequences: int
    curve_length: int
    """Of the curves of losses."""

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def warm_tokens(self) -> int:
        return min(self.new_tokens, WARM_TOKENS)

    def settle(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize()

    def begin(self) -> float:
        """From here on time and peak memory are measured."""
        self.settle()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        return time.perf_counter()

    def end(self, began: float) -> float:
        """The seconds since the beginning."""
        self.settle()
        return time.perf_counter() - began

    def batches(self, data: str) -> list[list[np.ndarray]]:
        """Of each batch its sequences, each with one token more than is computed: the last target."""
        chance, tokens = random.Random(0), np.random.default_rng(0)
        sizes = math.log(self.shortest), math.log(self.longest)
        return [
            [
                tokens.integers(0, self.vocabulary, 1 + (self.equal if data == "equal" else length))
                for length in (round(math.exp(chance.uniform(*sizes))) for _ in range(self.sequences))
            ]
            for _ in range(BATCHES)
        ]

    def prompts(self, count: int, *, seed: int, length: int | None = None) -> list[np.ndarray]:
        """With another seed, others: nothing of them is in a cache yet."""
        tokens = np.random.default_rng([1, seed])
        return [tokens.integers(0, self.vocabulary, length or self.prompt) for _ in range(count)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a case gives."""

    tokens: int
    seconds: float
    value: float | None = None
    """What was measured, where that is not tokens per second."""
    unit: str = "tokens/s"
    limit: float | None = None
    """A value above it is wrong."""
    peak_bytes: int | None = None
    """Of the device, while it was measured."""
    loss: float | None = None
    """Of a token, before anything was learnt: cases with the same data must agree on it."""
    sampled_s: float | None = None
    """Of the seconds, those of sampling, where training follows."""
    note: str = ""
    profile: Profile | None = None
    curve: list[float] | None = None
    """The loss of a token at each step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step: its tokens, and the sum of their losses."""

    tokens: int
    loss: float


def measured(setting: Setting, step: Callable[[int], Step]) -> Outcome:
    """All batches once, to warm up; then all of them, as often as the time allows."""
    warm = [step(number) for number in range(BATCHES)]
    began = setting.begin()
    tokens = steps = 0
    while time.perf_counter() - began < setting.seconds:
        for number in range(BATCHES):
            tokens += step(number).tokens
            steps += 1
    seconds = setting.end(began)
    if not (math.isfinite(warm[0].loss) and warm[0].loss > 0):
        raise RuntimeError(f"the loss of the first step is {warm[0].loss}")
    note = f"{steps} steps of {seconds / steps * 1000:,.0f} ms"
    if setting.cuda and (failed := torch.cuda.memory_stats().get("num_ooms", 0)):
        note += f", {failed} times out of memory"
    return Outcome(
        tokens=tokens, seconds=seconds, peak_bytes=peak(setting), loss=warm[0].loss / warm[0].tokens, note=note
    )


def tokens_of(rows: Sequence[np.ndarray]) -> int:
    return sum(len(row) - 1 for row in rows)


def peak(setting: Setting) -> int | None:
    return torch.cuda.max_memory_allocated() if setting.cuda else None
