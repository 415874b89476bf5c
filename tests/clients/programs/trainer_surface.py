"""Prints what a package in the shape of Kubeflow's SDK offers, as JSON: names, signatures, defaults, values.

Runs in the environment of the real package and in ours, with the name of the package as its argument.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import sys
import types
import typing
from importlib import import_module
from typing import Any

FACTORY = "<factory>"


def surface(package: str) -> dict[str, Any]:
    """Everything public, by the module that a program imports it from."""
    root = import_module(package)
    types_module = import_module(f"{package}.types.types")
    options = import_module(f"{package}.options")
    constants = import_module(f"{package}.constants.constants")
    return {
        "trainer": {name: described(getattr(root, name)) for name in root.__all__},
        "types": {name: described(value) for name, value in public(types_module)},
        "options": {name: described(getattr(options, name)) for name in options.__all__},
        "constants": {name: described(value) for name, value in public(constants)},
    }


def public(module: types.ModuleType) -> list[tuple[str, Any]]:
    """What a module defines for others: what it says, or what neither comes from elsewhere nor is hidden."""
    package = module.__name__.partition(".")[0]
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    found = [(name, getattr(module, name)) for name in names]
    return [(name, value) for name, value in found if not inspect.ismodule(value) and origin(value) in (None, package)]


def origin(value: Any) -> str | None:
    """The package that a class or function comes from."""
    module: str | None = getattr(value, "__module__", None)
    return module and module.partition(".")[0]


def described(value: Any) -> dict[str, Any]:
    """What somebody who uses it can tell from outside."""
    if isinstance(value, enum.EnumMeta):
        return {"members": {name: member.value for name, member in value.__members__.items()}}
    if inspect.isclass(value):
        return {
            "parameters": parameters(value),
            "methods": {name: parameters(method) for name, method in vars(value).items() if is_method(name, method)},
            "properties": [name for name, each in vars(value).items() if isinstance(each, property)],
        }
    if inspect.isroutine(value):
        return {"parameters": parameters(value)}
    return {"value": repr(value)}


def is_method(name: str, value: Any) -> bool:
    return inspect.isfunction(value) and (not name.startswith("_") or name in ("__call__", "__getitem__"))


def parameters(called: Any) -> list[dict[str, str | None]]:
    """The parameters of a call, in order; pydantic's and dataclasses' made defaults as what they make."""
    try:
        hints = typing.get_type_hints(called.__init__ if inspect.isclass(called) and not has_fields(called) else called)
    except NameError:  # a name that only a type checker sees
        hints = {}
    return [
        {
            "name": name,
            "kind": parameter.kind.name,
            "default": None if parameter.default is parameter.empty else default(called, name, parameter.default),
            "type": shape(hints[name]) if name in hints else None,
        }
        for name, parameter in inspect.signature(called).parameters.items()
        if name != "self"
    ]


def has_fields(called: Any) -> bool:
    return dataclasses.is_dataclass(called) or hasattr(called, "model_fields")


def default(called: Any, name: str, given: Any) -> str:
    if repr(given) != FACTORY:
        return repr(given)
    if dataclasses.is_dataclass(called):
        made = next(field.default_factory for field in dataclasses.fields(called) if field.name == name)
        return repr(made())  # type: ignore[operator]
    return repr(called.model_fields[name].get_default(call_default_factory=True))


def shape(hint: Any) -> str:
    """A type as text that does not depend on where it lies, how a union is written, or how far `dict` is spelt out."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(sorted({shape(argument) for argument in arguments}))
    if origin is typing.Annotated:
        return shape(arguments[0])
    if origin is typing.Literal:
        return " | ".join(sorted(repr(argument) for argument in arguments))
    if origin is not None:
        name = getattr(origin, "__name__", str(origin))
        plain = name == "Callable" or typing.Any in arguments
        return name if plain else f"{name}[{', '.join(shape(argument) for argument in arguments)}]"
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))


if __name__ == "__main__":
    json.dump(surface(sys.argv[1]), sys.stdout, default=repr)
