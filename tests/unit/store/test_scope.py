"""Every function of the store takes a scope."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest
from sqlalchemy import Connection

import trainmaster.server.store
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

MACHINERY = {
    "database",
    "migrations",
    "page_tokens",
    "postgres",
    "records",
    "schema",
    "scope",
    "sqlite",
}
"""What the functions are made with; everything else is a resource."""


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module_info in pkgutil.iter_modules(trainmaster.server.store.__path__):
        if module_info.name in MACHINERY:
            continue
        module = importlib.import_module(f"trainmaster.server.store.{module_info.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_") and reaches_the_database(function):
                yield f"{module_info.name}.{name}", function


def reaches_the_database(function: Callable[..., Any]) -> bool:
    """Whether a function is given something to ask the database with; the others compute from their arguments."""
    return bool({Connection, Database} & set(get_type_hints(function).values()))


def signature_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


FUNCTIONS = dict(public_functions())


def test_resources_are_found() -> None:
    assert {"jobs.apply", "events.feed", "leases.check", "queues.put"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_function_takes_a_connection_and_a_scope(name: str) -> None:
    function = FUNCTIONS[name]
    first_two = signature_of(function)[:2]
    hints = get_type_hints(function)
    assert first_two == ["connection", "scope"]
    assert hints["connection"] is Connection
    assert hints["scope"] is Scope


def test_everything_admits_every_account() -> None:
    assert Scope.everything().admits("acme")
    Scope.everything().require("acme")
    Scope.everything().require_everything()


def test_account_admits_itself_alone() -> None:
    scope = Scope("acme")
    assert scope.admits("acme")
    assert not scope.admits("other")
    with pytest.raises(NotFoundError):
        scope.require("other")
    with pytest.raises(NotFoundError):
        scope.require_everything()


def test_everything_is_no_account() -> None:
    assert Scope("acme").account == "acme"
    with pytest.raises(ValueError, match="one account"):
        _ = Scope.everything().account
