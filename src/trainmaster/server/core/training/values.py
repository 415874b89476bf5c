"""A hyperparameter: how its text becomes a value, and within which bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from trainmaster.server.core.errors import choice_message, shown
from trainmaster.server.core.training.types import BUILT_IN, TrainingType

Value = int | float | bool | str | None
"""What a trainer is given; None leaves it to the trainer."""

_MAX_NAMES = 1024
_MAX_INTEGER = 2**31 - 1
_LONGEST_NUMBER = 64


class ValueKind(StrEnum):
    """How a value is written."""

    INTEGER = "whole number"
    NUMBER = "number"
    STEPS_OR_SHARE = "whole number, or a share below 1"
    FLAG = "true or false"
    CHOICE = "choice"
    TEXT = "text"
    NAMES = "names with commas between"
    FLAG_OR_CHOICE = "true, false, or a choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameter:
    name: str
    kind: ValueKind
    default: Value
    meaning: str
    types: frozenset[TrainingType] = BUILT_IN
    """The training types that have it."""
    defaults: Mapping[TrainingType, Value] = field(default_factory=dict)
    """Of training types whose default is another."""
    minimum: float | None = None
    above: float | None = None
    """The value is greater than this."""
    below: float | None = None
    """The value is less than this."""
    choices: tuple[str, ...] = ()

    def default_for(self, training_type: TrainingType) -> Value:
        return self.defaults.get(training_type, self.default)

    def read(self, text: str) -> Value:
        """The value that a text stands for.

        Raises:
            ValueError: it stands for none; the message says what to write.
        """
        value = _READERS[self.kind](self, text.strip())
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._check_bounds(value)
        return value

    def _check_bounds(self, value: float) -> None:
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"must be at least {self.minimum:g}")
        if self.above is not None and value <= self.above:
            raise ValueError(f"must be more than {self.above:g}")
        if self.below is not None and value >= self.below:
            raise ValueError(f"must be less than {self.below:g}")


def _integer(_: Hyperparameter, text: str) -> int:
    number = _finite(text)
    if number is None or not number.is_integer() or abs(number) > _MAX_INTEGER:
        raise ValueError(f"must be a whole number, not '{shown(text)}'")
    return int(number)


def _number(_: Hyperparameter, text: str) -> float:
    number = _finite(text)
    if number is None:
        raise ValueError(f"must be a number, not '{shown(text)}'")
    return number


def _steps_or_share(_: Hyperparameter, text: str) -> int | float:
    number = _finite(text)
    if number is None or number > _MAX_INTEGER or (number >= 1 and not number.is_integer()):
        raise ValueError(f"must be a whole number of steps, or a share of all steps below 1, not '{shown(text)}'")
    return number if 0 < number < 1 else int(number)


def _flag(_: Hyperparameter, text: str) -> bool:
    value = _FLAGS.get(text.casefold())
    if value is None:
        raise ValueError(f"must be true or false, not '{shown(text)}'")
    return value


def _choice(known: Hyperparameter, text: str) -> str:
    if text not in known.choices:
        raise ValueError(choice_message("value", text, known.choices))
    return text


def _flag_or_choice(known: Hyperparameter, text: str) -> bool | str:
    value = _FLAGS.get(text.casefold())
    return _choice(known, text) if value is None else value


def _text(_: Hyperparameter, text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _names(_: Hyperparameter, text: str) -> str:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(names) > _MAX_NAMES:
        raise ValueError(f"must be 1 to {_MAX_NAMES} names with commas between")
    return ",".join(names)


def _finite(text: str) -> float | None:
    # float() itself takes more than people write: underscores, nan, infinity.
    if len(text) > _LONGEST_NUMBER or not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
        return None
    number = float(text)
    return number if math.isfinite(number) else None


_FLAGS = {"true": True, "1": True, "false": False, "0": False}

_READERS: Mapping[ValueKind, Callable[[Hyperparameter, str], Value]] = {
    ValueKind.INTEGER: _integer,
    ValueKind.NUMBER: _number,
    ValueKind.STEPS_OR_SHARE: _steps_or_share,
    ValueKind.FLAG: _flag,
    ValueKind.CHOICE: _choice,
    ValueKind.TEXT: _text,
    ValueKind.NAMES: _names,
    ValueKind.FLAG_OR_CHOICE: _flag_or_choice,
}
