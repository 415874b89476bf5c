"""Accounts: whose jobs, keys and files are kept apart."""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, delete, insert, select, update

from trainmaster.server.core.accounts import DEFAULT_ACCOUNT, Account
from trainmaster.server.core.errors import ConflictError, NotFoundError
from trainmaster.server.store import schema
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.statements import Prepared

_accounts, _keys, _jobs, _models = schema.accounts, schema.api_keys, schema.jobs, schema.promoted_models
_ITS_OWN = (
    _keys,
    schema.webhooks,
    schema.idempotency,
    schema.operations,
    schema.tinker_samplers,
    schema.tinker_runs,
    schema.tinker_sessions,
    _accounts,
)
"""What goes with an account, in an order in which nothing refers to what is gone."""

_SELECT = select(*(_accounts.c[name] for name in Account.__dataclass_fields__))
_BY_ID = Prepared(_SELECT.where(_accounts.c.account_id == bindparam("wanted")))


def all(connection: Connection, scope: Scope) -> list[Account]:  # noqa: A001 - read as `accounts.all`
    """Every account in scope, by name."""
    query = scope.limit(_SELECT.order_by(_accounts.c.account_id), _accounts.c.account_id)
    return [Account(**row._mapping) for row in connection.execute(query)]


def get(connection: Connection, scope: Scope, account_id: str) -> Account:
    """One account.

    Raises:
        NotFoundError: there is no such account in scope.
    """
    row = _BY_ID.execute(connection, {"wanted": account_id}).first() if scope.admits(account_id) else None
    if row is None:
        raise NotFoundError(f"there is no account {account_id}")
    return Account(**row._mapping)


def ensure(connection: Connection, scope: Scope, account_id: str, now: float) -> None:
    """Make an account unless it is there."""
    scope.require(account_id)
    if _BY_ID.execute(connection, {"wanted": account_id}).first() is None:
        connection.execute(insert(_accounts), {"account_id": account_id, "created_at": now})


def create(connection: Connection, scope: Scope, account: Account) -> None:
    """Make an account.

    Raises:
        ConflictError: there is one of that name, or there was one that left jobs behind.
    """
    scope.require_everything()
    if _BY_ID.execute(connection, {"wanted": account.account_id}).first() is not None:
        raise ConflictError(f"there is an account {account.account_id} already")
    left = select(_jobs.c.job_id).where(_jobs.c.account_id == account.account_id).limit(1)
    if connection.execute(left).first() is not None:
        # Whoever had the name after it would have its events, usage and checkpoints.
        raise ConflictError(f"there was an account {account.account_id}, whose jobs are on record; take another name")
    values = {name: getattr(account, name) for name in Account.__dataclass_fields__}
    connection.execute(insert(_accounts), values)


def set_uid(connection: Connection, scope: Scope, account_id: str, uid: int | None) -> None:
    """Say as whom the jobs of an account run.

    Raises:
        NotFoundError: there is no such account.
    """
    scope.require_everything()
    changed = update(_accounts).where(_accounts.c.account_id == account_id).values(uid=uid)
    if connection.execute(changed).rowcount == 0:
        raise NotFoundError(f"there is no account {account_id}")


def remove(connection: Connection, scope: Scope, account_id: str) -> None:
    """Take an account away, with its revoked keys, its webhooks, its operations and its sessions.

    Raises:
        NotFoundError: there is no such account.
        ConflictError: it is the default account, or it has jobs, keys or promoted models.
    """
    scope.require_everything()
    get(connection, scope, account_id)
    if account_id == DEFAULT_ACCOUNT:
        raise ConflictError("the account default is always there: the key of the first start belongs to it")
    jobs = select(_jobs.c.job_id).where(_jobs.c.account_id == account_id, _jobs.c.deleted_at.is_(None)).limit(1)
    if connection.execute(jobs).first() is not None:
        raise ConflictError(f"account {account_id} has jobs; delete them first")
    keys = select(_keys.c.key_id).where(_keys.c.account_id == account_id, _keys.c.revoked_at.is_(None)).limit(1)
    if connection.execute(keys).first() is not None:
        raise ConflictError(f"account {account_id} has keys; revoke them first")
    models = select(_models.c.model_id).where(_models.c.account_id == account_id).limit(1)
    if connection.execute(models).first() is not None:
        raise ConflictError(f"account {account_id} has promoted models; delete them first")
    for table in _ITS_OWN:
        connection.execute(delete(table).where(table.c.account_id == account_id))
