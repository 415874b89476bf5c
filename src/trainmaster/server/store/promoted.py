"""Models that were promoted from checkpoints, and the operations that make them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.store import schema
from trainmaster.server.store.records import dumps
from trainmaster.server.store.scope import Scope

_models, _operations = schema.promoted_models, schema.operations


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedModel:
    """A model of an account, whose files are its own."""

    account_id: str
    model_id: str
    job_id: str
    """What trained it."""
    checkpoint_id: str
    base_model: str
    kind: str
    """`HF_PEFT_ADDON` or `HF_BASE_MODEL`."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Of an adapter: its rank `r` and its `target_modules`."""
    size_bytes: int
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A promotion that was asked for."""

    account_id: str
    operation_id: str
    request: Mapping[str, Any]
    """What is to be done, for whoever goes on with it."""
    done: bool = False
    error: str = ""
    """Why it failed; empty when it did not."""
    created_at: float
    worked_on_at: float
    """When somebody last said that it is worked on."""


_SELECT_MODEL = select(*(_models.c[name] for name in PromotedModel.__dataclass_fields__))
_SELECT_OPERATION = select(*(_operations.c[name] for name in Operation.__dataclass_fields__))


def put(connection: Connection, scope: Scope, model: PromotedModel) -> None:
    """Record a model, in the place of one of the same name."""
    scope.require(model.account_id)
    _remove(connection, model.account_id, model.model_id)
    values = {name: getattr(model, name) for name in PromotedModel.__dataclass_fields__}
    connection.execute(insert(_models), {**values, "details": dumps(model.details)})


def get(connection: Connection, scope: Scope, model_id: str) -> PromotedModel:
    """A model of the scope's account.

    Raises:
        NotFoundError: it has none of this name.
    """
    query = _SELECT_MODEL.where(_models.c.model_id == model_id, _models.c.account_id == scope.account)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no model {model_id}")
    return _model(row._mapping)


def all(connection: Connection, scope: Scope) -> list[PromotedModel]:  # noqa: A001 - read as `promoted.all`
    """Every model in scope, by name."""
    query = scope.limit(_SELECT_MODEL.order_by(_models.c.model_id), _models.c.account_id)
    return [_model(row._mapping) for row in connection.execute(query)]


def remove(connection: Connection, scope: Scope, model_id: str) -> None:
    """Forget a model of the scope's account.

    Raises:
        NotFoundError: it has none of this name.
    """
    get(connection, scope, model_id)
    _remove(connection, scope.account, model_id)


def begin(connection: Connection, scope: Scope, operation: Operation) -> None:
    """Record a new operation."""
    scope.require(operation.account_id)
    values = {name: getattr(operation, name) for name in Operation.__dataclass_fields__}
    connection.execute(insert(_operations), {**values, "request": dumps(operation.request)})


def operation(connection: Connection, scope: Scope, operation_id: str) -> Operation:
    """An operation of the scope's account.

    Raises:
        NotFoundError: it has none of this name.
    """
    query = _SELECT_OPERATION.where(
        _operations.c.operation_id == operation_id, _operations.c.account_id == scope.account
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no operation {operation_id}")
    return Operation(**{**row._mapping, "request": json.loads(row.request)})


def take(connection: Connection, scope: Scope, wanted: Operation, now: float) -> bool:
    """Say that an operation is worked on; False when somebody else has said so since it was read, or finished it."""
    statement = update(_operations).where(
        *_same(scope, wanted), _operations.c.worked_on_at == wanted.worked_on_at, _operations.c.done.is_(False)
    )
    return connection.execute(statement.values(worked_on_at=now)).rowcount == 1


def finish(connection: Connection, scope: Scope, wanted: Operation, error: str = "") -> None:
    """Record how an operation ended."""
    connection.execute(update(_operations).where(*_same(scope, wanted)).values(done=True, error=error))


def _same(scope: Scope, wanted: Operation) -> tuple[Any, ...]:
    scope.require(wanted.account_id)
    return (_operations.c.operation_id == wanted.operation_id, _operations.c.account_id == wanted.account_id)


def _remove(connection: Connection, account_id: str, model_id: str) -> None:
    connection.execute(delete(_models).where(_models.c.model_id == model_id, _models.c.account_id == account_id))


def _model(row: Mapping[Any, Any]) -> PromotedModel:
    return PromotedModel(**{**row, "details": json.loads(row["details"])})
