"""Attempts, and their allocations. One attempt at a time holds a GPU, no node gives more than it has, and an allocation
is released once: a write that would break one of these rules fails."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from trainmaster.server.core.errors import DoubleBookedError, NotFoundError
from trainmaster.server.core.job import Attempt, Job
from trainmaster.server.core.resources import Share
from trainmaster.server.store import schema
from trainmaster.server.store.records import PreparedStatement, Records, ScopedQuery
from trainmaster.server.store.scope import Scope

_attempts = schema.attempts

_MAX_DIGITS = 9
"""No attempt has a longer number, and databases do not accept every integer."""

RECORDS = Records(Attempt, _attempts)
_OF_JOB = ScopedQuery(
    RECORDS.select.where(_attempts.c.job_id == bindparam("key")).order_by(_attempts.c.number), _attempts.c.account_id
)
_INSERT = PreparedStatement(insert(_attempts))
_UPDATE = PreparedStatement(
    update(_attempts).where(
        _attempts.c.job_id == bindparam("key"),
        _attempts.c.number == bindparam("attempt"),
        _attempts.c.account_id == bindparam("account"),
    ),
    columns=[column.name for column in _attempts.c if not column.primary_key],
)


def put(connection: Connection, scope: Scope, job: Job, attempt: Attempt) -> bool:
    """Store an attempt as it is now; True when it was not there before."""
    scope.require(job.account_id)
    row = RECORDS.to_row(attempt, account_id=job.account_id, job_id=job.job_id)
    key = {"key": job.job_id, "attempt": attempt.number, "account": job.account_id}
    if _UPDATE.execute(connection, {**row, **key}):
        return False
    _INSERT.execute(connection, row)
    return True


def of_job(connection: Connection, scope: Scope, job_id: str) -> list[Attempt]:
    return [RECORDS.from_row(row) for row in _OF_JOB.rows(connection, scope, key=job_id)]


def get(connection: Connection, scope: Scope, attempt_id: str) -> Attempt:
    """One attempt by its id, `<job_id>.<number>`."""
    job_id, _, number = attempt_id.rpartition(".")
    if number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS:
        found = RECORDS.first(connection, scope, _attempts.c.job_id == job_id, _attempts.c.number == int(number))
        if found is not None:
            return found
    raise NotFoundError("there is no such attempt")


def job_of_token(connection: Connection, scope: Scope, token: str) -> str | None:
    """The job whose attempt holds a token; None when none does, or when that attempt has ended."""
    query = select(_attempts.c.job_id).where(_attempts.c.token == token, _attempts.c.ended_at.is_(None))
    return connection.execute(scope.limit(query, _attempts.c.account_id)).scalar()


# Allocations.

_shares, _gpus, _nodes = schema.allocations, schema.allocated_gpus, schema.nodes

_SHARE_FIELDS = ("node_id", "cpu_cores", "ram_mb", "storage_mb")
"""The columns of a share; its GPUs have rows of their own."""

_INSERT_SHARES, _INSERT_GPUS = (PreparedStatement(insert(table)) for table in (_shares, _gpus))
_DELETE_SHARES, _DELETE_GPUS = (
    PreparedStatement(
        delete(table).where(
            table.c.job_id == bindparam("key"),
            table.c.attempt == bindparam("number"),
            table.c.account_id == bindparam("account"),
        )
    )
    for table in (_shares, _gpus)
)
_LOAD = PreparedStatement(
    select(
        *(_nodes.c[name] for name in ("slots", "cpu_cores", "ram_mb", "storage_mb", "gpus")),
        func.count(),
        *(func.sum(_shares.c[name]) for name in ("cpu_cores", "ram_mb", "storage_mb")),
    )
    .select_from(_nodes.join(_shares, _shares.c.node_id == _nodes.c.node_id))
    .where(_nodes.c.node_id == bindparam("wanted"))
    .group_by(_nodes.c.node_id)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What one node of an attempt's gang holds."""

    account_id: str
    job_id: str
    attempt: int
    member: int
    share: Share


