"""`data_config.sources[].filters`: which rows of a source are used."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from trainmaster.server.core.fields import Broken, Model, Text, is_unicode, refuse

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
    "==": FilterOp.EQ,
    "=": FilterOp.EQ,
    "!=": FilterOp.NE,
    "<": FilterOp.LT,
    "<=": FilterOp.LE,
    ">": FilterOp.GT,
    ">=": FilterOp.GE,
}
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


class Filter(Model):
    """A condition on a column of each row; rows for which it does not hold are left out."""

    column: Text = Field(description="The row's field.")
    op: Annotated[
        FilterOp,
        BeforeValidator(
            lambda op: SYMBOLS.get(op, op) if isinstance(op, str) else op,
            json_schema_input_type=FilterOp | Annotated[str, Field(pattern=r"^(?:[=!<>]=|[=<>])$")],
        ),
    ] = Field(description="How it is compared; `==`, `!=`, `<`, `<=`, `>` and `>=` are taken too.")
    value: Annotated[object, AfterValidator(_plain), _VALUE_SCHEMA] | None = Field(
        default=None, description="With what: a list for in and not_in, a pattern for matches, none for is_null."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self._broken())
        return self

    def _broken(self) -> Iterator[Broken]:
        value = self.value
        if self.op in _ALONE:
            if value is not None:
                yield Broken(("value",), f"{self.op} takes no value; leave it out")
        elif value is None:
            yield Broken(("value",), f"required with {self.op}; whether there is a value at all is is_null or not_null")
        elif self.op in _OF_MANY:
            if not isinstance(value, list) or not value:
                yield Broken(("value",), f"must be a list of values with {self.op}")
        elif isinstance(value, list):
            yield Broken(("value",), f"must be a single value with {self.op}; for a list there are in and not_in")
        elif self.op in _ORDERED and isinstance(value, bool):
            yield Broken(("value",), f"must be a number or text with {self.op}")
        elif self.op is FilterOp.MATCHES and (not isinstance(value, str) or len(value) > LONGEST_PATTERN):
            yield Broken(("value",), f"must be a regular expression of at most {LONGEST_PATTERN} characters")


def _listed(value: object) -> object:
    return [value] if isinstance(value, dict) else value


Filters = Annotated[
    tuple[Filter, ...],
    Field(max_length=256),
    BeforeValidator(_listed, json_schema_input_type=Annotated[tuple[Filter, ...], Field(max_length=256)] | Filter),
]
"""A list of conditions that must all hold; one alone may stand without the list."""


def broken_patterns(filters_of_sources: Iterable[Filters | None]) -> Iterator[Broken]:
    """What is wrong with the patterns of all sources; parsing stops where they are too long together."""
    length = 0
    for number, filters in enumerate(filters_of_sources):
        for index, each in enumerate(filters or ()):
            if each.op is not FilterOp.MATCHES:
                continue
            length += len(str(each.value))
            if length > MAX_PATTERNS_LENGTH:
                yield Broken(("sources",), f"have filters with more than {MAX_PATTERNS_LENGTH} characters of patterns")
                return
            try:
                _read_pattern(str(each.value))
            except (re.error, OverflowError, RecursionError) as error:
                yield Broken(("sources", number, "filters", index, "value"), f"is no regular expression: {error}")
