"""Descriptions of all settings, for `trainmaster config`, the example file and the documentation."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.server.settings.declared import TABLES
from trainmaster.server.settings.resolution import Resolved, SettingOrigin, variable_of
from trainmaster.server.settings.settings import Settings
from trainmaster.server.settings.values import HIDDEN, in_words, kinds_of, toml_of, without_password

_HEAD = """\
# Settings of a Trainmaster server. Every line that is commented out shows a default.
# Pass the file with --config, name it in TRAINMASTER_CONFIG, or save it as config.toml in the data directory.
# Variables (TRAINMASTER_PORT=8080) win over this file, and flags over both. Paths may begin with ~ and are
# relative to this file.
"""

_TABLES = """\

# The cluster. What follows is applied at every start, and wins over what was set before for the same names.

#[queues.research]
#weight = 2.0
#quota_gpus = 8

#[nodes."gpu-box-1"]
#labels = ["rack-3"]
#capabilities = ["infiniband"]

#[accounts.vision]
#uid = 1500

#[webhooks.chat]
#account = "default"
#url = "https://hooks.example.com/trainmaster"
#statuses = ["COMPLETED", "FAILED"]
#secret = "at least sixteen characters"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDescription:
    name: str
    type: str
    default: object
    meaning: str
    variable: str
    flag: str
    secret: bool


def settings() -> Iterator[SettingDescription]:
    kinds, words = kinds_of(Settings), meanings(Settings)
    for each in dataclasses.fields(Settings):
        default = "~/.trainmaster" if each.name == "data_dir" else each.default
        yield SettingDescription(
            name=each.name,
            type=in_words(kinds[each.name]),
            default=default,
            meaning=words[each.name],
            variable=variable_of(each.name),
            flag=each.metadata.get("flag", ""),
            secret=each.metadata.get("secret", False),
        )


def shown(resolved: Resolved) -> Iterator[tuple[SettingDescription, object, SettingOrigin]]:
    """Every setting with its value, secrets hidden, and where the value comes from."""
    for each in settings():
        value = getattr(resolved.settings, each.name)
        yield each, _masked(each, value), resolved.origins[each.name]


def shown_tables(resolved: Resolved) -> dict[str, dict[str, Mapping[str, object]]]:
    """The file's tables of the cluster, secrets hidden."""
    return {
        table: {
            name: {
                each.name: HIDDEN if each.metadata.get("secret") else getattr(entry, each.name)
                for each in dataclasses.fields(entry)
            }
            for name, entry in getattr(resolved.declared, table).items()
        }
        for table in TABLES
    }


def example() -> str:
    """A settings file with every setting at its default, commented out."""
    lines = [_HEAD]
    for each in settings():
        lines += textwrap.wrap(each.meaning, width=110, initial_indent="# ", subsequent_indent="# ")
        lines += [f"#{each.name} = {toml_of(each.default)}", ""]
    return "\n".join(lines) + _TABLES


def meanings(model: type[Any]) -> Mapping[str, str]:
    """The docstring below each field of a dataclass."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for before, after in zip(definition.body, definition.body[1:], strict=False):
        match before, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                found[name] = " ".join(text.split())
    return found


def _masked(each: SettingDescription, value: object) -> object:
    if each.secret:
        return HIDDEN if value else value
    return without_password(value) if isinstance(value, str) else value
