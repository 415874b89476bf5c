"""The arguments of the trainer process that a `trainer_service` may give it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.server.core.suggest import choice_message

PRECISIONS = ("auto", "float32", "bfloat16")
"""Of the base model's weights; `auto`: bfloat16 on a GPU, float32 on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An argument of the trainer process."""

    name: str
    """In `service.json`."""
    flag: str
    meaning: str
    read: Callable[[str], Any] | None = None
    """Its value of a text, or ValueError with what it must be; None: it has none, and is true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An argument that was understood."""

    option: Option
    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """An argument that was not."""

    index: int
    message: str


def _precision(text: str) -> str:
    if text not in PRECISIONS:
        raise ValueError(f"must be one of {', '.join(PRECISIONS)}")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:10]) <= 1_000_000 or len(text) > 7:
        raise ValueError("must be a whole number from 1 to 1000000")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= 31_536_000:
        raise ValueError("must be a number of seconds, more than 0 and at most a year")
    return found


OPTIONS: tuple[Option, ...] = (
    Option(name="forward_only", flag="--forward-only", meaning="only forward passes, as `forward_only`"),
    Option(
        name="precision", flag="--precision", meaning=f"of the base model: {', '.join(PRECISIONS)}", read=_precision
    ),
    Option(name="max_adapters", flag="--max-adapters", meaning="how many models may be loaded at a time", read=_count),
    Option(
        name="keep_results_s",
        flag="--keep-results-s",
        meaning="for how many seconds results can be fetched again",
        read=_seconds,
    ),
    Option(
        name="gradient_accumulation_steps",
        flag="--gradient-accumulation-steps",
        meaning="so many optim_steps make one, as `gradient_accumulation_steps`",
        read=_count,
    ),
    Option(
        name="tempered_logprobs",
        flag="--tempered-logprobs",
        meaning="sampled tokens have the log-probabilities of what they were drawn from, after temperature, top_k and "
        "top_p",
    ),
)
"""Every argument that there is."""


def read_arguments(arguments: Sequence[str]) -> Iterator[Said | Wrong]:
    """What arguments say, each as `--name value` or `--name=value`."""
    known = {option.flag: option for option in OPTIONS}
    seen: set[str] = set()
    position = 0
    while position < len(arguments):
        at = position
        flag, equals, value = arguments[at].partition("=")
        option = known.get(flag)
        position += 1
        if option is None:
            yield Wrong(index=at, message=choice_message("argument", flag, known))
            continue
        if option.read is not None and not equals and position < len(arguments):
            value, equals = arguments[position], "="
            position += 1
        if flag in seen:
            yield Wrong(index=at, message=f"{flag} is there twice")
        elif option.read is None:
            yield Wrong(index=at, message=f"{flag} takes no value") if equals else Said(option=option, value=True)
        elif not equals:
            yield Wrong(index=at, message=f"{flag} needs a value")
        else:
            try:
                yield Said(option=option, value=option.read(value))
            except ValueError as error:
                yield Wrong(index=at, message=f"{flag} {error}")
        seen.add(flag)
