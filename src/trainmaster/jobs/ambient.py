"""A nested configuration that applies within a block of code, and dataclasses that take their values from it.

    @dataclass
    class ModelConfig:
        layers: int = field("architecture/layers", default=4)

    with configuration({"architecture": {"layers": 8}}):
        configure(ModelConfig).layers  # 8

Job classes in the form of theseus are configured like this: their `config()` names the dataclasses, and their
`__init__` takes the spec alone. If OmegaConf is installed, `current_config` returns one of its configurations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import inspect
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from trainmaster.jobs.config_document import ConfigurationError, overlaid, overlay_of, suggestion

KEY = "trainmaster_key"
"""In the metadata of a dataclass field: the key of its value in the configuration."""

MISSING = "???"
"""A value without a default that must be given."""

_ABSENT = object()
_current: ContextVar[Any] = ContextVar("configuration", default=None)


class Section(dict[str, Any]):
    """A part of a configuration whose keys are also attributes; used if OmegaConf is not installed."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(
            {key: Section(value) if isinstance(value, Mapping) else value for key, value in document.items()}
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name!r} here; it has: {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = Section(value) if isinstance(value, Mapping) else value


def field(key: str, default: Any = None, default_factory: Any = None, **options: Any) -> Any:
    """A dataclass field with the value of a key such as `optimizer/lr`; required if it has no default."""
    if default is not None and default_factory is not None:
        raise ValueError(f"{key}: give a default or a default_factory, not both")
    given = {"default": default, "default_factory": default_factory}
    options |= {name: value for name, value in given.items() if value is not None}
    return dataclasses.field(metadata={KEY: key}, **options)


@contextlib.contextmanager
def configuration(config: Any) -> Iterator[None]:
    """Make a configuration current within the block: a mapping, or one of OmegaConf."""
    token = _current.set(opened(config))
    try:
        yield
    finally:
        _current.reset(token)


def current_config() -> Any:
    """The current configuration; None if there is none."""
    return _current.get()


def configure(kind: Any) -> Any:
    """Make a dataclass (or a Flax module) with values from the current configuration, which there must be."""
    if (config := current_config()) is None:
        raise RuntimeError(f"{kind.__name__} takes its values from a configuration: use `with configuration(...):`")
    return _filled_in(kind, plain_config(config))


@contextlib.contextmanager
def patch() -> Iterator[Any]:
    """Change the current configuration within the block; changes stay. Without one, start with an empty one."""
    config = current_config()
    with contextlib.ExitStack() as scope:
        if config is None:
            config = opened({})
            scope.enter_context(configuration(config))
        if (omegaconf := _omegaconf()) is None or not isinstance(config, omegaconf.DictConfig):
            yield config
            return
        omegaconf.OmegaConf.set_struct(config, False)
        try:
            yield config
        finally:
            omegaconf.OmegaConf.set_struct(config, True)


def build(*kinds: Any) -> Any:
    """The configuration of several dataclasses with their defaults; keys with conflicting defaults have to be given."""
    return opened(defaults(kinds))


def defaults(kinds: Sequence[Any]) -> dict[str, Any]:
    """The same as a plain document."""
    found: dict[str, Any] = {}
    for key, value in _default_values(kinds):
        found[key] = value if found.get(key, MISSING) in (MISSING, value) or value == MISSING else MISSING
    document: dict[str, Any] = {}
    for key, value in found.items():
        for name in reversed(key.split("/")):
            value = {name: value}
        document = overlaid(document, value)
    return document


def completed(kinds: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A document completed with the defaults of some dataclasses; raises ConfigurationError if a key is unknown."""
    base = defaults(kinds)
    if problems := list(_unknown(base, given, "")):
        raise ConfigurationError("\n".join(problems))
    return overlaid(base, given)


def known_part(document: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a document that a schema has, too: code may have added the rest."""
    found = {}
    for key in document.keys() & schema.keys():
        value, below = document[key], schema[key]
        nested = isinstance(value, Mapping) and isinstance(below, Mapping) and below
        found[key] = known_part(value, below) if nested else value
    return found


def opened(config: Any) -> Any:
    if (omegaconf := _omegaconf()) is None:
        return config if isinstance(config, Section) else Section(config)
    if isinstance(config, omegaconf.DictConfig):
        return config
    made = omegaconf.OmegaConf.create(dict(config))
    omegaconf.OmegaConf.set_struct(made, True)
    return made


def plain_config(config: Any) -> dict[str, Any]:
    """A configuration as a plain document, with references resolved."""
    if isinstance(config, Section):
        return {key: plain_config(value) if isinstance(value, Section) else value for key, value in config.items()}
    return overlay_of(config)


def is_ambient(job_class: type) -> bool:
    """Whether a job class is constructed from its spec alone and uses the current configuration."""
    if declares(job_class):
        return True
    by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    _spec, *others = inspect.signature(job_class).parameters.values()
    return all(each.name != "config" and each.kind in by_keyword for each in others)


def declares(job_class: type) -> bool:
    """Whether a job class declares its dataclasses by a class method `config`."""
    return isinstance(inspect.getattr_static(job_class, "config", None), classmethod)


def declared(job_class: Any) -> list[Any]:
    """The dataclasses that a job class declares; the first is the type of its `args`."""
    found = job_class.config()
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _filled_in(kind: Any, document: Mapping[str, Any]) -> Any:
    hints = _hints(kind)
    values: dict[str, Any] = {}
    problems = []
    for each in dataclasses.fields(kind):
        annotation = hints[each.name]
        if _is_dataclass(annotation):
            values[each.name] = _filled_in(annotation, document)
            continue
        if (key := each.metadata.get(KEY)) is None:
            continue
        value = _at(document, key)
        if value is _ABSENT and _default(each) is not _ABSENT:
            continue
        if value is _ABSENT or value == MISSING:
            problems.append(f"{key}: required, and has no default")
            continue
        try:
            values[each.name] = _fitted(annotation, value, key)
        except ConfigurationError as error:
            problems.append(str(error))
    if problems:
        raise ConfigurationError("\n".join(problems))
    return kind(**values)


def _fitted(annotation: Any, value: Any, key: str) -> Any:
    """Convert a value to its type: numbers from text, dataclasses from mappings, enum members from their names."""
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    try:
        adapter = TypeAdapter(annotation)
    except PydanticUserError:
        return value  # of a type that only its library knows
    try:
        return adapter.validate_python(_members(annotation, value))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = "/".join([key, *map(str, problem["loc"])])
        raise ConfigurationError(
            f"{where}: {problem['msg'][:1].lower()}{problem['msg'][1:]}, not {value!r:.80}"
        ) from error


def _members(annotation: Any, value: Any) -> Any:
    """Replace the names of enum members by the members: OmegaConf writes names, pydantic reads values."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return annotation.__members__.get(value, value) if isinstance(value, str) else value
    if _is_dataclass(annotation) and isinstance(value, Mapping):
        hints = _hints(annotation)
        return {name: _members(hints.get(name), inner) for name, inner in value.items()}
    inner_types = typing.get_args(annotation)
    if isinstance(value, list) and inner_types:
        return [_members(inner_types[0], each) for each in value]
    for inner in inner_types:
        if inner is not type(None) and (found := _members(inner, value)) is not value:
            return found
    return value


def _default_values(kinds: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    from pydantic_core import to_jsonable_python

    for kind in kinds:
        hints = _hints(kind)
        for each in dataclasses.fields(kind):
            if _is_dataclass(hints[each.name]):
                yield from _default_values([hints[each.name]])
            elif (key := each.metadata.get(KEY)) is not None:
                value = _default(each)
                yield key, MISSING if value is _ABSENT else to_jsonable_python(value, fallback=str)


def _hints(kind: Any) -> dict[str, Any]:
    try:
        found = typing.get_type_hints(kind)
    except Exception:  # names that only its library's own modules know
        found = {}
    return {
        each.name: found.get(each.name, Any if isinstance(each.type, str) else each.type)
        for each in dataclasses.fields(kind)
    }


def _is_dataclass(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _at(document: Mapping[str, Any], key: str) -> Any:
    found: Any = document
    for name in key.split("/"):
        if not isinstance(found, Mapping) or name not in found:
            return _ABSENT
        found = found[name]
    return found


def _default(each: dataclasses.Field[Any]) -> Any:
    if each.default is not dataclasses.MISSING:
        return each.default
    return each.default_factory() if each.default_factory is not dataclasses.MISSING else _ABSENT


def _unknown(known: Mapping[str, Any], given: Mapping[str, Any], above: str) -> Iterator[str]:
    for key, value in given.items():
        where = f"{above}.{key}" if above else str(key)
        if key not in known:
            yield f"{where}: unknown key; {suggestion(str(key), known)}"
        elif isinstance(value, Mapping) and isinstance(known[key], Mapping) and known[key]:
            yield from _unknown(known[key], value, where)


def _omegaconf() -> Any:
    try:
        return importlib.import_module("omegaconf")
    except ImportError:
        return None
