"""Resolution of settings from their sources: defaults, file, environment variables and flags."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from trainmaster.protocol import environment as in_job
from trainmaster.server import failpoints
from trainmaster.server.settings.declared import TABLES, Declared, read_declared
from trainmaster.server.settings.settings import HOME_VARIABLE, Settings, default_data_dir
from trainmaster.server.settings.values import (
    SettingProblem,
    SettingsError,
    kinds_of,
    line_of,
    read_text,
    read_toml,
    unknown,
    without_password,
)

PREFIX = "TRAINMASTER_"
CONFIG_VARIABLE = "TRAINMASTER_CONFIG"
FILE_NAME = "config.toml"
"""In the data directory; taken when no other file is named."""

_OF_OTHERS = frozenset(
    {
        CONFIG_VARIABLE,
        HOME_VARIABLE,
        "TRAINMASTER_URL",
        "TRAINMASTER_API_KEY",
        "TRAINMASTER_CA",
        "TRAINMASTER_DEBUG",
        failpoints.ENVIRONMENT_VARIABLE,
        *(value for value in vars(in_job).values() if isinstance(value, str) and value.startswith(PREFIX)),
    }
)
"""Variables with our prefix that are no settings: those of clients, of jobs and of tests."""

_FIELDS = {each.name: each for each in dataclasses.fields(Settings)}


class SettingSource(StrEnum):
    """Where a value comes from; later ones win."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOrigin:
    """Where the value of a setting comes from."""

    source: SettingSource
    place: str = ""
    """`FILE:LINE`, a variable or a flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A server's settings, where they come from, and what the file says of the cluster."""

    settings: Settings
    origins: Mapping[str, SettingOrigin]
    declared: Declared = field(default_factory=Declared)
    file: Path | None = None


