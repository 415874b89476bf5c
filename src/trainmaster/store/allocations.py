"""Allocations: which attempt holds what on which node. A GPU is held by one attempt at a time, or the write fails."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, select
from sqlalchemy.exc import IntegrityError

from trainmaster.core.errors import DoubleBookedError
from trainmaster.core.job import Attempt, Job
from trainmaster.core.resources import Share
from trainmaster.store import schema
from trainmaster.store.prepared import Prepared
from trainmaster.store.scope import Scope

_shares, _gpus = schema.allocations, schema.allocated_gpus

_INSERT_SHARES, _INSERT_GPUS = (Prepared(insert(table)) for table in (_shares, _gpus))
_DELETE_SHARES, _DELETE_GPUS = (
    Prepared(
        delete(table).where(
            table.c.job_id == bindparam("key"),
            table.c.attempt == bindparam("number"),
            table.c.account_id == bindparam("account"),
        )
    )
    for table in (_shares, _gpus)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What one node of an attempt's gang holds."""

    account_id: str
    job_id: str
    attempt: int
    member: int
    """Which node of the gang."""
    share: Share


def take(connection: Connection, scope: Scope, job: Job, attempt: Attempt) -> None:
    """Give an attempt its shares.

    Raises:
        DoubleBookedError: another attempt holds one of the GPUs; the transaction must not be committed.
    """
    scope.require(job.account_id)
    owners = [
        ({"account_id": job.account_id, "job_id": job.job_id, "attempt": attempt.number, "member": member}, share)
        for member, share in enumerate(attempt.shares)
    ]
    shares = [
        {
            **owner,
            "node_id": share.node_id,
            "cpu_cores": share.cpu_cores,
            "ram_mb": share.ram_mb,
            "storage_mb": share.storage_mb,
        }
        for owner, share in owners
    ]
    gpus = [{**owner, "node_id": share.node_id, "gpu_index": gpu} for owner, share in owners for gpu in share.gpus]
    if shares:
        _INSERT_SHARES.execute_many(connection, shares)
    if gpus:
        try:
            _INSERT_GPUS.execute_many(connection, gpus)
        except IntegrityError as error:
            wanted = ", ".join(f"{gpu['node_id']}/{gpu['gpu_index']}" for gpu in gpus)
            raise DoubleBookedError(f"another attempt holds one of the GPUs {wanted}") from error


def release(connection: Connection, scope: Scope, job: Job, attempt: Attempt) -> None:
    """Take back all that an attempt holds."""
    scope.require(job.account_id)
    owner = {"key": job.job_id, "number": attempt.number, "account": job.account_id}
    _DELETE_SHARES.execute(connection, owner)
    _DELETE_GPUS.execute(connection, owner)


def all(connection: Connection, scope: Scope) -> list[Allocation]:  # noqa: A001 - read as `allocations.all`
    """Everything that is held now."""
    gpus: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
    held = select(_gpus.c.job_id, _gpus.c.attempt, _gpus.c.member, _gpus.c.gpu_index).order_by(_gpus.c.gpu_index)
    for job_id, attempt, member, gpu in connection.execute(scope.limit(held, _gpus.c.account_id)):
        gpus[job_id, attempt, member].append(gpu)
    query = select(_shares).order_by(_shares.c.job_id, _shares.c.attempt, _shares.c.member)
    return [
        Allocation(
            account_id=row.account_id,
            job_id=row.job_id,
            attempt=row.attempt,
            member=row.member,
            share=Share(
                node_id=row.node_id,
                gpus=tuple(gpus[row.job_id, row.attempt, row.member]),
                cpu_cores=row.cpu_cores,
                ram_mb=row.ram_mb,
                storage_mb=row.storage_mb,
            ),
        )
        for row in connection.execute(scope.limit(query, _shares.c.account_id))
    ]
