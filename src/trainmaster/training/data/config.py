"""`data_config` as typed values, read from the plain document that the server has checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from trainmaster.server.core.training.sources import ALL_ROWS, Slice

CONTINUED_PRETRAIN = "CONTINUED_PRETRAIN"
FULL_FINETUNE = "FULL_FINETUNE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Keeps the rows of which it is true."""

    column: str
    op: str
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Which part of a source is used."""

    weight: float | None = None
    ratio: float | None = None
    max_samples: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source of rows."""

    path: str
    type: str | None = None
    split: str | None = None
    format: str | None = None
    columns: tuple[str, ...] | None = None
    filters: tuple[Filter, ...] = ()
    sampling: Sampling = Sampling()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """A source as the document has it."""
        columns = document.get("columns")
        return cls(
            path=document["path"],
            type=document.get("type"),
            split=document.get("split"),
            format=document.get("format"),
            columns=None if columns is None else tuple(columns),
            filters=tuple(_known(Filter, each) for each in document.get("filters") or ()),
            sampling=_known(Sampling, document.get("sampling") or {}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some of a source's files, and which of their rows are read."""

    files: int
    """How many; parts follow each other in the order of the source's files."""
    rows: Slice = ALL_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSource:
    """A source whose files are on this machine."""

    path: str
    """As the job names it."""
    files: tuple[Path, ...]
    format: str
    whole: bool = True
    """False: for a check, only the beginning of it is here, and slices do not count."""
    parts: tuple[Part, ...] = ()
    """Which rows are read; without any, all rows of all files."""

    @property
    def slices(self) -> list[list[Any]]:
        """Its parts as plain values, where they are not simply all rows."""
        if all(part.rows == ALL_ROWS for part in self.parts):
            return []
        return [[part.files, str(part.rows)] for part in self.parts]

    def to_json(self) -> dict[str, Any]:
        """As it stands in `prepared.json`."""
        document = {"path": self.path, "files": [str(file) for file in self.files], "format": self.format}
        return {**document, "slices": self.slices} if self.slices else document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """As it stands in `prepared.json`."""
        files = tuple(Path(file) for file in document["files"])
        parts = tuple(Part(files=count, rows=Slice.read(rows)) for count, rows in document.get("slices") or ())
        return cls(path=document["path"], files=files, format=document["format"], parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    """From rows to token sequences. None leaves it to the tokenizer."""

    tokenizer_id: str | None = None
    tokenizer_config: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    truncation: bool | None = None
    chat_template: str | None = None
    field_mapping: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What a job says about its data, and what of the rest of its document decides how rows become tokens."""

    training_type: str
    sources: tuple[Source, ...]
    preprocess: Preprocess = Preprocess()
    max_seq_length: int | None = None
    num_workers: int = 0
    validation_split: float = 0.0
    seed: int = 0
    completion_only_loss: bool = True
    assistant_only_loss: bool = True

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """The configuration in the content of `training.json`."""
        training, data = document["training_config"], document["data_config"]
        parameters = training.get("hyperparameters") or {}
        training_type = training["training_type"]

        def only(name: str) -> bool:
            value = parameters.get(name)
            return training_type != FULL_FINETUNE if value is None else bool(value)

        return cls(
            training_type=training_type,
            sources=tuple(Source.from_json(each) for each in data["sources"]),
            preprocess=_known(Preprocess, data.get("preprocess") or {}),
            max_seq_length=data.get("max_seq_length"),
            num_workers=data.get("num_workers") or 0,
            validation_split=data.get("validation_split") or 0.0,
            seed=data.get("seed") or 0,
            completion_only_loss=only("completion_only_loss"),
            assistant_only_loss=only("assistant_only_loss"),
        )


def _known(kind: type[Any], values: Mapping[str, Any]) -> Any:
    names = {each.name for each in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})
