"""`data_config`: where the training data lies, which of its rows are used, and how they are read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, Strict, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from trainmaster.server.core.errors import choice_message
from trainmaster.server.core.fields import (
    STORED,
    Count,
    Flag,
    Model,
    Names,
    Natural,
    Positive,
    RuledModel,
    RuleViolation,
    StringMap,
    Text,
    Verbatim,
    is_unicode,
    null_means,
    optional,
)
from trainmaster.server.core.training.sources import read_split, scheme_of

MAX_VALUES = 10_000
LONGEST_PATTERN = 1000
MAX_PATTERNS_LENGTH = 32_000
"""Of all filters of a request together: to parse a thousand characters takes a millisecond."""


class FilterOp(StrEnum):
    """How a column is compared."""

    EQ = "eq"
    NE = "ne"
    LT = "lt"
    LE = "le"
    GT = "gt"
    GE = "ge"
    IN = "in"
    NOT_IN = "not_in"
    CONTAINS = "contains"
    NOT_CONTAINS = "not_contains"
    MATCHES = "matches"
    IS_NULL = "is_null"
    NOT_NULL = "not_null"


SYMBOLS = {
    "==": FilterOp.EQ, "=": FilterOp.EQ, "!=": FilterOp.NE,
    "<": FilterOp.LT, "<=": FilterOp.LE, ">": FilterOp.GT, ">=": FilterOp.GE,
}  # fmt: skip
"""What may be written for an op; it is kept by its name."""
_read_pattern = import_module("re._parser").parse
"""The half of `re.compile` that finds what is wrong. The other half takes seconds for some patterns of a few hundred
characters, and requests are read by the thread that answers all of them."""
_ALONE = frozenset({FilterOp.IS_NULL, FilterOp.NOT_NULL})
_OF_MANY = frozenset({FilterOp.IN, FilterOp.NOT_IN})
_ORDERED = frozenset({FilterOp.LT, FilterOp.LE, FilterOp.GT, FilterOp.GE})

_SCALAR_SCHEMA: dict[str, Any] = {"type": ["string", "number", "boolean"]}
_VALUE_SCHEMA = WithJsonSchema(
    {"anyOf": [_SCALAR_SCHEMA, {"type": "array", "items": _SCALAR_SCHEMA, "maxItems": MAX_VALUES}, {"type": "null"}]}
)


def _plain(value: object) -> object:
    if not (_is_scalar(value) or (isinstance(value, list) and all(map(_is_scalar, value)))):
        raise PydanticCustomError("rule", "must be text, a finite number, a truth value, or a list of these")
    if isinstance(value, list) and len(value) > MAX_VALUES:
        raise PydanticCustomError("rule", f"must have at most {MAX_VALUES} entries")
    return value


def _is_scalar(value: object) -> bool:
    if isinstance(value, str):
        return is_unicode(value)
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


class Filter(RuledModel):
    """A condition on a column; rows that do not meet it are left out."""

    column: Text = Field(description="The column of the row.")
    op: Annotated[
        FilterOp,
        BeforeValidator(
            lambda op: SYMBOLS.get(op, op) if isinstance(op, str) else op,
            json_schema_input_type=FilterOp | Annotated[str, Field(pattern=r"^(?:[=!<>]=|[=<>])$")],
        ),
    ] = Field(description="The comparison; `==`, `!=`, `<`, `<=`, `>` and `>=` are accepted, too.")
    value: Annotated[object, AfterValidator(_plain), _VALUE_SCHEMA] | None = optional(
        "The value to compare with: a list for in and not_in, a pattern for matches, none for is_null."
    )

    def broken_rules(self) -> Iterator[RuleViolation]:
        value = self.value
        if self.op in _ALONE:
            if value is not None:
                yield RuleViolation(("value",), f"{self.op} takes no value; leave it out")
        elif value is None:
            yield RuleViolation(
                ("value",), f"required with {self.op}; whether there is a value at all is is_null or not_null"
            )
        elif self.op in _OF_MANY:
            if not isinstance(value, list) or not value:
                yield RuleViolation(("value",), f"must be a list of values with {self.op}")
        elif isinstance(value, list):
            yield RuleViolation(
                ("value",), f"must be a single value with {self.op}; for a list there are in and not_in"
            )
        elif self.op in _ORDERED and isinstance(value, bool):
            yield RuleViolation(("value",), f"must be a number or text with {self.op}")
        elif self.op is FilterOp.MATCHES and (not isinstance(value, str) or len(value) > LONGEST_PATTERN):
            yield RuleViolation(("value",), f"must be a regular expression of at most {LONGEST_PATTERN} characters")


Filters = Annotated[
    tuple[Filter, ...],
    Field(max_length=256),
    BeforeValidator(
        lambda value: [value] if isinstance(value, dict) else value,
        json_schema_input_type=Annotated[tuple[Filter, ...], Field(max_length=256)] | Filter,
    ),
]
"""A list of conditions that must all hold; one alone may stand without the list."""


def broken_patterns(filters_of_sources: Iterable[Filters | None]) -> Iterator[RuleViolation]:
    """What is wrong with the patterns of all sources; parsing stops where they are too long together."""
    length = 0
    for number, filters in enumerate(filters_of_sources):
        for index, each in enumerate(filters or ()):
            if each.op is not FilterOp.MATCHES:
                continue
            length += len(str(each.value))
            if length > MAX_PATTERNS_LENGTH:
                yield RuleViolation(
                    ("sources",), f"have filters with more than {MAX_PATTERNS_LENGTH} characters of patterns"
                )
                return
            try:
                _read_pattern(str(each.value))
            except (re.error, OverflowError, RecursionError) as error:
                yield RuleViolation(
                    ("sources", number, "filters", index, "value"), f"is no regular expression: {error}"
                )


SCHEMES = ("file", "hf", "s3", "http", "https", "scaidrive", "scaiatlas")
"""Of data sources. A path without a scheme is a file."""
MAX_SEED = 2**32 - 1
"""The largest that every framework takes."""


class FileFormat(StrEnum):
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
    return (Padding.LONGEST if value else Padding.NONE) if isinstance(value, bool) else value


class Sampling(Model):
    """Which part of a source is used."""

    weight: Positive | None = optional("Share of this source among all, relative to the others.")
    ratio: Annotated[float, Strict(), Field(gt=0, le=1)] | None = optional("Fraction of the rows to use.")
    max_samples: Count | None = optional("Maximum number of rows to use.")


class DataSource(Model):
    """One source of rows."""

    path: Annotated[Text, AfterValidator(_known_scheme)] = Field(
        description="A file, or a URI: file, hf, s3, http, https, scaidrive or scaiatlas."
    )
    type: Text | None = optional("The type of the source; inferred when null.")
    split: Annotated[Text, AfterValidator(_readable_split)] | None = optional(
        "Which rows: train, test, train[:1000], train[10%:20%], train+test. Null: train if file names "
        "contain splits, else all."
    )
    format: FileFormat | None = optional("The file format; inferred when null.")
    columns: Names | None = optional("The columns to read; all when null.")
    filters: Filters | None = optional("Only rows that meet all of these conditions are used.")
    sampling: Sampling | None = optional("The part of the source to use; all when null.")
    validation: Flag = Field(default=False, description="Its rows are for validation, and none is trained on.")


class PreprocessConfig(Model):
    """How rows become token sequences. Null leaves an option to the tokenizer."""

    tokenizer_id: Text | None = optional("The tokenizer; the base model's when null.")
    tokenizer_config: StringMap = Field(default_factory=dict, description="Options of the tokenizer.")
    add_bos: Flag | None = optional("Begin each sample with the tokenizer's BOS token.")
    add_eos: Flag | None = optional("End each sample with the tokenizer's EOS token.")
    padding: Annotated[Padding, BeforeValidator(_padding_of_flag, json_schema_input_type=Padding | bool)] | None = (
        optional("The length to pad samples to; true means longest.")
    )
    truncation: Flag | None = optional("Cut samples at max_seq_length.")
    chat_template: Verbatim | None = optional("The Jinja template that turns messages into text.")
    field_mapping: StringMap = Field(
        default_factory=dict, description="Maps our field names to the columns of the rows."
    )
    packing: Flag | None = optional(
        "Fill sequences of max_seq_length with several samples. Null: only with CONTINUED_PRETRAIN."
    )


Sources = Annotated[tuple[DataSource, ...], Field(min_length=1, max_length=1024)]


class DataConfig(RuledModel):
    """Where the training data is and how it is read."""

    sources: Sources = Field(description="At least one source of rows.")
    preprocess: PreprocessConfig = Field(
        default_factory=PreprocessConfig, description="How rows become token sequences."
    )
    max_seq_length: Count | None = optional("Maximum number of tokens of a sample; the model's own limit when null.")
    batch_size: Annotated[Count, null_means(1, Count)] = Field(
        default=1, description="Samples per rank and micro-step."
    )
    gradient_accumulation_steps: Count = Field(default=1, description="Micro-steps per optimizer step.")
    num_workers: Natural = Field(default=0, description="Data-loading processes per rank.")
    pin_memory: Flag | None = optional("Use page-locked host memory; null: only with a GPU.")
    validation_split: Annotated[float, Strict(), Field(ge=0, lt=1)] = Field(
        default=0.0, description="Fraction of the rows to use for validation; below 1."
    )
    seed: Annotated[int, Strict(), Field(ge=0, le=MAX_SEED)] | None = optional(
        "The random seed; null: the server chooses and records one."
    )

    @property
    def validates(self) -> bool:
        """Whether there are rows for validation."""
        return self.validation_split > 0 or any(source.validation for source in self.sources)

    def broken_rules(self) -> Iterator[RuleViolation]:
        yield from broken_patterns(source.filters for source in self.sources)
        if self.sources and all(source.validation for source in self.sources):
            yield RuleViolation(("sources",), "are all for validation; at least one must be trained on")
        for number, source in enumerate(self.sources):
            if source.validation and source.sampling is not None and source.sampling.weight is not None:
                message = "is a share of what is trained on, and the source is for validation; leave it out"
                yield RuleViolation(("sources", number, "sampling", "weight"), message)
