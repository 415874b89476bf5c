"""The types of the REST API's answers: the server's OpenAPI document is made of them, and the client returns them.

They are plain dictionaries with known keys, as they come over the wire. A newer server may send more keys and more
values of an enumeration. Imports neither pydantic nor anything that talks HTTP: what the OpenAPI document says about a
field beyond its Python type is in annotations, whose methods pydantic calls by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

JsonSchema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Doc:
    """The description of a field."""

    text: str

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], JsonSchema]) -> JsonSchema:
        return {**handler(core), "description": self.text}


@dataclass(frozen=True, slots=True)
class OneOf:
    """Text that is a value of an enumeration. It is no `StrEnum` for clients: a newer server may send other values."""

    values: type[StrEnum]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(self.values)


@dataclass(frozen=True, slots=True)
class Format:
    """The format of text."""

    name: str

    def __get_pydantic_json_schema__(self, core: Any, handler: Callable[[Any], JsonSchema]) -> JsonSchema:
        return {**handler(core), "format": self.name}


Timestamp = Annotated[str, Format("date-time")]
"""ISO 8601, in UTC."""
