"""Values of settings: read by the type of their field, from TOML and from text, and written as TOML."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainmaster.server.core.errors import LONGEST_ECHO, nearest
from trainmaster.server.settings.settings import NamedPath

HIDDEN = "***"
"""Shown in place of a secret."""

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Path: "a path",
    NamedPath: "NAME=PATH",
    str: "a text",
}
_PLURALS: Mapping[Any, str] = {int: "whole numbers", Path: "paths", NamedPath: "NAME=PATH", str: "texts"}
_PASSWORD = re.compile(r"((?<=://)[^:/@\s]*:)[^@\s]*(?=@)|([?&]password=)[^&\s]*")

Complain = Callable[[tuple[str, ...], str], None]
"""Called with the path of a key and what is wrong there."""


def kinds_of(model: type[Any]) -> Mapping[str, Any]:
    hints = get_type_hints(model)
    return {field.name: hints[field.name] for field in dataclasses.fields(model)}


def read_table(
    model: type[Any],
    path: tuple[str, ...],
    table: Mapping[str, object],
    base: Path,
    complain: Complain,
    *,
    noun: str,
    others: Iterable[str] = (),
) -> dict[str, Any]:
    """A TOML table's values for a dataclass; complains of wrong values and unknown keys (a `noun`) but `others`."""
    fields, kinds = {field.name: field for field in dataclasses.fields(model)}, kinds_of(model)
    values: dict[str, Any] = {}
    for key, raw in table.items():
        if key not in fields:
            complain((*path, key), unknown(noun, key, [*fields, *others]))
            continue
        try:
            values[key] = read_toml(fields[key], kinds[key], raw, base)
        except ValueError as error:
            complain((*path, key), str(error))
    return values


def unknown(noun: str, name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f"unknown {noun}; " + (f"did you mean '{near}'?" if near else "`trainmaster config` lists what there is")


def read_toml(field: dataclasses.Field[Any], kind: Any, raw: object, base: Path) -> Any:
    """The value of a field as a TOML file has it. Paths are relative to `base`, the file's directory."""
    inner, optional = _without_none(kind)
    return None if optional and raw == "" else _bounded(field, _read(inner, raw, base))


def read_text(field: dataclasses.Field[Any], kind: Any, text: str, base: Path) -> Any:
    """The value of a field as text: of a variable, or of a flag. Commas separate the parts of a list."""
    inner, _ = _without_none(kind)
    if _is_list(inner):
        return _bounded(field, _read(inner, [part.strip() for part in text.split(",") if part.strip()], base))
    return _bounded(field, _read(inner, _plain(inner, text.strip()), base))


def without_password(text: str) -> str:
    """A text with the passwords of URLs in it hidden."""
    return _PASSWORD.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", text)


def in_words(kind: Any) -> str:
    """What a value of a type must be."""
    inner, _ = _without_none(kind)
    if _is_list(inner):
        member = get_args(inner)[0]
        return f"a list of {_PLURALS[member]}" if member in _PLURALS else f"a list of any of {', '.join(member)}"
    return "one of " + ", ".join(inner) if _is_choice(inner) else _WORDS[inner]


def toml_of(value: object) -> str:
    """A value as TOML, which writes values as JSON does; None, for which TOML has no word, is an empty text."""

    def plain(each: object) -> object:
        return sorted(each) if isinstance(each, frozenset) else str(each)

    return json.dumps("" if value is None else value, ensure_ascii=False, default=plain)


def _without_none(kind: Any) -> tuple[Any, bool]:
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (each for each in get_args(kind) if each is not type(None))
        return inner, True
    return kind, False


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (tuple, frozenset)


def _is_choice(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def _read(kind: Any, raw: object, base: Path) -> Any:
    if isinstance(raw, str) and _is_choice(kind) and raw not in list(kind):
        raise ValueError(f"'{raw[:LONGEST_ECHO]}' is none of: {', '.join(kind)}")
    match raw:
        case list() if _is_list(kind):
            member, make = get_args(kind)[0], get_origin(kind)
            return make(_read(member, each, base) for each in raw)
        case str() if kind is NamedPath:
            return _named_path(raw, base)
        case str() if kind is Path and raw:
            return (base / Path(raw).expanduser()).absolute()
        case str() if kind is str or _is_choice(kind):
            return kind(raw)
        case bool() if kind is bool:
            return raw
        case int() if kind in (int, float) and not isinstance(raw, bool):
            return kind(raw)
        case float() if kind is float and math.isfinite(raw):
            return raw
    raise ValueError(f"must be {in_words(kind)}")


def _named_path(text: str, base: Path) -> NamedPath:
    # A path may hold an equals sign; a name of a model does not.
    name, _, path = (part.strip() for part in text.partition("="))
    if not name or not path:
        raise ValueError(f"'{text[:LONGEST_ECHO]}' is not NAME=PATH")
    return NamedPath(name, _read(Path, path, base))


def _plain(kind: Any, text: str) -> object:
    """The value that TOML would have for a text; the text itself where there is none, which `_read` then refuses."""
    if kind is bool and text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    if kind in (int, float):
        try:
            return int(text) if kind is int else float(text)
        except ValueError:
            return text
    return text


def _bounded(field: dataclasses.Field[Any], value: Any) -> Any:
    least, most = field.metadata.get("minimum"), field.metadata.get("maximum")
    pattern = field.metadata.get("pattern")
    if pattern is not None and re.fullmatch(pattern, value) is None:
        raise ValueError(f"'{value[:LONGEST_ECHO]}' is not s3://bucket/prefix")
    if isinstance(value, tuple | frozenset) and field.default and not value:
        raise ValueError("must not be empty")
    if least is not None and value is not None and value < least:
        raise ValueError(f"must be at least {least}")
    if most is not None and value is not None and value > most:
        raise ValueError(f"must be at most {most}")
    return value
