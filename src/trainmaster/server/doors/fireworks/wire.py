"""JSON of the Fireworks API as protocol buffers write it: the base class of bodies, and types of values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, StringConstraints, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from trainmaster.server.core.fields import Broken, Matches, refuse

_DURATION = re.compile(r"(\d{1,12})(\.\d{1,9})?s")


class Body(BaseModel):
    """A body that clients send: members in camelCase or as the schema has them, unknown ones refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    refused: ClassVar[Mapping[str, str]] = {}
    """Members that have their place in the schema and no effect here, each with the reason: at their default they are
    taken, and with any other value refused."""

    @model_validator(mode="before")
    @classmethod
    def _without_refused(cls, document: Any) -> Any:
        if not isinstance(document, Mapping):
            return document
        names = dict(cls.refused)
        names |= {to_camel(name): reason for name, reason in cls.refused.items()}
        refuse(_used(document, names))
        return {name: value for name, value in document.items() if name not in names}


def _used(document: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[Broken]:
    for name, reason in names.items():
        if document.get(name):
            yield Broken((name,), reason)


def _seconds(value: object) -> object:
    if not isinstance(value, str):
        return value
    if _DURATION.fullmatch(value) is None:
        raise PydanticCustomError("rule", "must be a duration such as '1800s'")
    return float(value[:-1])


def _not_unspecified(value: str) -> str | None:
    return None if not value or value.upper().endswith("_UNSPECIFIED") else value


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("rule", "must be a number, not a truth value")
    return value


Whole = Annotated[int, BeforeValidator(_no_truth_value)]
"""A whole number, or a text that spells one, as protocol buffers may write it; `true` is not 1."""
Number = Annotated[float, BeforeValidator(_no_truth_value)]
Duration = Annotated[Number, BeforeValidator(_seconds)]
"""Seconds; on the wire a text such as `1800s`."""
ONE_LINE = Matches(r"[^\x00-\x1f\x7f]*", "must be one line, without control characters")
Line = Annotated[str, StringConstraints(strip_whitespace=True, max_length=256), ONE_LINE]
"""One line; an empty one is as good as none."""
MaybeLine = Annotated[Line | None, AfterValidator(lambda value: value or None)]
Choice = Annotated[Line | None, AfterValidator(lambda value: None if value is None else _not_unspecified(value))]
"""A value of an enumeration, whose first one stands for nothing."""


def moment(seconds: float | None) -> str | None:
    """A time as protocol buffers write it."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def duration(seconds: float) -> str:
    """A duration as protocol buffers write it."""
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def present(document: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the members that are not set."""
    return {name: value for name, value in document.items() if value is not None}