def take(connection: Connection, scope: Scope, job: Job, attempt: Attempt) -> None:
    """Give an attempt its shares; the transaction must not be committed after a DoubleBookedError."""
    scope.require(job.account_id)
    owners = [
        ({"account_id": job.account_id, "job_id": job.job_id, "attempt": attempt.number, "member": member}, share)
        for member, share in enumerate(attempt.shares)
    ]
    shares = [{**owner, **{name: getattr(share, name) for name in _SHARE_FIELDS}} for owner, share in owners]
    gpus = [{**owner, "node_id": share.node_id, "gpu_index": gpu} for owner, share in owners for gpu in share.gpus]
    if shares:
        _INSERT_SHARES.execute_many(connection, shares)
    if gpus:
        try:
            _INSERT_GPUS.execute_many(connection, gpus)
        except connection.dialect.loaded_dbapi.IntegrityError as error:
            wanted = ", ".join(f"{gpu['node_id']}/{gpu['gpu_index']}" for gpu in gpus)
            raise DoubleBookedError(f"another attempt holds one of the GPUs {wanted}") from error
    for node_id in {share.node_id for share in attempt.shares}:
        _check_load(connection, node_id, [share for share in attempt.shares if share.node_id == node_id])


def release(connection: Connection, scope: Scope, job: Job, attempt: Attempt) -> None:
    """Take back all that an attempt holds, or raise DoubleBookedError when that is not just what it was given."""
    scope.require(job.account_id)
    owner = {"key": job.job_id, "number": attempt.number, "account": job.account_id}
    held = _DELETE_SHARES.execute(connection, owner), _DELETE_GPUS.execute(connection, owner)
    given = len(attempt.shares), sum(len(share.gpus) for share in attempt.shares)
    if held != given:
        raise DoubleBookedError(
            f"attempt {job.job_id}.{attempt.number} was given {given[0]} shares with {given[1]} GPUs, "
            f"and holds {held[0]} with {held[1]}"
        )


def all_allocations(connection: Connection, scope: Scope) -> list[Allocation]:
    gpus: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
    held = select(_gpus.c.job_id, _gpus.c.attempt, _gpus.c.member, _gpus.c.gpu_index).order_by(_gpus.c.gpu_index)
    for *member, gpu in connection.execute(scope.limit(held, _gpus.c.account_id)):
        gpus[*member].append(gpu)
    owner = (_shares.c.account_id, _shares.c.job_id, _shares.c.attempt, _shares.c.member)
    query = select(*owner, *(_shares.c[name] for name in _SHARE_FIELDS)).order_by(*owner[1:])
    found = []
    for account_id, job_id, attempt, member, *values in connection.execute(scope.limit(query, _shares.c.account_id)):
        share = Share(gpus=tuple(gpus[job_id, attempt, member]), **dict(zip(_SHARE_FIELDS, values, strict=True)))
        found.append(Allocation(account_id=account_id, job_id=job_id, attempt=attempt, member=member, share=share))
    return found


def _check_load(connection: Connection, node_id: str, shares: Sequence[Share]) -> None:
    """Refuse what a node cannot hold, with all that is held there already."""
    if (load := _LOAD.first(connection, {"wanted": node_id})) is None:
        if connection.execute(select(_nodes.c.node_id).where(_nodes.c.pool == node_id).limit(1)).first() is not None:
            return  # A pool: its engine gives nobody more than there is.
        raise DoubleBookedError(f"there is no node {node_id}")
    slots, cores, ram_mb, storage_mb, gpus, held_slots, held_cores, held_ram_mb, held_storage_mb = load
    # Only what is asked for counts: a node may have shrunk under what it holds, as free storage does every minute.
    for what, has, held, asked in (
        ("slots", slots, held_slots, True),
        ("CPU cores", cores, held_cores, any(share.cpu_cores for share in shares)),
        ("MB of memory", ram_mb, held_ram_mb, any(share.ram_mb for share in shares)),
        ("MB of storage", storage_mb, held_storage_mb, any(share.storage_mb for share in shares)),
    ):
        if asked and held > has:
            raise DoubleBookedError(f"node {node_id} has {has} {what}, and {held} would be held")
    wanted = {gpu for share in shares for gpu in share.gpus}
    if wanted and (missing := wanted - {gpu["index"] for gpu in json.loads(gpus) if gpu.get("healthy", True)}):
        raise DoubleBookedError(f"node {node_id} has no GPU {min(missing)} to give")
