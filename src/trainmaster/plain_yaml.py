"""YAML as people mean it: `on` and `no` are words, `1e-4` is a number, a date is text, a doubled key is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import yaml

Parsed = TypeVar("Parsed")

_TAG = "tag:yaml.org,2002:"
_TYPES = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
)


class YamlError(ValueError):
    """A text is no valid YAML; the message says where."""


def parse_yaml(text: str, name: str) -> Any:
    """The document of a text that errors call `name`.

    Raises:
        YamlError: it is not valid.
    """
    return _explained(lambda: yaml.load(text, _Loader), name)


def parse_yaml_documents(text: str, name: str) -> list[Any]:
    """The documents of a text, which `---` separates; an empty one is None.

    Raises:
        YamlError: it is not valid.
    """
    return _explained(lambda: list(yaml.load_all(text, _Loader)), name)


def _explained(parse: Callable[[], Parsed], name: str) -> Parsed:
    try:
        return parse()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise YamlError(f"{where}: {_reworded(error.problem or error.context or 'is not valid YAML')}") from error
    except yaml.reader.ReaderError as error:
        character = f"character {error.character:#x}" if isinstance(error.character, int) else "byte"
        raise YamlError(f"{name} holds a {character} at position {error.position}, which no YAML may hold") from error
    except yaml.YAMLError as error:
        raise YamlError(f"{name} is not valid YAML: {error}") from error
    except RecursionError as error:
        raise YamlError(f"{name} is nested too deeply") from error


_MESSAGES = (
    (r"found character '\\t' that cannot start any token", "there is a tab; YAML wants spaces"),
    (r"found a tab character.*", "there is a tab; YAML wants spaces"),
    (r"found character '(.+)' that cannot start any token", r"a value cannot begin with \1; put it in quotes"),
    (
        r"mapping values are not allowed here",
        "a ':' is not expected here: fix the indentation, or put the text in quotes",
    ),
    (r"found unexpected end of stream", "a quote is opened and never closed"),
    (r"expected ',' or '(.)', but got .*", r"a ',' is missing, or a '\1'"),
    (r"expected <block end>, but found .*", "the indentation does not fit the lines above"),
    (r"could not find expected ':'", "a ':' is missing after the name of a field"),
    (r"found undefined alias '(.*)'", r"'*\1' names an anchor that is not there; put it in quotes to mean the text"),
    (
        r"could not determine a constructor for the tag '(.*)'",
        r"the tag \1 is not supported; put it in quotes to mean the text",
    ),
)
"""Patterns of the parser's messages, and our words for them."""


def _reworded(problem: str) -> str:
    for pattern, instead in _MESSAGES:
        if (found := re.fullmatch(pattern, problem)) is not None:
            return found.expand(instead)
    return problem


def dump_yaml(document: Any) -> str:
    """A plain document as YAML that every reader, 1.1 or 1.2, reads back as the same document."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Loader(yaml.SafeLoader):
    """Reads words, numbers and truth values as YAML 1.2 has them."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in (f"{_TAG}null", f"{_TAG}merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would take for something else, and writes no aliases."""

    yaml_implicit_resolvers = {first: [*pairs] for first, pairs in yaml.SafeDumper.yaml_implicit_resolvers.items()}

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class has it
        return True


for _name, _pattern, _first in _TYPES:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_name}", re.compile(f"(?:{_pattern})$"), list(_first))
