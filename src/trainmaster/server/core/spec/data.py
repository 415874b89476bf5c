"""`data_config`: where the training data lies and how it is read."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, BeforeValidator, Field, Strict, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from trainmaster.server.core.fields import (
    Count,
    Flag,
    Model,
    Names,
    Natural,
    Positive,
    StringMap,
    Text,
    Verbatim,
    null_means,
    refuse,
)
from trainmaster.server.core.spec.filters import Filters, broken_patterns
from trainmaster.server.core.suggest import choice_message
from trainmaster.server.core.training.sources import scheme_of
from trainmaster.server.core.training.splits import read_split
from trainmaster.server.core.workloads.registry import STORED

SCHEMES = ("file", "hf", "s3", "http", "https", "scaidrive", "scaiatlas")
"""Of data sources. A path without a scheme is a file."""
MAX_SEED = 2**32 - 1
"""The largest that every framework takes."""


class DataFormat(StrEnum):
    """How rows are written."""

    JSONL = "jsonl"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    TEXT = "text"
    ARROW = "arrow"


class Padding(StrEnum):
    """To which length samples are padded."""

    NONE = "none"
    LONGEST = "longest"
    MAX_LENGTH = "max_length"


def _known_scheme(path: str) -> str:
    scheme = scheme_of(path)
    if scheme is not None and scheme not in SCHEMES:
        raise PydanticCustomError("rule", choice_message("scheme", scheme, SCHEMES))
    return path


def _readable_split(split: str, info: ValidationInfo) -> str:
    if info.context == STORED:
        return split  # of a time at which it was not read; the job says so itself
    try:
        read_split(split)
    except ValueError as error:
        raise PydanticCustomError("rule", "{problem}", {"problem": str(error)}) from None
    return split


def _padding_of_flag(value: object) -> object:
    # Tokenizers take a truth value here, and mean this by it.
    if isinstance(value, bool):
        return Padding.LONGEST if value else Padding.NONE
    return value


class Sampling(Model):
    """Which part of a source is used."""

    weight: Positive | None = Field(default=None, description="Share of this source among all, relative to the others.")
    ratio: Annotated[float, Strict(), Field(gt=0, le=1)] | None = Field(
        default=None, description="Fraction of its rows that is used."
    )
    max_samples: Count | None = Field(default=None, description="Most rows that are used.")


class DataSource(Model):
    """One source of rows."""

    path: Annotated[Text, AfterValidator(_known_scheme)] = Field(
        description="A file, or a URI: file, hf, s3, http, https, scaidrive or scaiatlas."
    )
    type: Text | None = Field(default=None, description="What the source is; inferred when null.")
    split: Annotated[Text, AfterValidator(_readable_split)] | None = Field(
        default=None,
        description="Which rows: train, test, train[:1000], train[10%:20%], train+test. Null: train where file names "
        "tell splits, else all.",
    )
    format: DataFormat | None = Field(default=None, description="How rows are written; inferred when null.")
    columns: Names | None = Field(default=None, description="The columns that are read; all when null.")
    filters: Filters | None = Field(default=None, description="Which rows are used: those that pass all of these.")
    sampling: Sampling | None = Field(default=None, description="Which part of the source is used; all when null.")


class PreprocessConfig(Model):
    """From rows to token sequences. Null leaves it to the tokenizer."""

    tokenizer_id: Text | None = Field(default=None, description="The tokenizer; the base model's when null.")
    tokenizer_config: StringMap = Field(default_factory=dict, description="Options of the tokenizer.")
    add_bos: Flag | None = Field(default=None, description="Put a token at the beginning of each sample.")
    add_eos: Flag | None = Field(default=None, description="Put a token at the end of each sample.")
    padding: Annotated[Padding, BeforeValidator(_padding_of_flag, json_schema_input_type=Padding | bool)] | None = (
        Field(default=None, description="To which length samples are padded; true means longest.")
    )
    truncation: Flag | None = Field(default=None, description="Cut samples at max_seq_length.")
    chat_template: Verbatim | None = Field(default=None, description="How messages become text.")
    field_mapping: StringMap = Field(default_factory=dict, description="Our name of a field to the row's own.")
    packing: Flag | None = Field(
        default=None,
        description="Fill sequences of max_seq_length with several samples. Null: only with CONTINUED_PRETRAIN.",
    )


Sources = Annotated[tuple[DataSource, ...], Field(min_length=1, max_length=1024)]


class DataConfig(Model):
    """Where the training data lies and how it is read."""

    sources: Sources = Field(description="At least one source of rows.")
    preprocess: PreprocessConfig = Field(default_factory=PreprocessConfig, description="From rows to token sequences.")
    max_seq_length: Count | None = Field(
        default=None, description="Most tokens of a sample; the model's own when null."
    )
    batch_size: Annotated[Count, null_means(1, Count)] = Field(
        default=1, description="Samples of one rank in one micro-step."
    )
    gradient_accumulation_steps: Count = Field(default=1, description="Micro-steps of one optimizer step.")
    num_workers: Natural = Field(default=0, description="Processes that read data, for each rank.")
    pin_memory: Flag | None = Field(default=None, description="Page-locked host memory; on with a GPU when null.")
    validation_split: Annotated[float, Strict(), Field(ge=0, lt=1)] = Field(
        default=0.0, description="Fraction of the rows that is kept for validation; below 1."
    )
    seed: Annotated[int, Strict(), Field(ge=0, le=MAX_SEED)] | None = Field(
        default=None, description="Made by the server, and recorded, when null."
    )

    @model_validator(mode="after")
    def _patterns_in_bounds(self) -> Self:
        refuse(broken_patterns(source.filters for source in self.sources))
        return self
