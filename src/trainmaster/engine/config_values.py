"""The values of a config.json; errors name the value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.engine.types import EngineError


@dataclass(frozen=True, slots=True)
class Values:
    raw: Mapping[str, Any]
    path: Path

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise EngineError(f"{self.path}: {name} is {value!r}, not a positive number")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise EngineError(f"{self.path}: {name} is {value!r}, not a whole number")
        return int(value)

    def natural(self, name: str, default: int) -> int:
        """As a count, and may be 0."""
        return 0 if self.raw.get(name, default) == 0 else self.count(name, default)

    def count_of(self, *names: str, default: int) -> int:
        """The first of some names that is there: versions of transformers write different ones."""
        return self.count(next((name for name in names if self.raw.get(name) is not None), names[0]), default)

    def optional(self, name: str, default: float | None = None) -> float | None:
        value = self.raw.get(name, default)
        return None if value is None else self.number(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        return default if value is None else bool(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of this many numbers."""
        listed = self.raw.get(name)
        if not isinstance(listed, list) or len(listed) != count:
            raise EngineError(f"{self.path}: {name} is not a list of {count} numbers")
        return tuple(float(each) for each in listed)

    def refuse(self, what: str) -> EngineError:
        return EngineError(f"the model in {self.path.parent} cannot be used: {what}")
