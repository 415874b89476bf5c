"""Problems with a document that failed validation: the field's path, what to do, the nearest known name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from trainmaster.server.core.errors import Problem, choice_message, nearest, shown
from trainmaster.server.core.spec.configs import ExportFormat
from trainmaster.server.core.training import hyperparameters
from trainmaster.server.core.training.types import ADAPTER_TYPES, FRAMEWORKS, LATER, FrameworkType
from trainmaster.server.core.workloads.base import WorkloadSpec, kinds, spec_for

MAX_PROBLEMS = 100
"""A document with more is nonsense as a whole."""

HYPERPARAMETERS = "hyperparameters"
"""The one field whose texts may stand for lists."""

Location = Sequence[int | str]


def problems_from(error: ValidationError, model: type[BaseModel], document: object) -> tuple[Problem, ...]:
    # A list whose entries were refused counts as too short as well; the entries are the problem.
    details = [
        detail
        for detail in error.errors(include_url=False)
        if detail["type"] != "too_short" or len(detail["input"]) < detail["ctx"]["min_length"]
    ]
    problems = [_problem(detail, model, document) for detail in details[:MAX_PROBLEMS]]
    if len(details) > MAX_PROBLEMS:
        problems.append(Problem(field="request", message=f"has {len(details) - MAX_PROBLEMS} more problems"))
    return tuple(problems)


def field_path(location: Location) -> str:
    """A location as people write it.

    >>> field_path(("data_config", "sources", 0, "path"))
    'data_config.sources[0].path'
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":  # the key of a mapping is to blame, which the path names already
            path += f".{shown(part)}" if path else shown(part)
    return path or "request"


def _problem(detail: ErrorDetails, model: type[BaseModel], document: object) -> Problem:
    location = detail["loc"]
    if detail["type"] == "extra_forbidden":
        message = _unknown_field(location, model, document)
    elif detail["type"] in ("model_type", "model_attributes_type"):
        message = _object(detail, _model_at(model, location, document))
    elif detail["type"] in ("enum", "literal_error"):
        message = _choice(detail, _not_working(field_path(location), document))
    else:
        message = _WORDS.get(detail["type"], itemgetter("msg"))(detail)
    return Problem(field=field_path(location), message=message)


def _unknown_field(location: Location, model: type[BaseModel], document: object) -> str:
    name = str(location[-1])
    owner = _model_at(model, location[:-1], document)
    near = nearest(name, owner.model_fields) if owner else None
    near = near or next((path for path in _paths(model) if path.rpartition(".")[2] == name), None)
    if near is None and name in hyperparameters.HYPERPARAMETERS and "training_config" in model.model_fields:
        near = f"training_config.{HYPERPARAMETERS}.{name}"
    return f"unknown field; did you mean '{near}'?" if near else "unknown field; leave it out"


def _model_at(model: type[BaseModel], location: Location, document: object) -> type[BaseModel] | None:
    found: type[BaseModel] | None = model
    for part in location:
        document = item_at(document, part)
        if isinstance(part, str):
            field = found.model_fields.get(part) if found else None
            found = _model_in(field.annotation) if field else None
        if found is WorkloadSpec:
            kind = item_at(document, "kind")
            found = spec_for(str(kind)) if kind in kinds() else None
    return found


