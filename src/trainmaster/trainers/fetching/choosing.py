"""Which of many files are a source: by format, split and, on the Hub, by what the dataset's card says. Pure."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trainmaster.trainers.data.formats import format_of, require_format
from trainmaster.trainers.errors import InputError

CARD = "README.md"
DEFAULT_SPLIT = "train"
_PREFERRED = ("parquet", "jsonl", "json", "csv", "arrow", "text")
"""Where a dataset has its rows in several formats."""
_WORDS: Mapping[str, str] = MappingProxyType(
    {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
)
_NOT_ROWS = frozenset({"dataset_infos.json", "dataset_info.json", "state.json", "config.json", "metadata.json"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Some files, all in one format."""

    names: tuple[str, ...]
    format: str


def choose(names: Sequence[str], shown: str, *, format: str | None, split: str | None) -> Chosen:  # noqa: A002
    """Which files of a directory, or of a pattern, are meant.

    Raises:
        InputError: none, or it cannot be told which.
    """
    if len(names) == 1:
        return Chosen(names=(names[0],), format=format or require_format(names[0], shown))
    rows = [name for name in names if name.rpartition("/")[2] not in _NOT_ROWS]
    formats = {name: found for name in rows if (found := format_of(name)) is not None}
    if format is None:
        kinds = sorted(set(formats.values()))
        if len(kinds) > 1:
            raise InputError(f"{shown} holds files of several formats ({', '.join(kinds)}); say which with `format`")
        if not kinds:
            raise InputError(f"{shown} holds no file whose name tells its format; say it with `format`")
        format = kinds[0]  # noqa: A001
    chosen = [name for name, found in formats.items() if found == format]
    if not chosen:
        raise InputError(f"{shown} holds no file of the format {format}")
    if split is not None:
        chosen = _of_split(chosen, split)
        if not chosen:
            raise InputError(f"{shown} holds no file whose name tells the split '{split}'")
    return Chosen(names=tuple(sorted(chosen)), format=format)


def choose_from_hub(
    names: Sequence[str],
    shown: str,
    *,
    path: str,
    format: str | None,  # noqa: A002
    split: str | None,
    card: Mapping[str, Any],
) -> Chosen:
    """Which files of a dataset on the Hub are meant.

    Args:
        names: all its files.
        shown: the source's name.
        path: what follows the dataset's name: a configuration, a file, a directory or a pattern; or nothing.
        format: the format that is wanted, if one is.
        split: the split that is wanted; None: train, where there is one.
        card: the data in front of the dataset's card.

    Raises:
        InputError: none, or it cannot be told which.
    """
    wanted = split or DEFAULT_SPLIT
    listed = _configured(card, path)
    if listed is not None:
        patterns = listed.get(wanted)
        if patterns is None:
            raise InputError(f"{shown} has no split '{wanted}'; it has {', '.join(listed)}")
        names = [name for name in names if any(_matches(name, pattern) for pattern in patterns)]
        split = None
    elif path:
        names = [name for name in names if name == path or name.startswith(f"{path}/") or _matches(name, path)]
    if not names:
        raise InputError(f"{shown} holds no such file")
    if len(names) > 1:
        formats = {format_of(name) for name in names if name.rpartition("/")[2] not in _NOT_ROWS}
        format = format or next((each for each in _PREFERRED if each in formats), None)  # noqa: A001
        named = _of_split([name for name in names if format_of(name) == format], DEFAULT_SPLIT)
        if split is None and listed is None and named:
            split = DEFAULT_SPLIT
    return choose(names, shown, format=format, split=split)


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file is left out: a pattern matches its path, or names a directory above it with a slash at its end.

    >>> is_ignored("onnx/model.bin", ["*.bin"]), is_ignored("onnx/model.pb", ["onnx/"]), is_ignored("a.txt", ["*.bin"])
    (True, True, False)
    """
    return any(fnmatch.fnmatch(name, f"{pattern}*" if pattern.endswith("/") else pattern) for pattern in patterns)


def card_data(text: str) -> Mapping[str, Any]:
    """The data in front of a dataset's card; nothing where it cannot be read."""
    import yaml

    found = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.DOTALL)
    try:
        data = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return {}
    return data if isinstance(data, dict) else {}


def _configured(card: Mapping[str, Any], path: str) -> dict[str, list[str]] | None:
    """The patterns of each split, where the card has a configuration of this name; without a name, its default."""
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


def _of_split(names: Sequence[str], split: str) -> list[str]:
    words = _WORDS.get(split, re.escape(split))
    pattern = re.compile(rf"(?:^|[^a-z0-9])(?:{words})(?:[^a-z0-9]|$)", re.IGNORECASE)
    return [name for name in names if pattern.search(name)]
