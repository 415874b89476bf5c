"""Job files: YAML or JSON, with values set from the command line."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainmaster.cli.exits import UsageError
from trainmaster.client.training_files import did_you_mean
from trainmaster.plain_yaml import YamlError, parse_yaml

STDIN = "-"
_DATA = "`trainmaster init --data {file}` writes one that trains on this data"
_NOT_JOB_FILES = {
    ".py": "write one with `workload: {{kind: script, path: {file}}}`",
    **dict.fromkeys((".jsonl", ".csv", ".tsv", ".parquet", ".arrow"), _DATA),
}
"""By the end of the name: what people hand in instead of a job file, and what to do."""


def load(file: str) -> tuple[dict[str, Any], Path]:
    """The document of a job file (`-` is the standard input), and the directory that its paths are relative to."""
    if (instead := _NOT_JOB_FILES.get(Path(file).suffix)) is not None:
        raise UsageError(f"{file} is not a job file, which is YAML or JSON; {instead.format(file=shlex.quote(file))}")
    try:
        text = sys.stdin.read() if file == STDIN else Path(file).read_text()
    except OSError as error:
        meant = did_you_mean(Path(file)) if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"cannot read {file}: {error.strerror}{meant}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not text in UTF-8") from error
    document = _json(text, file) if text.lstrip().startswith("{") else _yaml(text, file)
    if not isinstance(document, dict):
        raise UsageError(f"{file} is no job file: it should hold fields such as `name` and `workload`")
    try:
        json.dumps(document, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{file} holds a value that JSON cannot: {error}") from error
    return document, Path.cwd() if file == STDIN else Path(file).parent


def set_values(document: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    r"""A copy with `path=value` settings; the path has dots, `\.` is a dot in a name, and the value is YAML."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    for setting in settings:
        path, equals, value = setting.partition("=")
        names = [name.replace("\\.", ".") for name in re.split(r"(?<!\\)\.", path)]
        if not equals or not all(names):
            raise UsageError(f"cannot read --set {setting!r}: write it as path.to.field=value")
        _set(copy, names, _yaml(value, f"--set {path}"), path)
    return copy


def changed(
    document: dict[str, Any], settings: Sequence[str], *, name: str | None = None, labels: Sequence[str] = ()
) -> dict[str, Any]:
    copy = set_values(document, settings)
    if name is not None:
        copy["name"] = name
    if labels:
        before = copy.get("labels") or {}
        if not isinstance(before, dict):
            raise UsageError("labels: must be names with values, such as {team: vision}")
        copy["labels"] = {**before, **pairs(labels, "--label")}
    return copy


def pairs(settings: Sequence[str], option: str) -> dict[str, str]:
    found = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not key or not equals:
            raise UsageError(f"cannot read {option} {setting!r}: write it as key=value")
        found[key] = value
    return found


def _set(node: Any, names: list[str], value: Any, path: str) -> None:
    *before, last = names
    for name in before:
        key = _key(node, name, path)
        if isinstance(node, dict) and node.get(name) is None:
            node[name] = {}
        node = node[key]
    node[_key(node, last, path)] = value


def _key(node: Any, name: str, path: str) -> str | int:
    if isinstance(node, dict):
        return name
    if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
        return int(name)
    what = f"a list of {len(node)}" if isinstance(node, list) else "a single value"
    raise UsageError(f"--set {path}: there is no '{name}' in {what}")


def _json(text: str, file: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        # A YAML document may begin with a brace too.
        try:
            return _yaml(text, file)
        except UsageError:
            raise UsageError(f"{file} is not valid JSON: {error}") from error


def _yaml(text: str, file: str) -> Any:
    try:
        return parse_yaml(text, file)
    except YamlError as error:
        raise UsageError(str(error)) from error
