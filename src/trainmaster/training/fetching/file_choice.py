"""Chooses the files of a data source: by format, split and, on the Hub, the dataset card. Pure."""

# ruff: noqa: A001, A002 - `format` is what it is everywhere else

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainmaster.server.core.training.sources import read_split
from trainmaster.training.data.formats import format_of, require_format
from trainmaster.training.document import LocalSource, Part
from trainmaster.training.steps import InputError

CARD = "README.md"
DEFAULT_SPLIT = "train"
_PREFERRED = ("parquet", "jsonl", "json", "csv", "arrow", "text")
"""Where a dataset has its rows in several formats."""
_WORDS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
_SHARD = re.compile(r"(?:^|/)(?P<split>\w+(?:\.\w+)*)-[0-9]{5}-of-[0-9]{5}[^/]*$")
_NOT_ROWS = frozenset({"dataset_infos.json", "dataset_info.json", "state.json", "config.json", "metadata.json"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    names: tuple[str, ...]
    """In the order in which they are read; a file that two parts of a split need is there twice."""
    format: str
    parts: tuple[Part, ...]

    def local(self, path: str, files: Sequence[Path], *, whole: bool = True) -> LocalSource:
        parts = self.parts if whole else ()
        return LocalSource(path=path, files=tuple(files), format=self.format, whole=whole, parts=parts)


def choose_file(name: str, shown: str, *, format: str | None, split: str | None) -> Chosen:
    """Choose the rows of a file that a source names: its splits are `train` and those in its name."""
    format = format or require_format(name, shown)
    there = {DEFAULT_SPLIT: [name], **{told: [name] for told in _splits_named_in(name.rpartition("/")[2])}}
    return _chosen(shown, split or DEFAULT_SPLIT, format, there.get, there)


def choose(
    names: Sequence[str], shown: str, *, format: str | None, split: str | None, explicit: bool = False
) -> Chosen:
    """Choose among the files of a directory or a pattern. Raises InputError where it cannot be told which.

    Without a split: the files of `train`, where a name tells it, else all; all that an `explicit` pattern chose.
    """
    rows = [name for name in names if name.rpartition("/")[2] not in _NOT_ROWS]
    formats = {name: found for name in rows if (found := format_of(name)) is not None}
    if format is None:
        kinds = sorted(set(formats.values()))
        if len(kinds) > 1:
            raise InputError(f"{shown} holds files of several formats ({', '.join(kinds)}); say which with `format`")
        if not kinds:
            raise InputError(f"{shown} holds no file whose name tells its format; say it with `format`")
        format = kinds[0]
    chosen = sorted(name for name, found in formats.items() if found == format)
    if not chosen and len(names) == 1:
        chosen = list(names)  # its name does not tell the format, but the source does
    if not chosen:
        raise InputError(f"{shown} holds no file of the format {format}")
    told = {split for name in chosen for split in _splits_named_in(name)} or {DEFAULT_SPLIT}
    there = dict.fromkeys([*(split for split in _WORDS if split in told), *sorted(told - set(_WORDS))])
    if split is None:
        if explicit or not (train := _of_split(chosen, DEFAULT_SPLIT)):
            train = chosen
        return Chosen(names=tuple(train), format=format, parts=(Part(files=len(train)),))
    return _chosen(shown, split, format, lambda wanted: _of_split(chosen, wanted), there)


def choose_from_hub(
    names: Sequence[str], shown: str, *, path: str, format: str | None, split: str | None, card: Mapping[str, Any]
) -> Chosen:
    """Choose among a Hub dataset's files, by its card. Raises InputError where it cannot be told which.

    `path` follows the dataset's name: a configuration, a file, a directory or a pattern; or nothing.
    """
    listed = _configured(card, path)
    if listed is not None:
        return _choose_by_card(names, shown, listed, format, split or DEFAULT_SPLIT)
    if path in names:
        return choose_file(path, shown, format=format, split=split)
    below = [name for name in names if not path or name.startswith(f"{path}/")]
    # Directories above all of them tell nothing about a file.
    inside = {name.removeprefix(f"{path}/"): name for name in below} or {
        name: name for name in names if _matches(name, path)
    }
    if not inside:
        raise InputError(f"{shown} holds no such file")
    found = choose(list(inside), shown, format=format or _preferred(list(inside)), split=split, explicit=not below)
    return replace(found, names=tuple(inside[name] for name in found.names))


def _choose_by_card(
    names: Sequence[str], shown: str, listed: Mapping[str, Sequence[str]], format: str | None, split: str
) -> Chosen:
    def files(wanted: str) -> list[str]:
        matching = [name for name in names if any(_matches(name, pattern) for pattern in listed.get(wanted, ()))]
        return [name for name in matching if name.rpartition("/")[2] not in _NOT_ROWS]

    everything = [name for part in read_split(split) for name in files(part.name)]
    format = format or _preferred(everything)
    if everything and format is None:
        format = require_format(everything[0], shown)

    def of_format(wanted: str) -> list[str] | None:
        if wanted not in listed:
            return None
        found = files(wanted)
        kept = found if len(found) == 1 else sorted(name for name in found if format_of(name) == format)
        if not kept:
            raise InputError(f"{shown} holds no file of its split '{wanted}'" + (f" in {format}" if format else ""))
        return kept

    return _chosen(shown, split, format or "", of_format, listed)


def _chosen(
    shown: str, split: str, format: str, files_of: Callable[[str], list[str] | None], there: Mapping[str, object]
) -> Chosen:
    try:
        wanted = read_split(split)
    except ValueError as error:
        raise InputError(f"{shown}: {error}") from None
    names: list[str] = []
    parts = []
    for part in wanted:
        files = files_of(part.name)
        if not files:
            raise InputError(f"{shown} has no split '{part.name}'; it has {', '.join(there)}")
        names += files
        parts.append(Part(files=len(files), rows=part.rows))
    return Chosen(names=tuple(names), format=format, parts=tuple(parts))


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the path; one with a slash at its end matches everything in that directory."""
    return any(fnmatch.fnmatch(name, f"{pattern}*" if pattern.endswith("/") else pattern) for pattern in patterns)


def card_data(text: str) -> Mapping[str, Any]:
    import yaml

    found = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    try:
        data = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    return data if isinstance(data, dict) else {}


def _configured(card: Mapping[str, Any], path: str) -> dict[str, list[str]] | None:
    """The patterns of each split in the card's configuration of this name; without a name, in its default one."""
    configs = [each for each in card.get("configs") or () if isinstance(each, dict) and each.get("data_files")]
    named = [each for each in configs if each.get("config_name", "default") == (path or "default")]
    default = [each for each in configs if each.get("default")] or configs[:1]
    chosen = named or (default if not path else [])
    return _splits(chosen[0]["data_files"]) if chosen else None


def _splits(data_files: Any) -> dict[str, list[str]]:
    entries = data_files if isinstance(data_files, list) else [data_files]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        if isinstance(entry, dict):
            paths = entry.get("path") or []
            splits.setdefault(str(entry.get("split", DEFAULT_SPLIT)), []).extend(
                [paths] if isinstance(paths, str) else map(str, paths)
            )
        else:
            splits.setdefault(DEFAULT_SPLIT, []).append(str(entry))
    return splits


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, pattern.replace("**/", ""))


def _preferred(names: Sequence[str]) -> str | None:
    formats = {format_of(name) for name in names if name.rpartition("/")[2] not in _NOT_ROWS}
    return next((each for each in _PREFERRED if each in formats), None)


def _splits_named_in(name: str) -> list[str]:
    if (shard := _SHARD.search(name)) is not None:
        return [_canonical(shard["split"])]
    return [split for split in _WORDS if _names_split(name, split)]


def _canonical(split: str) -> str:
    return next((usual for usual, words in _WORDS.items() if split.lower() in words.split("|")), split)


def _of_split(names: Sequence[str], split: str) -> list[str]:
    """The files of a split; where no path names one, all of them are `train`."""
    wanted = _canonical(split)
    told = {name: _splits_named_in(name) for name in names}
    if wanted == DEFAULT_SPLIT and not any(told.values()):
        return list(names)
    found = [name for name in names if wanted in told[name]]
    if found or wanted in _WORDS:
        return found
    # A name of the dataset's own, such as `en`.
    return [name for name in names if not _SHARD.search(name) and _names_split(name, split)]


def _names_split(name: str, split: str) -> bool:
    words = _WORDS.get(split, re.escape(split))
    return re.search(rf"(?:^|[^a-z0-9])(?:{words})(?:[^a-z0-9]|$)", name, re.IGNORECASE) is not None
