"""A job class's configuration: from YAML and `key=value` to the typed `C` of `BasicJob[C]`, if any, and back."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from trainmaster.plain_yaml import YamlError, dump_yaml, parse_yaml

C = TypeVar("C")

_ABSENT = object()


class ConfigurationError(ValueError):
    """A configuration does not fit its job class; the message names every problem."""


def typed(kind: type[C], document: Mapping[str, Any]) -> C:
    """Convert a plain document to the class that a job declares; ConfigurationError names all that does not fit."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(dict(document), extra="forbid")
    except ValidationError as error:
        lines = [_problem(kind, problem) for problem in error.errors(include_url=False)]
    raise ConfigurationError("\n".join(lines))


def plain(config: Any) -> dict[str, Any]:
    """A configuration as a plain document, with every default filled in."""
    from pydantic import TypeAdapter

    document = TypeAdapter(type(config)).dump_python(config, mode="json")
    if not isinstance(document, dict):
        raise TypeError(f"a configuration has named fields; {type(config).__name__} has none")
    return document


def overlay_of(config: Any) -> dict[str, Any]:
    """The values that a configuration sets over another: those that were set in a pydantic model, else all."""
    from pydantic import BaseModel

    if (omegaconf := sys.modules.get("omegaconf")) is not None and isinstance(config, omegaconf.DictConfig):
        return dict(omegaconf.OmegaConf.to_container(config, resolve=True, enum_to_str=True))
    return config.model_dump(mode="json", exclude_unset=True) if isinstance(config, BaseModel) else plain(config)


def overlaid(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """A document with another merged over it: mappings are merged, all else is replaced.

    >>> overlaid({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = overlaid(below, value)
        merged[key] = value
    return merged


def overridden(document: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    r"""A document with `key=value` settings; a key has dots (`\.` is a dot in a name), a value is YAML.

    >>> overridden({"optimizer": {"lr": 0.1}}, ["optimizer.lr=1e-3"])
    {'optimizer': {'lr': 0.001}}
    """
    result = dict(document)
    for setting in settings:
        path, equals, text = setting.partition("=")
        names = [name.replace("\\.", ".") for name in re.split(r"(?<!\\)\.", path)]
        if not equals or not all(names):
            raise ConfigurationError(f"cannot read {setting!r}: write it as key=value, with dots for keys inside keys")
        value = from_yaml_value(text, path)
        for name in reversed(names):
            value = {name: value}
        result = overlaid(result, value)
    return result


def from_yaml_value(text: str, name: str) -> Any:
    try:
        return parse_yaml(text, name)
    except YamlError as error:
        raise ConfigurationError(str(error)) from error


def from_yaml(text: str, name: str) -> dict[str, Any]:
    """Parse a YAML (or JSON) mapping; an empty text is an empty document. Raises ConfigurationError if it is none."""
    if (document := from_yaml_value(text, name)) is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigurationError(f"{name} holds no configuration: it should be keys with values")
    return document


def to_yaml(document: Mapping[str, Any]) -> str:
    return dump_yaml(dict(document))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences between two documents, one line for each value.

    >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "d": [4]})
    ['a.b: 1 -> 3', 'c: 2 -> (none)', 'd: (none) -> [4]']
    """
    return [f"{path}: {_shown(before)} -> {_shown(after)}" for path, before, after in _different(old, new, "")]


def config_type(job_class: type) -> type:
    """The `C` of a job class, a dataclass or a pydantic model (else TypeError); `dict` when it declares none."""
    for base in job_class.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            for argument in typing.get_args(generic):
                if isinstance(argument, TypeVar) or typing.get_origin(generic) is typing.Generic:
                    continue
                if not (argument is dict or _is_structured(argument)):
                    raise TypeError(f"{argument!r}: a configuration is a dataclass or a pydantic model")
                return typing.cast(type, argument)
    return dict


def suggestion(name: str, known: Collection[str]) -> str:
    """What to write instead of an unknown name: the one that is most like it, else a list of all."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"known are: {', '.join(known) or 'none'}"


def _problem(kind: type, problem: Mapping[str, Any]) -> str:
    location = problem["loc"]
    where = ".".join(map(str, location)) or "configuration"
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = _fields(_at(kind, location[:-1]))
        return f"{where}: unknown key; {suggestion(str(location[-1]), known)}"
    if problem["type"] == "missing":
        return f"{where}: required, and has no default"
    return f"{where}: {problem['msg'][:1].lower()}{problem['msg'][1:]}, not {problem['input']!r:.80}"


def _at(kind: Any, location: Sequence[str | int]) -> Any:
    """The class that describes a part of a configuration; None if unknown."""
    for key in location:
        if kind is not None and isinstance(key, str):
            kind = _structured(_fields(kind).get(key))
    return kind


def _fields(kind: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {each.name: hints[each.name] for each in dataclasses.fields(kind)}
    if hasattr(kind, "model_fields"):
        return {name: each.annotation for name, each in kind.model_fields.items()}
    return {}


def _structured(annotation: Any) -> Any:
    """The dataclass or model in an annotation such as `list[Part] | None`."""
    if annotation is None or _is_structured(annotation):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _structured(part))), None)


def _is_structured(kind: Any) -> bool:
    plain_class = isinstance(kind, type) and not isinstance(kind, types.GenericAlias)
    return plain_class and (dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields"))


def _different(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in (*old, *(key for key in new if key not in old)):
            below = f"{path}.{key}" if path else str(key)
            yield from _different(old.get(key, _ABSENT), new.get(key, _ABSENT), below)
    elif old is _ABSENT or new is _ABSENT or _spelled(old) != _spelled(new):
        yield path, old, new


def _spelled(value: Any) -> str:
    """A value as text: to Python, 1, 1.0 and True are equal."""
    return json.dumps(value, sort_keys=True)


def _shown(value: Any) -> str:
    return "(none)" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
