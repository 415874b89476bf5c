"""Job classes by name: `@job("language/pretrain")` makes a class known, `job_class` finds it."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from trainmaster.jobs.basic_job import BasicJob

JobT = TypeVar("JobT", bound="type[BasicJob[Any]]")

_CLASSES: dict[str, type[BasicJob[Any]]] = {}


class UnknownJobClassError(LookupError):
    """No job class is known by this name."""

    def __str__(self) -> str:
        return str(self.args[0])


def job(name: str) -> Callable[[JobT], JobT]:
    """Give a job class a name of its own, which stays when the class moves to another module.

    Raises:
        ValueError: another class has the name; or it has a colon, which parts a module from a class.
    """
    if not name or ":" in name:
        raise ValueError(f"{name!r} is no name for a job class: it is text without a colon")

    def register(cls: JobT) -> JobT:
        known = _CLASSES.get(name)
        # The same class again is what a module that is loaded twice looks like.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"job class {name!r} is {known.__module__}:{known.__qualname__} already")
        _CLASSES[name] = cls
        return cls

    return register


def registered() -> tuple[str, ...]:
    """The names that are taken, sorted."""
    return tuple(sorted(_CLASSES))


def name_of(cls: type[BasicJob[Any]]) -> str:
    """What a checkpoint calls a class: its own registered name, else `module:Class`."""
    return next((name for name, known in _CLASSES.items() if known is cls), f"{cls.__module__}:{cls.__qualname__}")


def known_class(name: str) -> type[BasicJob[Any]] | None:
    """The class of a name or of `module:Class`, among those that are loaded; a checkpoint never has code imported."""
    if ":" not in name:
        return _CLASSES.get(name)
    module, _, qualified = name.partition(":")
    return _attribute(sys.modules.get(module), qualified)


def job_class(target: str, *, module: str | None = None) -> type[BasicJob[Any]]:
    """The class of `module:Class`, whose module is imported; or of a registered name, after `module` was.

    Raises:
        UnknownJobClassError: there is no such module, or nothing in it is such a job class.
    """
    place, _, qualified = target.rpartition(":")
    for name in filter(None, (module, place)):
        _import(name)
    if not place:
        if (known := _CLASSES.get(target)) is not None:
            return known
        message = f"no job class is registered as {target!r}; name it as module:Class, or import what registers it"
        raise UnknownJobClassError(_unknown(message, target, registered()))
    found = _attribute(sys.modules[place], qualified)
    if found is None:
        there = [name for name, value in vars(sys.modules[place]).items() if _is_job(value)]
        raise UnknownJobClassError(_unknown(f"{place} has no job class {qualified!r}", qualified, there))
    return found


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # One that the module itself misses is its own error, and is shown as such.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise UnknownJobClassError(
            f"there is no module {name!r} on the path of {sys.executable}; run this where it lies, or install it"
        ) from error


def _attribute(module: Any, qualified: str) -> type[BasicJob[Any]] | None:
    found = module
    for name in qualified.split("."):
        found = getattr(found, name, None)
    return found if _is_job(found) else None


def _is_job(value: object) -> bool:
    from trainmaster.jobs.basic_job import BasicJob

    return inspect.isclass(value) and issubclass(value, BasicJob)


def _unknown(message: str, name: str, known: list[str] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"{message}; did you mean {near[0]!r}?"
    return f"{message}; there are: {', '.join(known) or 'none'}"
