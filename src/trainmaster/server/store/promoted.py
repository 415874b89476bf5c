"""Models that were promoted from checkpoints, and the operations that make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, update

from trainmaster.server.store import schema
from trainmaster.server.store.records import Records
from trainmaster.server.store.scope import Scope

_models, _operations = schema.promoted_models, schema.operations


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotedModel:
    """A model of an account, whose files are its own."""

    account_id: str
    model_id: str
    job_id: str
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
    """A promotion that was requested."""

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


_MODELS = Records(PromotedModel, _models)
_OPERATIONS = Records(Operation, _operations)


def put(connection: Connection, scope: Scope, model: PromotedModel) -> None:
    """Record a model, in place of one with the same name."""
    scope.require(model.account_id)
    _remove(connection, model.account_id, model.model_id)
    _MODELS.insert(connection, model)


def get(connection: Connection, scope: Scope, model_id: str) -> PromotedModel:
    this, missing = _models.c.model_id == model_id, f"there is no model {model_id}"
    return _MODELS.get(connection, Scope(scope.account), this, missing=missing)


def all(connection: Connection, scope: Scope) -> list[PromotedModel]:  # noqa: A001 - read as `promoted.all`
    return _MODELS.find(connection, scope, order_by=[_models.c.model_id])


def remove(connection: Connection, scope: Scope, model_id: str) -> None:
    get(connection, scope, model_id)
    _remove(connection, scope.account, model_id)


def begin(connection: Connection, scope: Scope, operation: Operation) -> None:
    scope.require(operation.account_id)
    _OPERATIONS.insert(connection, operation)


def operation(connection: Connection, scope: Scope, operation_id: str) -> Operation:
    this, missing = _operations.c.operation_id == operation_id, f"there is no operation {operation_id}"
    return _OPERATIONS.get(connection, Scope(scope.account), this, missing=missing)


def take(connection: Connection, scope: Scope, wanted: Operation, now: float) -> bool:
    """Claim an operation; False when somebody else has claimed or finished it since it was read."""
    statement = update(_operations).where(
        *_same(scope, wanted), _operations.c.worked_on_at == wanted.worked_on_at, _operations.c.done.is_(False)
    )
    return connection.execute(statement.values(worked_on_at=now)).rowcount == 1


def finish(connection: Connection, scope: Scope, wanted: Operation, error: str = "") -> None:
    connection.execute(update(_operations).where(*_same(scope, wanted)).values(done=True, error=error))


def _same(scope: Scope, wanted: Operation) -> tuple[Any, ...]:
    scope.require(wanted.account_id)
    return (_operations.c.operation_id == wanted.operation_id, _operations.c.account_id == wanted.account_id)


def _remove(connection: Connection, account_id: str, model_id: str) -> None:
    connection.execute(delete(_models).where(_models.c.model_id == model_id, _models.c.account_id == account_id))
