"""What a trainer service was started to do: reads `service.json`. No torch here: the front reads it, too."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

FILE = "service.json"
"""Its name among the inputs of the launch."""

PRECISIONS = ("auto", "float32", "bfloat16")

_T = TypeVar("_T")


class ConfigurationError(ValueError):
    """The document is not one that this service can be started with; the message says what is wrong."""


class Mode(StrEnum):
    """What the models of this service may do."""

    LORA = "lora"
    FULL = "full"
    FORWARD_ONLY = "forward_only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One service: its base model, and what clients may ask of it."""

    base_model: str
    """As clients call it."""
    model_path: Path
    """A directory with a transformers checkpoint."""
    aliases: tuple[str, ...] = ()
    """Other names of the same model."""
    mode: Mode = Mode.LORA
    lora_rank: int = 0
    """Of adapters whose request names no rank, and the highest that a request may name; 0: no limit."""
    max_context_length: int | None = None
    """None: what the model was made for."""
    learning_rate: float | None = None
    """Of an optim_step that names none."""
    gradient_accumulation_steps: int = 1
    """So many optim_steps make one."""
    precision: str = "auto"
    """`auto`: bfloat16 on a GPU, float32 on the CPU."""
    max_adapters: int = 64
    """How many models may be loaded at a time."""
    keep_results_s: float = 600.0
    """How long results can be fetched again."""
    tempered_logprobs: bool = False
    """Whether sampled tokens have the logprobs of the distribution that they were drawn from."""

    @property
    def names(self) -> frozenset[str]:
        """All names by which a client may ask for the base model."""
        return frozenset({self.base_model, *self.aliases})

    @staticmethod
    def read(path: Path) -> Configuration:
        """The configuration in a file.

        Raises:
            ConfigurationError: it is none, or cannot be read.
        """
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path}: {error}") from error
        if not isinstance(document, dict):
            raise ConfigurationError(f"{path}: an object is wanted, not {type(document).__name__}")
        return Configuration.from_json(document)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Configuration:
        """The configuration of a plain form; what a newer writer added is ignored.

        Raises:
            ConfigurationError: names the field that is missing or wrong.
        """
        read = _Fields(document)
        default = Configuration(base_model="-", model_path=Path("-"))
        context = read.optional("max_context_length", int)
        rate = read.optional("learning_rate", float)
        made = Configuration(
            base_model=read.needed("base_model", str),
            model_path=Path(read.needed("model_path", str)),
            aliases=tuple(str(name) for name in document.get("aliases") or ()),
            mode=read.needed("mode", Mode) if "mode" in document else default.mode,
            lora_rank=read.least("lora_rank", 0, default.lora_rank),
            max_context_length=context,
            learning_rate=rate,
            gradient_accumulation_steps=read.least("gradient_accumulation_steps", 1, 1),
            precision=read.optional("precision", str) or default.precision,
            max_adapters=read.least("max_adapters", 1, default.max_adapters),
            keep_results_s=read.optional("keep_results_s", float) or default.keep_results_s,
            tempered_logprobs=bool(document.get("tempered_logprobs")),
        )
        if not made.model_path.is_dir():
            raise ConfigurationError(f"model_path: {made.model_path} is no directory")
        if made.precision not in PRECISIONS:
            raise ConfigurationError(f"precision: {made.precision!r} is not among {', '.join(PRECISIONS)}")
        if context is not None and context < 1:
            raise ConfigurationError(f"max_context_length: {context} tokens are none")
        if rate is not None and rate < 0:
            raise ConfigurationError(f"learning_rate: {rate} is negative")
        return made


class _Fields:
    """The fields of a document, each checked when it is read."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def needed(self, name: str, kind: Callable[[Any], _T]) -> _T:
        found = self.optional(name, kind)
        if found is None:
            raise ConfigurationError(f"{name}: is missing")
        return found

    def optional(self, name: str, kind: Callable[[Any], _T]) -> _T | None:
        value = self._document.get(name)
        if value is None:
            return None
        try:
            return kind(value)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{name}: {error}") from error

    def least(self, name: str, lowest: int, default: int) -> int:
        value = self.optional(name, int)
        if value is None:
            return default
        if value < lowest:
            raise ConfigurationError(f"{name}: {value} is less than {lowest}")
        return value
