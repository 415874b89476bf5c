"""Settings from their sources: defaults, file, environment variables and flags; and how settings are shown.

pydantic-settings 2.16 would replace `_read_variables` and the parsing of TOML, 25 lines. It ignores
unknown variables, validates only the source that wins, does not say which source or line a value or a problem comes
from, reads the text '7071' in a file as a number, and leaves relative paths alone. The code for all of that would stay,
as sources and validators of its kind.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from trainmaster.protocol import environment as in_job
from trainmaster.server import failpoints
from trainmaster.server.settings import values
from trainmaster.server.settings.declared import TABLES, Declared, read_declared
from trainmaster.server.settings.settings import HOME_VARIABLE, Settings, default_data_dir

PREFIX = "TRAINMASTER_"
CONFIG_VARIABLE = "TRAINMASTER_CONFIG"
FILE_NAME = "config.toml"
"""In the data directory; read when no other file is named."""

_OF_OTHERS = frozenset(
    {
        CONFIG_VARIABLE,
        HOME_VARIABLE,
        "TRAINMASTER_URL",
        "TRAINMASTER_API_KEY",
        "TRAINMASTER_CA",
        "TRAINMASTER_DEBUG",
        failpoints.ENVIRONMENT_VARIABLE,
        failpoints.ELSEWHERE_VARIABLE,
        *(value for value in vars(in_job).values() if isinstance(value, str) and value.startswith(PREFIX)),
    }
)
"""Variables with our prefix that are no settings: those of clients, jobs and tests."""

_FIELDS = {each.name: each for each in dataclasses.fields(Settings)}
_KINDS = values.kinds_of(Settings)


class SettingSource(StrEnum):
    """Where a value comes from; later ones win."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOrigin:
    source: SettingSource = SettingSource.DEFAULT
    place: str = ""
    """`FILE:LINE`, a variable or a flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingProblem:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
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
        flags: values from the command line, by the names of the fields; None stands for a flag that was not given.
        config: the file; by default $TRAINMASTER_CONFIG, or `config.toml` in the data directory if it is there.
        environment: by default that of this process.
        defaults: other defaults than those of the fields.
    """
    return _Resolver(flags or {}, os.environ if environment is None else environment, defaults or {}).run(config)


def variable_of(name: str) -> str:
    return PREFIX + name.upper()


def forget_variables() -> None:
    """Remove the variables of settings from this process, so that what it starts does not inherit them."""
    for name in _FIELDS:
        os.environ.pop(variable_of(name), None)


def line_of(text: str, path: Sequence[str]) -> int | None:
    """The line of a TOML text where a key or a table begins; None when it cannot be found."""
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


_Found = dict[str, tuple[Any, SettingOrigin]]


