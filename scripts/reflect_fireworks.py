"""What the public classes of `fireworks.training.sdk` in this environment offer; run with its own Python.

Prints a JSON object: the version, and the public methods of every class that is more than a value or an error, without
their `_async` twins.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import sys
from importlib import metadata

import fireworks.training.sdk as sdk
from pydantic import BaseModel


def is_value(kind: type) -> bool:
    """Whether objects of a class are told, raised or chosen, and ask nobody for anything."""
    if issubclass(kind, (enum.Enum, Exception, BaseModel)):
        return True
    return dataclasses.is_dataclass(kind) and not kind.__name__.endswith("Syncer")


def methods_of(kind: type) -> list[str]:
    """The public methods and properties of a class, those that it inherits too."""
    return [
        name
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_")
        and not name.endswith("_async")
        and (callable(member) or isinstance(member, property))
    ]


def main() -> int:
    """Print what there is."""
    classes = {
        name: kind
        for name in sdk.__all__
        if inspect.isclass(kind := getattr(sdk, name)) and kind.__name__ == name and not is_value(kind)
    }
    methods = {name: methods_of(kind) for name, kind in classes.items()}
    json.dump({"version": metadata.version("fireworks-ai"), "methods": methods}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