def resolve(
    flags: Mapping[str, object] | None = None,
    *,
    config: Path | None = None,
    environment: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Resolved:
    """The settings of a server.

    Args:
        flags: what was asked for by hand, by the names of the fields; None stands for what was not.
        config: the file; by default $TRAINMASTER_CONFIG, or `config.toml` in the data directory if it is there.
        environment: by default that of this process.
        defaults: other defaults than those of the fields.

    Raises:
        SettingsError: something is unknown or wrong; all that is wrong is in it.
    """
    return _Resolving(flags or {}, os.environ if environment is None else environment, defaults or {}).run(config)


def variable_of(name: str) -> str:
    """The variable that sets a setting."""
    return PREFIX + name.upper()


def forget_variables() -> None:
    """Take the variables that set settings out of this process: what it starts is not to inherit them."""
    for name in _FIELDS:
        os.environ.pop(variable_of(name), None)


class _Resolving:
    def __init__(
        self, flags: Mapping[str, object], environment: Mapping[str, str], defaults: Mapping[str, object]
    ) -> None:
        self._environment = environment
        self._kinds = kinds_of(Settings)
        self._problems: list[SettingProblem] = []
        self._declared = Declared()
        home = environment.get(HOME_VARIABLE)
        origin = (
            SettingOrigin(source=SettingSource.ENVIRONMENT, place=HOME_VARIABLE)
            if home
            else SettingOrigin(source=SettingSource.DEFAULT)
        )
        self._by_default: dict[str, tuple[Any, SettingOrigin]] = {
            "data_dir": (Path(home or default_data_dir()).absolute(), origin),
            **{name: (value, SettingOrigin(source=SettingSource.DEFAULT)) for name, value in defaults.items()},
        }
        self._by_file: dict[str, tuple[Any, SettingOrigin]] = {}
        self._by_variable = self._read_variables()
        self._by_flag = self._read_flags(flags)

    def run(self, config: Path | None) -> Resolved:
        named = config or self._environment.get(CONFIG_VARIABLE)
        expected = self._data_dir()
        file = Path(named).expanduser().absolute() if named else expected / FILE_NAME
        text = self._text_of(file, missing_ok=not named)
        if text is not None:
            self._read_file(file, text)
        if not named and self._data_dir() != expected:
            self._complain(
                self._by_file["data_dir"][1].place,
                f"data_dir is where this file was found ({expected}), and cannot be another in it; "
                "name the file with --config",
            )
        if self._problems:
            raise SettingsError(self._problems)
        found = self._by_default | self._by_file | self._by_variable | self._by_flag
        origins = dict.fromkeys(_FIELDS, SettingOrigin(source=SettingSource.DEFAULT))
        return Resolved(
            settings=Settings(**{name: value for name, (value, _) in found.items()}),
            origins=origins | {name: origin for name, (_, origin) in found.items()},
            declared=self._declared,
            file=None if text is None else file,
        )

    def _complain(self, place: str, message: str) -> None:
        self._problems.append(SettingProblem(place=place, message=message))

    def _read_variables(self) -> dict[str, tuple[Any, SettingOrigin]]:
        found: dict[str, tuple[Any, SettingOrigin]] = {}
        names = {variable_of(name): name for name in _FIELDS}
        for variable, text in sorted(self._environment.items()):
            if not variable.startswith(PREFIX) or not text:
                continue
            if variable not in names:
                if variable not in _OF_OTHERS:
                    self._complain(variable, unknown("setting", variable, names))
                continue
            name = names[variable]
            try:
                value = read_text(_FIELDS[name], self._kinds[name], text, Path.cwd())
                found[name] = (value, SettingOrigin(source=SettingSource.ENVIRONMENT, place=variable))
            except ValueError as error:
                self._complain(variable, str(error))
        return found

    def _read_flags(self, flags: Mapping[str, object]) -> dict[str, tuple[Any, SettingOrigin]]:
        found: dict[str, tuple[Any, SettingOrigin]] = {}
        for name, given in flags.items():
            if given is None or given == []:
                continue
            flag = _FIELDS[name].metadata["flag"]
            try:
                if isinstance(given, str):
                    value = read_text(_FIELDS[name], self._kinds[name], given, Path.cwd())
                else:
                    raw = [str(each) for each in given] if isinstance(given, list) else given
                    raw = str(raw) if isinstance(raw, Path) else raw
                    value = read_toml(_FIELDS[name], self._kinds[name], raw, Path.cwd())
                if isinstance(value, str) and without_password(value) != value:
                    raise ValueError(
                        "must hold no password: everybody on this machine can read it in the list of processes; "
                        f"set {variable_of(name)}, or {name} in the settings file"
                    )
                found[name] = (value, SettingOrigin(source=SettingSource.FLAG, place=flag))
            except ValueError as error:
                self._complain(flag, str(error))
        return found

    def _data_dir(self) -> Path:
        found = self._by_default | self._by_file | self._by_variable | self._by_flag
        return Path(found["data_dir"][0])

    def _text_of(self, file: Path, *, missing_ok: bool) -> str | None:
        try:
            return file.read_text(encoding="utf-8")
        except OSError as error:
            if not (missing_ok and isinstance(error, FileNotFoundError | NotADirectoryError)):
                self._complain(str(file), f"cannot be read: {error.strerror}")
        except UnicodeDecodeError:
            self._complain(str(file), "is not valid TOML: it is no UTF-8")
        return None

    def _read_file(self, file: Path, text: str) -> None:
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            self._complain(str(file), f"is not valid TOML: {error}")
            return

        def place(path: tuple[str, ...]) -> str:
            line = line_of(text, path)
            return str(file) if line is None else f"{file}:{line}"

        for key, raw in document.items():
            if key in TABLES:
                continue
            if key not in _FIELDS:
                self._complain(f"{place((key,))}: {key}", unknown("setting", key, [*_FIELDS, *TABLES]))
                continue
            try:
                value = read_toml(_FIELDS[key], self._kinds[key], raw, file.parent)
                self._by_file[key] = (value, SettingOrigin(source=SettingSource.FILE, place=place((key,))))
            except ValueError as error:
                self._complain(f"{place((key,))}: {key}", str(error))
        self._declared = read_declared(
            document, file.parent, lambda path, message: self._complain(f"{place(path)}: {'.'.join(path)}", message)
        )
