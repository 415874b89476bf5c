"""Values of settings: read by the type of their field, from TOML and from text; and the problems with them."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from trainmaster.server.settings.settings import NamedPath


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingProblem:
    """One thing that is wrong."""

    place: str
    """`FILE:LINE: KEY`, a variable, or a flag."""
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class SettingsError(ValueError):
    """The settings are not valid; the server does not start."""

    def __init__(self, problems: Sequence[SettingProblem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)


def unknown(noun: str, name: str, known: Iterable[str]) -> str:
    """What to say about a name that is not known.

    >>> unknown("setting", "prot", ["port", "host"])
    "unknown setting; did you mean 'port'?"
    """
    near = difflib.get_close_matches(name.casefold(), {each.casefold(): each for each in known}, n=1)
    found = {each.casefold(): each for each in known}.get(near[0]) if near else None
    return f"unknown {noun}" + (f"; did you mean '{found}'?" if found else "; `trainmaster config` lists what there is")


def line_of(text: str, path: Sequence[str]) -> int | None:
    """The line of a TOML text where a key or a table begins; None when that cannot be told."""
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            table = _keys(stripped)
            if table[: len(path)] == tuple(path):
                return number
        elif "=" in stripped and (table + _keys(stripped.partition("=")[0] + "= 0"))[: len(path)] == tuple(path):
            return number
    return None


def _keys(line: str) -> tuple[str, ...]:
    """The keys that one line of TOML names, from the outermost in."""
    try:
        document: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    keys: list[str] = []
    while isinstance(document, dict) and len(document) == 1:
        ((key, document),) = document.items()
        keys.append(key)
    return tuple(keys)


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
_LONGEST_ECHO = 64
HIDDEN = "***"
"""Shown in the place of what is secret."""
_PASSWORD = re.compile(r"((?<=://)[^:/@\s]*:)[^@\s]*(?=@)|([?&]password=)[^&\s]*")
_PLURALS: Mapping[Any, str] = {int: "whole numbers", Path: "paths", NamedPath: "NAME=PATH", str: "texts"}


def kinds_of(model: type[Any]) -> Mapping[str, Any]:
    """The type of each field of a dataclass."""
    hints = get_type_hints(model)
    return {field.name: hints[field.name] for field in dataclasses.fields(model)}


def read_toml(field: dataclasses.Field[Any], kind: Any, raw: object, base: Path) -> Any:
    """The value of a field as a TOML file has it. Paths are relative to `base`, the file's directory.

    Raises:
        ValueError: it has the wrong type, or is out of bounds; the message says what it must be.
    """
    inner, optional = _without_none(kind)
    if optional and raw == "":
        return None
    return _bounded(field, _read(inner, raw, base))


def read_text(field: dataclasses.Field[Any], kind: Any, text: str, base: Path) -> Any:
    """The value of a field as text: of a variable, or of a flag. Parts of a list are separated by commas.

    Raises:
        ValueError: it has the wrong form, or is out of bounds; the message says what it must be.
    """
    inner, _ = _without_none(kind)
    if _is_list(inner):
        return _bounded(field, _read(inner, [part.strip() for part in text.split(",") if part.strip()], base))
    return _bounded(field, _read(inner, _plain(inner, text.strip()), base))


def without_password(text: str) -> str:
    """A text as it may be shown: a URL in it with its password hidden."""
    return _PASSWORD.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", text)


def in_words(kind: Any) -> str:
    """What a value of a type must be."""
    inner, _ = _without_none(kind)
    if _is_list(inner):
        member = get_args(inner)[0]
        return f"a list of {_PLURALS[member]}" if member in _PLURALS else f"a list of any of {', '.join(member)}"
    if _is_choice(inner):
        return "one of " + ", ".join(inner)
    return _WORDS[inner]


def toml_of(value: object) -> str:
    """A value as TOML; what is not set is an empty text."""
    match value:
        case None:
            return '""'
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case tuple() | list():
            return "[" + ", ".join(toml_of(each) for each in value) + "]"
        case frozenset():
            return toml_of(sorted(value))
        case _:
            escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'


def _without_none(kind: Any) -> tuple[Any, bool]:
    if get_origin(kind) in (Union, types.UnionType):
        (inner,) = (each for each in get_args(kind) if each is not type(None))
        return inner, True
    return kind, False


def _is_list(kind: Any) -> bool:
    return get_origin(kind) in (tuple, frozenset)


def _read(kind: Any, raw: object, base: Path) -> Any:
    match raw:
        case list() if _is_list(kind):
            member, make = get_args(kind)[0], get_origin(kind)
            return make(_read(member, each, base) for each in raw)
        case bool():
            fits = kind is bool
        case int():
            fits = kind in (int, float)
        case float():
            fits = kind is float and math.isfinite(raw)
        case str():
            fits = kind is str or (kind is Path and raw != "") or (_is_choice(kind) and raw in list(kind))
        case _:
            fits = False
    if isinstance(raw, str) and _is_choice(kind) and not fits:
        raise ValueError(f"'{raw[:_LONGEST_ECHO]}' is none of: {', '.join(kind)}")
    if kind is NamedPath and isinstance(raw, str):
        return _named_path(raw, base)
    if not fits:
        raise ValueError(f"must be {in_words(kind)}")
    if kind is Path:
        return (base / Path(str(raw)).expanduser()).absolute()
    return kind(raw)


def _named_path(text: str, base: Path) -> NamedPath:
    # A path may hold an equals sign; a name of a model does not.
    name, _, path = (part.strip() for part in text.partition("="))
    if not name or not path:
        raise ValueError(f"'{text[:_LONGEST_ECHO]}' is not NAME=PATH")
    return NamedPath(name, _read(Path, path, base))


def _is_choice(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def _plain(kind: Any, text: str) -> object:
    """Text as TOML would have the value; left alone where it makes no sense, to be refused with the rest."""
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
    if isinstance(value, tuple | frozenset) and field.default and not value:
        raise ValueError("must not be empty")
    if least is not None and value is not None and value < least:
        raise ValueError(f"must be at least {least}")
    if most is not None and value is not None and value > most:
        raise ValueError(f"must be at most {most}")
    return value
