"""The leader's lease: who leads, until when, and in which epoch. Epochs rise with every change of hands.

Nobody else writes while a transaction does: between a leader's `check` and its commit nobody takes over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sqlalchemy import Connection, select, update

from trainmaster.server.core.errors import NotLeaderError
from trainmaster.server.store import schema
from trainmaster.server.store.records import Prepared, database_time
from trainmaster.server.store.scope import Scope

_leader = schema.leader
_SELECT = Prepared(select(_leader.c.epoch, _leader.c.holder, _leader.c.url, _leader.c.expires_at, _leader.c.since))
_TIME = Prepared(select(database_time()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to lead."""

    epoch: int
    holder: str
    """The server that leads; no other may have the same name at the same time."""
    url: str
    """Where it answers."""
    expires_at: float
    since: float | None = None
    """When it changed hands last."""


def now(connection: Connection, scope: Scope) -> float:  # noqa: ARG001 - the time is no secret
    """What the database's clock shows: servers on several machines agree on it, and not on their own."""
    return float(_TIME.execute(connection, {}).scalar_one())


def acquire(connection: Connection, scope: Scope, holder: str, url: str, now: float, ttl_s: float) -> Lease | None:
    """Take the lead if nobody else has it; who has it already keeps its epoch."""
    scope.require_everything()
    row = _SELECT.execute(connection, {}).one()
    if row.holder not in (None, holder) and row.expires_at > now:
        return None
    epoch, since = (row.epoch, row.since) if row.holder == holder else (row.epoch + 1, now)
    lease = Lease(epoch=epoch, holder=holder, url=url, expires_at=now + ttl_s, since=since)
    taken = connection.execute(
        update(_leader)
        .where(_leader.c.epoch == row.epoch)
        .values(epoch=epoch, holder=holder, url=url, expires_at=lease.expires_at, since=since)
    )
    return lease if taken.rowcount else None


def renew(connection: Connection, scope: Scope, lease: Lease, now: float, ttl_s: float) -> Lease | None:
    """Lead for longer; None when somebody else has taken over."""
    scope.require_everything()
    renewed = connection.execute(
        update(_leader)
        .where(_leader.c.epoch == lease.epoch, _leader.c.holder == lease.holder)
        .values(expires_at=now + ttl_s)
    )
    return replace(lease, expires_at=now + ttl_s) if renewed.rowcount else None


def release(connection: Connection, scope: Scope, lease: Lease) -> None:
    """Stop leading, so that another server need not wait for the lease's end."""
    scope.require_everything()
    connection.execute(
        update(_leader)
        .where(_leader.c.epoch == lease.epoch, _leader.c.holder == lease.holder)
        .values(holder=None, expires_at=0.0)
    )


def current(connection: Connection, scope: Scope) -> Lease | None:  # noqa: ARG001 - who leads is no secret
    """The lease as it stands, even when its time is over; None when nobody holds it."""
    row = _SELECT.execute(connection, {}).one()
    if row.holder is None:
        return None
    return Lease(epoch=row.epoch, holder=row.holder, url=row.url, expires_at=row.expires_at, since=row.since)


def check(connection: Connection, scope: Scope, epoch: int) -> None:
    """Fail the transaction of a leader that leads no more.

    Raises:
        NotLeaderError: the lease has changed hands, or was released, since this epoch.
    """
    lease = current(connection, scope)
    if lease is None or lease.epoch != epoch:
        raise NotLeaderError()
