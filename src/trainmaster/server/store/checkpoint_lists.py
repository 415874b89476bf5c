"""Lists of a job's checkpoints, a page at a time: a job may have tens of thousands."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, func, or_, select, tuple_

from trainmaster.server.core.job import Checkpoint
from trainmaster.server.core.retention import COMMITTED
from trainmaster.server.store import schema
from trainmaster.server.store.job_list import MAX_TOTAL_COUNT
from trainmaster.server.store.page_tokens import bad_token, position_of, token_after
from trainmaster.server.store.portions import portions
from trainmaster.server.store.records import CHECKPOINT_FIELDS, checkpoint_from_row
from trainmaster.server.store.scope import Scope

_checkpoints = schema.checkpoints
_ORDER = "created_at"
_MAX_STEP = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPage:
    """One page of a list of checkpoints, the oldest first."""

    checkpoints: tuple[Checkpoint, ...]
    next_page_token: str | None
    total_count: int
    """Over all pages; at most `MAX_TOTAL_COUNT`, which means: more than one less than that."""


def page(
    connection: Connection, scope: Scope, job_id: str, *, page_size: int, page_token: str | None = None
) -> CheckpointPage:
    """One page of the committed checkpoints of a job.

    Raises:
        SpecError: the token is not one of such a list.
    """
    c = _checkpoints.c
    query = select(*(c[name] for name in CHECKPOINT_FIELDS)).where(*_of(job_id))
    if page_token is not None:
        query = query.where(tuple_(c.created_at, c.step, c.checkpoint_id) > tuple_(*_position(page_token)))
    query = scope.limit(query.order_by(c.created_at, c.step, c.checkpoint_id), c.account_id)
    found = [checkpoint_from_row(row) for row in connection.execute(query.limit(page_size + 1))]
    shown, more = found[:page_size], len(found) > page_size
    counted = more or page_token is not None
    return CheckpointPage(
        checkpoints=tuple(shown),
        next_page_token=page_token_after(shown[-1]) if more else None,
        total_count=_count(connection, scope, job_id) if counted else len(found),
    )


def named(connection: Connection, scope: Scope, job_id: str, checkpoint_ids: Collection[str]) -> list[Checkpoint]:
    """The committed checkpoints of a job that have one of some ids."""
    query = select(*(_checkpoints.c[name] for name in CHECKPOINT_FIELDS)).where(*_of(job_id))
    found: list[Checkpoint] = []
    for some in portions(checkpoint_ids):
        chosen = scope.limit(query.where(_checkpoints.c.checkpoint_id.in_(some)), _checkpoints.c.account_id)
        found += [checkpoint_from_row(row) for row in connection.execute(chosen)]
    return found


def called(connection: Connection, scope: Scope, job_id: str, name: str) -> list[Checkpoint]:
    """What users of a trainer service saved under a name, or under an id."""
    c = _checkpoints.c
    query = select(*(c[field] for field in CHECKPOINT_FIELDS)).where(
        *_of(job_id), c.kind != "", or_(c.checkpoint_id == name, c.name == name)
    )
    return [checkpoint_from_row(row) for row in connection.execute(scope.limit(query, c.account_id))]


def newest_of_kind(connection: Connection, scope: Scope, job_id: str, kind: str, *, most: int) -> list[Checkpoint]:
    """What users of a trainer service saved last, of one kind; the newest first."""
    c = _checkpoints.c
    query = select(*(c[field] for field in CHECKPOINT_FIELDS)).where(*_of(job_id), c.kind == kind)
    query = query.order_by(c.created_at.desc(), c.step.desc()).limit(most)
    return [checkpoint_from_row(row) for row in connection.execute(scope.limit(query, c.account_id))]


def total_size(connection: Connection, scope: Scope, job_id: str, *, root: str) -> int | None:
    """The room that the checkpoints of a job take below a root, as it reported it; None when there are none."""
    c = _checkpoints.c
    query = select(func.sum(c.size_bytes)).where(*_of(job_id), c.root == root)
    total = connection.execute(scope.limit(query, c.account_id)).scalar_one()
    return None if total is None else int(total)


def paths(
    connection: Connection, scope: Scope, job_id: str, *, root: str, start: str, limit: int
) -> list[tuple[str, str]]:
    """Id and path of a job's checkpoints below a root, by id, from the id `start` on."""
    c = _checkpoints.c
    query = select(c.checkpoint_id, c.path).where(*_of(job_id), c.root == root, c.checkpoint_id >= start)
    query = scope.limit(query.order_by(c.checkpoint_id).limit(limit), c.account_id)
    return [(row.checkpoint_id, row.path) for row in connection.execute(query)]


def _of(job_id: str) -> tuple[ColumnElement[bool], ...]:
    return _checkpoints.c.job_id == job_id, _checkpoints.c.status == COMMITTED


def _count(connection: Connection, scope: Scope, job_id: str) -> int:
    query = select(_checkpoints.c.checkpoint_id).where(*_of(job_id)).limit(MAX_TOTAL_COUNT)
    counted = scope.limit(query, _checkpoints.c.account_id).subquery()
    return int(connection.execute(select(func.count()).select_from(counted)).scalar_one())


def page_token_after(checkpoint: Checkpoint) -> str:
    """The token of the page that goes on after a checkpoint."""
    return token_after(_ORDER, checkpoint.created_at, f"{checkpoint.step}:{checkpoint.checkpoint_id}")


def _position(token: str) -> tuple[float, int, str]:
    created_at, place = position_of(token, _ORDER, float)
    step, _, checkpoint_id = place.partition(":")
    try:
        number = int(step)
    except ValueError:
        raise bad_token() from None
    if not 0 <= number <= _MAX_STEP:
        raise bad_token()
    return float(created_at), number, checkpoint_id
