"""`training.json` and `prepared.json` as typed values, by the models of `core.spec` that checked the request."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from trainmaster.server.core.fields import STORED, Model
from trainmaster.server.core.spec.configs import BaseModelConfig, OutputConfig, TrainingConfig
from trainmaster.server.core.spec.data import DataConfig
from trainmaster.server.core.training.hyperparameters import HYPERPARAMETERS, Value, hyperparameters_of
from trainmaster.server.core.training.preferences import PreferenceLoss
from trainmaster.server.core.training.sources import ALL_ROWS, Slice
from trainmaster.server.core.training.types import TrainingType, trains_adapter

_Config = TypeVar("_Config", bound=Model)
JsonObject = Mapping[str, Any]


class DocumentError(ValueError):
    """The job asks for something that its trainer cannot do; the message says what, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    name: str
    training: TrainingConfig
    data: DataConfig
    output: OutputConfig
    hyperparameters: Mapping[str, Value]
    """All that the training type has."""
    text: str = field(repr=False)
    """The document as it was read; every checkpoint has a copy."""

    @classmethod
    def read(cls, path: Path) -> Self:
        text = path.read_text()
        try:
            document = json.loads(text)
            training = dict(document["training_config"])
            given = training.pop("hyperparameters", {})  # typed, which the request's are not
            config = _stored(TrainingConfig, training)
            # A document that an older server stored may lack some.
            table = hyperparameters_of(config.training_type)
            defaults = {name: known.default_for(config.training_type) for name, known in table.items()}
            return cls(
                name=document["name"],
                training=config,
                data=_stored(DataConfig, document["data_config"]),
                output=_stored(OutputConfig, document["output_config"]),
                hyperparameters=defaults | given,
                text=text,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DocumentError(f"{path} is not a training document: {type(error).__name__}: {error}") from error

    @property
    def sharded(self) -> bool:
        return self.training.framework.sharded

    @property
    def trains_adapter(self) -> bool:
        return trains_adapter(self.training.training_type, self.hyperparameters)

    @property
    def packing(self) -> bool:
        return bool(self.data.preprocess.packing)  # the server fills in the training type's default


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizationConfig:
    """All of a training document that decides how rows become tokens."""

    training_type: TrainingType
    data: DataConfig
    completion_only_loss: bool
    assistant_only_loss: bool
    unpaired: bool = False
    """Of preferences: rows are single answers, liked or not."""

    @classmethod
    def from_document(cls, document: JsonObject) -> Self:
        training = document["training_config"]
        training_type = TrainingType(training["training_type"])
        given = training.get("hyperparameters") or {}

        def flag(name: str) -> bool:
            return bool(given.get(name, HYPERPARAMETERS[name].default_for(training_type)))

        return cls(
            training_type=training_type,
            data=_stored(DataConfig, document["data_config"]),
            completion_only_loss=flag("completion_only_loss"),
            assistant_only_loss=flag("assistant_only_loss"),
            unpaired=training_type is TrainingType.DPO and given.get("loss_type") == PreferenceLoss.KTO,
        )


def base_model_of(document: JsonObject) -> BaseModelConfig:
    return _stored(BaseModelConfig, document["training_config"]["base_model"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What the preparing step left for the ranks of its node."""

    model_path: str
    tokenizer_path: str
    train_path: str
    eval_path: str | None
    train_rows: int
    train_tokens: int
    max_seq_length: int
    rows_key: str = ""
    """Changes with the rows."""
    model_key: str = ""
    """Changes with the base model."""
    cache_path: str = ""
    """The account's cache on this node."""

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            document = json.loads(path.read_bytes())
            return cls(**{name: document[name] for name in cls.__slots__ if name in document})
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentError(f"{path} does not say what was prepared: {type(error).__name__}: {error}") from error


def _stored(kind: type[_Config], values: JsonObject) -> _Config:
    return kind.model_validate(values, extra="ignore", context=STORED)


_WORDS = {"true": True, "false": False, "none": None, "null": None}


def parsed(text: str) -> Any:
    """A number, truth value, list, object or null where the text is one; else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = float(text)  # JSON has no `1.` and no `.5`, which people write
        except ValueError:
            return text
    return value if not isinstance(value, float) or math.isfinite(value) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    files: int
    """How many; parts follow each other in the order of the source's files."""
    rows: Slice = ALL_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSource:
    path: str
    files: tuple[Path, ...]
    format: str
    whole: bool = True
    """False: for a check, only the beginning was fetched, and slices do not count."""
    parts: tuple[Part, ...] = ()

    @property
    def slices(self) -> list[list[Any]]:
        if all(part.rows == ALL_ROWS for part in self.parts):
            return []
        return [[part.files, str(part.rows)] for part in self.parts]

    def to_json(self) -> dict[str, Any]:
        document = {"path": self.path, "files": [str(file) for file in self.files], "format": self.format}
        return {**document, "slices": self.slices} if self.slices else document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        files = tuple(Path(file) for file in document["files"])
        parts = tuple(Part(files=count, rows=Slice.read(rows)) for count, rows in document.get("slices") or ())
        return cls(path=document["path"], files=files, format=document["format"], parts=parts)
