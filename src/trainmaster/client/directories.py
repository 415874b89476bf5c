"""The files of a directory that are sent with a job: those that git would track, by the .gitignore files."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

Line = tuple[bool, re.Pattern[str]]
"""A line of an ignore file: whether it ignores, or keeps after all, and the paths that it names.

Paths are relative to the file's directory; that of a directory ends with a slash.
"""


def _read(line: str) -> Line | None:
    text = re.sub(r"((?:\\.|[^\\])*?) *\Z", r"\1", line.rstrip("\r"), flags=re.DOTALL)  # an escaped space stays
    ignores = not text.startswith("!")
    text = text if ignores else text[1:]
    end = "/" if text.endswith("/") else "/?"  # a slash at the end names directories alone
    text = text.removesuffix("/")
    if not text or line.startswith("#"):
        return None
    start = "" if "/" in text else "(?:.*/)?"  # without a slash it names what is anywhere below
    try:
        return ignores, re.compile(start + _whole(text.removeprefix("/")) + end, re.DOTALL)
    except re.error:
        return None  # git ignores such a line, too


def _whole(text: str) -> str:
    parts = text.split("/")
    written: list[str] = []
    for place, part in enumerate(parts):
        last = place == len(parts) - 1
        if part != "**":
            # A name is not empty: `data/*` names what is in `data/`, and not `data/` itself.
            written.append(f"(?=[^/]){_part(part)}" if last else f"{_part(part)}/")
        elif last:
            written.append(".+" if place else "[^/]+")
        else:
            written.append("(?:.+/)?")
    return "".join(written)


def _part(text: str) -> str:
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


LEFT_OUT = frozenset({"__pycache__", ".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache"})
"""Directories that are never sent with the one around them."""
_IGNORING = ".gitignore"

Rules = tuple[tuple[Path, list[Line]], ...]
"""Ignore files with their directories, from the outermost to the innermost. The last line that names a path decides."""


def kept_files(directory: Path) -> list[str]:
    """The files to ship, relative to the directory, sorted.

    In a work tree of git: what is tracked, and what is neither tracked nor ignored. Elsewhere, or without git, all that
    no `.gitignore` names, but caches and environments. A directory that is itself ignored was named on purpose: only
    what the ignore files in it say counts then. Raises ValueError if an ignore file cannot be read.
    """
    kept = _of_git(directory)
    return sorted(_of_disk(directory) if kept is None else kept)


def files_below(directory: Path) -> Iterator[Path]:
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(set(directories) - LEFT_OUT)
        yield from (path for name in sorted(names) if _to_ship(path := Path(parent, name)))


def _to_ship(path: Path) -> bool:
    # A link that leads nowhere is an error later; a socket or a pipe is nothing to ship.
    return path.is_file() or (path.is_symlink() and not path.exists())


def _of_git(directory: Path) -> list[str] | None:
    """None where git does not manage the directory."""
    listed = _git(directory, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is None or listed.returncode != 0:
        return None
    if not listed.stdout:
        ignored = _git(directory, "check-ignore", "-q", ".")
        return None if ignored is not None and ignored.returncode == 0 else []
    names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
    # What was deleted and is still tracked is not there; a submodule is a directory.
    return [name for name in names if _to_ship(directory / name)]


def _git(directory: Path, *words: str) -> subprocess.CompletedProcess[bytes] | None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(["git", "-C", str(directory), *words], capture_output=True, check=False, env=environment)
    except OSError:
        return None


def _of_disk(directory: Path) -> Iterator[str]:
    top = Path(os.path.abspath(directory))
    above = _rules_above(top)
    rules: dict[Path, Rules] = {top.parent: () if _ignored(top, above, is_directory=True) else above}
    for place, directories, names in os.walk(top):
        parent = Path(place)
        said = rules[parent] = rules[parent.parent] + _rules_of(parent, parent / _IGNORING)
        directories[:] = [
            name
            for name in directories
            if name not in LEFT_OUT
            and not (parent / name / "pyvenv.cfg").exists()
            and not _ignored(parent / name, said, is_directory=True)
        ]
        for path in (parent / name for name in names):
            if _to_ship(path) and not _ignored(path, said, is_directory=False):
                yield path.relative_to(top).as_posix()


def _rules_above(top: Path) -> Rules:
    """The ignore files of the work tree around a directory, for where git is not installed."""
    root = next((parent for parent in top.parents if (parent / ".git").exists()), None)
    if root is None or (top / ".git").exists():
        root = top
    between = [parent for parent in reversed(top.parents) if parent.is_relative_to(root)]
    found = _rules_of(root, root / ".git" / "info" / "exclude")
    for parent in between:
        found += _rules_of(parent, parent / _IGNORING)
    return found


def _rules_of(base: Path, file: Path) -> Rules:
    try:
        lines = file.read_text("utf-8-sig", errors="surrogateescape").split("\n")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ()
    except OSError as error:
        raise ValueError(f"cannot read the ignore file {file}: {error.strerror}") from error
    return ((base, [read for line in lines if (read := _read(line)) is not None]),)


def _ignored(path: Path, rules: Rules, *, is_directory: bool) -> bool:
    for base, lines in reversed(rules):
        relative = path.relative_to(base).as_posix() + ("/" if is_directory else "")
        for ignores, named in reversed(lines):
            if named.fullmatch(relative):
                return ignores
    return False
