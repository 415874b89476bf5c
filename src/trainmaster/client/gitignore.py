"""What a `.gitignore` says, read as git reads it (but for the named classes of characters, such as `[[:digit:]]`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One line."""

    ignores: bool
    """False: what it names is kept after all."""
    directories_only: bool
    whole_path: bool
    """Whether it names a path from the file's directory on, or a name anywhere below."""
    expression: re.Pattern[str]


class Ignoring:
    """The lines of one file; a later one has the last word."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._patterns = [pattern for line in lines if (pattern := _read(line)) is not None]

    def verdict(self, path: str, *, is_directory: bool) -> bool | None:
        """Whether a path, relative to the file's directory, is ignored; None where no line names it itself."""
        name = path.rpartition("/")[2]
        for pattern in reversed(self._patterns):
            if pattern.directories_only and not is_directory:
                continue
            if pattern.expression.fullmatch(path if pattern.whole_path else name):
                return pattern.ignores
        return None


def _read(line: str) -> Pattern | None:
    text = re.sub(r"((?:\\.|[^\\])*?) *\Z", r"\1", line.rstrip("\r"), flags=re.DOTALL)  # an escaped space stays
    ignores = not text.startswith("!")
    text = text if ignores else text[1:]
    directories_only = text.endswith("/")
    text = text.removesuffix("/")
    if not text or line.startswith("#"):
        return None
    try:
        expression = re.compile(_whole(text.removeprefix("/")), re.DOTALL)
    except re.error:
        return None  # as git passes over what it cannot read
    return Pattern(ignores=ignores, directories_only=directories_only, whole_path="/" in text, expression=expression)


def _whole(text: str) -> str:
    parts = text.split("/")
    written: list[str] = []
    for place, part in enumerate(parts):
        last = place == len(parts) - 1
        if part != "**":
            written.append(_part(part) + ("" if last else "/"))
        elif last:
            written.append(".+" if place else "[^/]+")
        else:
            written.append("(?:.+/)?")
    return "".join(written)


def _part(text: str) -> str:
    """One name of a path, in which `*` and `?` stop at its ends."""
    written, rest = "", text
    while rest:
        sign, rest = rest[0], rest[1:]
        if sign == "*":
            written += "[^/]*"
        elif sign == "?":
            written += "[^/]"
        elif sign == "\\" and rest:
            written, rest = written + re.escape(rest[0]), rest[1:]
        elif sign == "[":
            found = re.match(r"([!^]?)(\]?(?:\\.|[^\]\\])*)\]", rest)
            if found is None:
                raise re.error(f"{text} has a [ without its ]")
            inside = re.sub(r"([\[\]&~|])", r"\\\1", found[2])
            written, rest = written + f"[{'^/' if found[1] else ''}{inside}]", rest[found.end() :]
        else:
            written += re.escape(sign)
    return written
