"""The leader's lease: who leads, until when, and in which epoch, which rises with every change of hands. Nobody else
writes while a transaction does: between a leader's `check` and its commit nobody takes over."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sqlalchemy import Connection, select, update

from trainmaster.server.core.errors import NotLeaderError
from trainmaster.server.store import schema
from trainmaster.server.store.records import PreparedStatement, Records, database_time
from trainmaster.server.store.scope import Scope

_leader = schema.leader
_TIME = PreparedStatement(select(database_time()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    epoch: int
    holder: str
    """The server that leads; no other may have the same name at the same time."""
    url: str
    expires_at: float
    since: float | None = None
    """When it changed hands last."""


_LEASES = Records(Lease, _leader)
_LEASE = PreparedStatement(_LEASES.select)


def now(connection: Connection, scope: Scope) -> float:  # noqa: ARG001 - the time is no secret
    """The time by the database's clock, on which all servers agree."""
    return float(_TIME.rows(connection, {})[0][0])


def acquire(connection: Connection, scope: Scope, holder: str, url: str, now: float, ttl_s: float) -> Lease | None:
    """Take the lead if nobody else has it; the holder keeps its epoch."""
    scope.require_everything()
    last = _last(connection)
    if last.holder not in (None, holder) and last.expires_at > now:
        return None
    epoch, since = (last.epoch, last.since) if last.holder == holder else (last.epoch + 1, now)
    lease = Lease(epoch=epoch, holder=holder, url=url, expires_at=now + ttl_s, since=since)
    taken = update(_leader).where(_leader.c.epoch == last.epoch).values(_LEASES.to_row(lease))
    return lease if connection.execute(taken).rowcount else None


def renew(connection: Connection, scope: Scope, lease: Lease, now: float, ttl_s: float) -> Lease | None:
    """Extend the lease; None when another server has taken over."""
    scope.require_everything()
    renewed = replace(lease, expires_at=now + ttl_s)
    return renewed if _change(connection, lease, expires_at=renewed.expires_at) else None


def release(connection: Connection, scope: Scope, lease: Lease) -> None:
    """Stop leading, so that another server need not wait for the lease to expire."""
    scope.require_everything()
    _change(connection, lease, holder=None, expires_at=0.0)


def current(connection: Connection, scope: Scope) -> Lease | None:  # noqa: ARG001 - who leads is no secret
    """The lease, also an expired one; None when nobody holds it."""
    last = _last(connection)
    return None if last.holder is None else last


def check(connection: Connection, scope: Scope, epoch: int) -> None:
    """Raise NotLeaderError in the transaction of a server whose lease has changed hands or was released."""
    lease = current(connection, scope)
    if lease is None or lease.epoch != epoch:
        raise NotLeaderError()


def _last(connection: Connection) -> Lease:
    """The last lease that there was; its holder is None once it was released."""
    return _LEASES.from_row(_LEASE.rows(connection, {})[0])


def _change(connection: Connection, lease: Lease, **values: float | None) -> bool:
    held = update(_leader).where(_leader.c.epoch == lease.epoch, _leader.c.holder == lease.holder)
    return connection.execute(held.values(values)).rowcount > 0