def item_at(document: Any, part: int | str) -> Any:
    try:
        return document[part]
    except (LookupError, TypeError):
        return None


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model inside an annotation such as `tuple[DataSource, ...] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if (inner := _model_in(field.annotation)) is not None:
            yield from _paths(inner, f"{prefix}{name}.")


def _not_working(field: str, document: object) -> frozenset[str]:
    """Values of a field that are known by name, and would be refused in this document."""
    training = item_at(document, "training_config")
    custom = item_at(item_at(training, "framework"), "type") == FrameworkType.CUSTOM
    match field:
        case "training_config.framework.type":
            return frozenset(name for name, framework in FRAMEWORKS.items() if not framework.types)
        case "training_config.training_type" if not custom:
            return frozenset(LATER)
        case "output_config.export_format":
            adapts = item_at(training, "training_type") in ADAPTER_TYPES
            return frozenset(ExportFormat) - {ExportFormat.SAFETENSORS, *([ExportFormat.ADAPTER] if adapts else [])}
    return frozenset()


def _choice(detail: ErrorDetails, unoffered: frozenset[str]) -> str:
    expected = re.findall(r"'([^']*)'", str(detail["ctx"]["expected"]))
    choices = [choice for choice in expected if choice not in unoffered]
    if not isinstance(detail["input"], str):
        return f"must be one of {', '.join(choices)}, not {_noun(detail['input'])}"
    last = detail["loc"][-1]
    return choice_message(last if isinstance(last, str) else "value", detail["input"], choices)


def _must_be(what: str) -> Callable[[ErrorDetails], str]:
    def words(detail: ErrorDetails) -> str:
        given = detail["input"]
        numeric = what.endswith("number") and isinstance(given, str) and re.fullmatch(r"\s*-?[\d.]+\s*", given)
        return f"must be {what}, not {_noun(given)}" + ("; write it without quotes" if numeric else "")

    return words


def _text(detail: ErrorDetails) -> str:
    given = detail["input"]
    if isinstance(given, int | float):
        return f"must be text, not {_noun(given)}; put it in quotes"
    if isinstance(given, list) and given and all(isinstance(each, str | int | float) for each in given):
        several = ", or several with commas between them" if HYPERPARAMETERS in detail["loc"] else ""
        return f"must be text, not a list; write one value{several}"
    return f"must be text, not {_noun(given)}"


def _object(detail: ErrorDetails, owner: type[BaseModel] | None) -> str:
    """Text in place of an object is most often the value of the one field that the object must have."""
    given = detail["input"]
    required = [name for name, field in owner.model_fields.items() if field.is_required()] if owner else []
    example = f"; write it as {{{required[0]}: ...}}" if isinstance(given, str) and len(required) == 1 else ""
    return f"must be an object, not {_noun(given)}{example}"


def _list(detail: ErrorDetails) -> str:
    given = detail["input"]
    return f"must be a list, not {_noun(given)}" + ("; write it as [a, b]" if isinstance(given, str) else "")


def _bound(words: str, name: str) -> Callable[[ErrorDetails], str]:
    def says(detail: ErrorDetails) -> str:
        bound = detail["ctx"][name]
        return f"must be {words} {bound if isinstance(bound, int) or bound >= 1e6 else f'{bound:g}'}".removesuffix(".0")

    return says


def _too_long(detail: ErrorDetails) -> str:
    unit = "characters" if isinstance(detail["input"], str) else "entries"
    return f"must have at most {detail['ctx']['max_length']} {unit}"


def _noun(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a truth value"
    for types, noun in ((int | float, "a number"), (str, "text"), (dict, "an object"), (list | tuple, "a list")):
        if isinstance(value, types):
            return noun
    return "something else"


def _says(message: str) -> Callable[[ErrorDetails], str]:
    return lambda _: message


_WORDS: Mapping[str, Callable[[ErrorDetails], str]] = {
    "missing": _says("required"),
    "invalid_key": _says("names of fields must be text; put it in quotes"),
    "dict_type": _must_be("an object"),
    **dict.fromkeys(("list_type", "tuple_type"), _list),
    **dict.fromkeys(("int_type", "int_from_float"), _must_be("a whole number")),
    "float_type": _must_be("a number"),
    "finite_number": _says("must be a finite number"),
    "string_type": _text,
    "bool_type": _must_be("true or false"),
    "greater_than": _bound("more than", "gt"),
    "greater_than_equal": _bound("at least", "ge"),
    "less_than": _bound("less than", "lt"),
    "less_than_equal": _bound("at most", "le"),
    **dict.fromkeys(("string_too_short", "too_short"), _says("must not be empty")),
    **dict.fromkeys(("string_too_long", "too_long"), _too_long),
    "string_unicode": _says("contains a lone surrogate; send valid Unicode"),
}