class _Resolver:
    def __init__(
        self, flags: Mapping[str, object], environment: Mapping[str, str], defaults: Mapping[str, object]
    ) -> None:
        self._environment = environment
        self._problems: list[SettingProblem] = []
        home = environment.get(HOME_VARIABLE)
        origin = SettingOrigin(source=SettingSource.ENVIRONMENT, place=HOME_VARIABLE) if home else SettingOrigin()
        self._by_default: _Found = {
            "data_dir": (Path(home or default_data_dir()).absolute(), origin),
            **{name: (value, SettingOrigin()) for name, value in defaults.items()},
        }
        self._by_file: _Found = {}
        self._by_variable = self._read_variables()
        self._by_flag = self._read_flags(flags)

    def run(self, config: Path | None) -> Resolved:
        named = config or self._environment.get(CONFIG_VARIABLE)
        expected = self._data_dir()
        file = Path(named).expanduser().absolute() if named else expected / FILE_NAME
        text = self._text_of(file, missing_ok=not named)
        declared = Declared() if text is None else self._read_file(file, text)
        if not named and self._data_dir() != expected:
            self._complain(
                self._by_file["data_dir"][1].place,
                f"data_dir is where this file was found ({expected}), and cannot be another in it; "
                "name the file with --config",
            )
        if self._problems:
            raise SettingsError(self._problems)
        found = self._found()
        return Resolved(
            settings=Settings(**{name: value for name, (value, _) in found.items()}),
            origins=dict.fromkeys(_FIELDS, SettingOrigin()) | {name: origin for name, (_, origin) in found.items()},
            declared=declared,
            file=None if text is None else file,
        )

    def _found(self) -> _Found:
        return self._by_default | self._by_file | self._by_variable | self._by_flag

    def _data_dir(self) -> Path:
        return Path(self._found()["data_dir"][0])

    def _complain(self, place: str, message: str) -> None:
        self._problems.append(SettingProblem(place=place, message=message))

    def _read_variables(self) -> _Found:
        found: _Found = {}
        names = {variable_of(name): name for name in _FIELDS}
        for variable, text in sorted(self._environment.items()):
            if not variable.startswith(PREFIX) or not text:
                continue
            if variable not in names:
                if variable not in _OF_OTHERS:
                    self._complain(variable, values.unknown("setting", variable, names))
                continue
            name = names[variable]
            try:
                value = values.read_text(_FIELDS[name], _KINDS[name], text, Path.cwd())
                found[name] = (value, SettingOrigin(source=SettingSource.ENVIRONMENT, place=variable))
            except ValueError as error:
                self._complain(variable, str(error))
        return found

    def _read_flags(self, flags: Mapping[str, object]) -> _Found:
        found: _Found = {}
        for name, given in flags.items():
            if given is None or given == []:
                continue
            flag = _FIELDS[name].metadata["flag"]
            try:
                if isinstance(given, list):
                    value = values.read_toml(_FIELDS[name], _KINDS[name], [str(each) for each in given], Path.cwd())
                else:
                    value = values.read_text(_FIELDS[name], _KINDS[name], str(given), Path.cwd())
                if isinstance(value, str) and values.without_password(value) != value:
                    raise ValueError(
                        "must hold no password: everybody on this machine can read it in the list of processes; "
                        f"set {variable_of(name)}, or {name} in the settings file"
                    )
                found[name] = (value, SettingOrigin(source=SettingSource.FLAG, place=flag))
            except ValueError as error:
                self._complain(flag, str(error))
        return found

    def _text_of(self, file: Path, *, missing_ok: bool) -> str | None:
        try:
            return file.read_text(encoding="utf-8")
        except OSError as error:
            if not (missing_ok and isinstance(error, FileNotFoundError | NotADirectoryError)):
                self._complain(str(file), f"cannot be read: {error.strerror}")
        except UnicodeDecodeError:
            self._complain(str(file), "is not valid TOML: it is no UTF-8")
        return None

    def _read_file(self, file: Path, text: str) -> Declared:
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            self._complain(str(file), f"is not valid TOML: {error}")
            return Declared()

        def place(path: tuple[str, ...]) -> str:
            line = line_of(text, path)
            return str(file) if line is None else f"{file}:{line}"

        def complain(path: tuple[str, ...], message: str) -> None:
            self._complain(f"{place(path)}: {'.'.join(path)}", message)

        own = {key: raw for key, raw in document.items() if key not in TABLES}
        given = values.read_table(Settings, (), own, file.parent, complain, noun="setting", others=TABLES)
        for key, value in given.items():
            self._by_file[key] = (value, SettingOrigin(source=SettingSource.FILE, place=place((key,))))
        return read_declared(document, file.parent, complain)


# Descriptions of all settings, for `trainmaster config`, the example file and the documentation

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

#[clusters.hpc]
#kind = "slurm"
#partition = "gpu"
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
    words = meanings(Settings)
    for each in _FIELDS.values():
        default = "~/.trainmaster" if each.name == "data_dir" else each.default
        yield SettingDescription(
            name=each.name,
            type=values.in_words(_KINDS[each.name]),
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
        if each.secret:
            value = value and values.HIDDEN
        elif isinstance(value, str):
            value = values.without_password(value)
        yield each, value, resolved.origins[each.name]


def shown_tables(resolved: Resolved) -> dict[str, dict[str, Mapping[str, object]]]:
    """The file's tables of the cluster, secrets hidden."""
    return {
        table: {
            name: {
                each.name: values.HIDDEN if each.metadata.get("secret") else getattr(entry, each.name)
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
        lines += [f"#{each.name} = {values.toml_of(each.default)}", ""]
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
