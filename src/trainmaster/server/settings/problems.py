"""What is wrong with settings, and where."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    place: str
    """`FILE:LINE: KEY`, a variable, or a flag."""
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class SettingsError(ValueError):
    """The settings make no sense; nothing is started with them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
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
