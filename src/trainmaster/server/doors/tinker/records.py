"""What the root Tinker door keeps: sessions, the runs in them, and samplers that were asked for by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, Update, delete, func, insert, select, tuple_, update

from trainmaster.protocol.trainer_requests import PLACE_OF_KIND, TINKER, Mode, WeightsPath
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Checkpoint
from trainmaster.server.core.retention import COMMITTED
from trainmaster.server.doors.futures import Category
from trainmaster.server.doors.tinker.names import (
    SESSION_OVER,
    RunState,
    TinkerRun,
    TinkerSampler,
    TinkerSession,
)
from trainmaster.server.store import schema
from trainmaster.server.store.checkpoints import RECORDS as CHECKPOINTS
from trainmaster.server.store.records import dumps, portions
from trainmaster.server.store.scope import Scope

_sessions, _runs, _samplers = schema.tinker_sessions, schema.tinker_runs, schema.tinker_samplers

_checkpoints = schema.checkpoints

_SESSIONS = select(*(_sessions.c[name] for name in TinkerSession.__dataclass_fields__))
_RUNS = select(*(_runs.c[name] for name in TinkerRun.__dataclass_fields__))
_SAMPLERS = select(*(_samplers.c[name] for name in TinkerSampler.__dataclass_fields__))
_WEIGHTS = CHECKPOINTS.select.where(
    _checkpoints.c.status == COMMITTED, _checkpoints.c.kind.in_(PLACE_OF_KIND)
).order_by(_checkpoints.c.created_at.desc(), _checkpoints.c.checkpoint_id.desc())


def open_session(connection: Connection, scope: Scope, session: TinkerSession) -> TinkerSession:
    """The session; an earlier one, where the same request created it before."""
    scope.require(session.account_id)
    if session.idempotency_key is not None:
        query = _SESSIONS.where(
            _sessions.c.idempotency_key == session.idempotency_key, _sessions.c.account_id == session.account_id
        )
        if (before := connection.execute(query).one_or_none()) is not None:
            return _session(before)
    values = {name: dumps(getattr(session, name)) for name in ("tags", "user_metadata", "finish")}
    connection.execute(insert(_sessions), {**asdict(session), **values})
    return session


def get_session(connection: Connection, scope: Scope, session_id: str) -> TinkerSession:
    """Raises NotFoundError where there is none in scope."""
    query = scope.limit(_SESSIONS.where(_sessions.c.session_id == session_id), _sessions.c.account_id)
    if (row := connection.execute(query).one_or_none()) is None:
        raise NotFoundError(f"there is no session {session_id}")
    return _session(row)


def sessions(
    connection: Connection, scope: Scope, *, limit: int, offset: int = 0, before: tuple[float, str] | None = None
) -> list[TinkerSession]:
    """Newest first, from behind `before`: a creation time and an id."""
    order = (_sessions.c.created_at.desc(), _sessions.c.session_id.desc())
    query = scope.limit(_SESSIONS, _sessions.c.account_id).order_by(*order).limit(limit).offset(offset)
    if before is not None:
        query = query.where(tuple_(_sessions.c.created_at, _sessions.c.session_id) < before)
    return [_session(row) for row in connection.execute(query)]


def finish_session(
    connection: Connection, scope: Scope, session_id: str, *, at: float, finish: Mapping[str, Any]
) -> None:
    """Finish a session, and abandon its pending runs; the first reason stays. NotFoundError where there is none."""
    session = get_session(connection, scope, session_id)
    if session.finished_at is None:
        connection.execute(_change(session).values(finished_at=at, finish=dumps(finish)))
    abandon_pending(connection, scope, session_id)


def end_silent(
    connection: Connection, scope: Scope, *, before: float, at: float, finish: Mapping[str, Any], limit: int = 100
) -> list[str]:
    """Finish sessions whose last heartbeat is older than `before`; their ids."""
    scope.require_everything()
    silent = (
        select(_sessions.c.session_id)
        .where(_sessions.c.finished_at.is_(None), _sessions.c.heartbeat_at < before)
        .limit(limit)
    )
    session_ids = list(connection.execute(silent).scalars())
    for session_id in session_ids:
        finish_session(connection, scope, session_id, at=at, finish=finish)
    return session_ids


def last_finished(connection: Connection, scope: Scope, *, limit: int = 100) -> list[str]:
    scope.require_everything()
    finished = select(_sessions.c.session_id).where(_sessions.c.finished_at.is_not(None))
    return list(connection.execute(finished.order_by(_sessions.c.finished_at.desc()).limit(limit)).scalars())


def move_session(connection: Connection, scope: Scope, session_id: str, project_id: str) -> None:
    """Raises NotFoundError where there is no such session in scope."""
    session = get_session(connection, scope, session_id)
    connection.execute(_change(session).values(project_id=project_id))


def open_run(connection: Connection, scope: Scope, run: TinkerRun) -> TinkerRun:
    """The run; an earlier one, where its model was asked for before."""
    scope.require(run.account_id)
    query = _RUNS.where(_runs.c.model_id == run.model_id, _runs.c.account_id == run.account_id)
    if (row := connection.execute(query).one_or_none()) is not None:
        return _run(row)
    connection.execute(insert(_runs), {**asdict(run), "request": dumps(run.request)})
    return run


def get_run(connection: Connection, scope: Scope, model_id: str) -> TinkerRun:
    """Raises NotFoundError where there is none in scope."""
    query = scope.limit(_RUNS.where(_runs.c.model_id == model_id), _runs.c.account_id)
    if (row := connection.execute(query).one_or_none()) is None:
        raise NotFoundError(f"there is no model {model_id}")
    return _run(row)


def runs(
    connection: Connection, scope: Scope, *, limit: int, offset: int = 0, project_id: str | None = None
) -> tuple[list[TinkerRun], int]:
    """A page of the runs whose models were created, newest first, and how many there are."""

    def those(query: Select[Any]) -> Select[Any]:
        query = scope.limit(query.where(_runs.c.state == RunState.CREATED), _runs.c.account_id)
        if project_id is None:
            return query
        inside = select(_sessions.c.session_id).where(_sessions.c.project_id == project_id)
        return query.where(_runs.c.session_id.in_(inside))

    order = (_runs.c.created_at.desc(), _runs.c.model_id.desc())
    found = connection.execute(those(_RUNS).order_by(*order).limit(limit).offset(offset))
    total = connection.execute(those(select(func.count()).select_from(_runs))).scalar_one()
    return [_run(row) for row in found], total


def runs_of_session(connection: Connection, scope: Scope, session_id: str) -> list[TinkerRun]:
    """Oldest first."""
    query = _RUNS.where(_runs.c.session_id == session_id).order_by(_runs.c.created_at, _runs.c.model_id)
    return [_run(row) for row in connection.execute(scope.limit(query, _runs.c.account_id))]


def settle_run(connection: Connection, scope: Scope, run: TinkerRun) -> None:
    scope.require(run.account_id)
    values = {name: getattr(run, name) for name in ("state", "job_id", "attempt", "error", "category")}
    changed = update(_runs).where(_runs.c.model_id == run.model_id, _runs.c.account_id == run.account_id)
    connection.execute(changed.values(**values))


def abandon_pending(connection: Connection, scope: Scope, session_id: str) -> list[str]:
    """Give up the models of a finished session that are not made yet.

    Returns:
        The jobs of its models that were never made, but for those that a model of another session waits for: the same
        ones however often it is asked.

    Raises:
        NotFoundError: there is no such session in scope.
    """
    session = get_session(connection, scope, session_id)
    of_session = (_runs.c.session_id == session_id, _runs.c.account_id == session.account_id)
    given_up = {"state": RunState.FAILED, "error": SESSION_OVER, "category": Category.USER}
    connection.execute(update(_runs).where(*of_session, _runs.c.state == RunState.PENDING).values(**given_up))
    going_on = select(_sessions.c.session_id).where(
        _sessions.c.account_id == session.account_id, _sessions.c.finished_at.is_(None)
    )
    wanted = select(_runs.c.job_id).where(
        _runs.c.account_id == session.account_id,
        _runs.c.state == RunState.PENDING,
        _runs.c.job_id.is_not(None),
        _runs.c.session_id.in_(going_on),
    )
    failed = (_runs.c.state == RunState.FAILED, _runs.c.job_id.is_not(None))
    never_made = select(_runs.c.job_id).where(*of_session, *failed)
    return sorted(set(connection.execute(never_made).scalars()) - set(connection.execute(wanted).scalars()))


def note_use(
    connection: Connection, scope: Scope, *, sessions_heard: Mapping[str, float], runs_used: Mapping[str, float]
) -> None:
    scope.require_everything()
    for session_id, at in sessions_heard.items():
        connection.execute(update(_sessions).where(_sessions.c.session_id == session_id).values(heartbeat_at=at))
    for model_id, at in runs_used.items():
        connection.execute(update(_runs).where(_runs.c.model_id == model_id).values(used_at=at))


def add_sampler(connection: Connection, scope: Scope, sampler: TinkerSampler) -> None:
    """An existing one stays as it is."""
    scope.require(sampler.account_id)
    if find_sampler(connection, Scope(sampler.account_id), sampler.sampler_id) is None:
        connection.execute(insert(_samplers), asdict(sampler))


def find_sampler(connection: Connection, scope: Scope, sampler_id: str) -> TinkerSampler | None:
    """None where there is none in scope with this id that was asked for by name."""
    query = scope.limit(_SAMPLERS.where(_samplers.c.sampler_id == sampler_id), _samplers.c.account_id)
    row = connection.execute(query).one_or_none()
    return None if row is None else TinkerSampler(**row._mapping)


def samplers_of_session(connection: Connection, scope: Scope, session_id: str) -> list[TinkerSampler]:
    """Oldest first."""
    query = _SAMPLERS.where(_samplers.c.session_id == session_id).order_by(
        _samplers.c.created_at, _samplers.c.sampler_id
    )
    return [TinkerSampler(**row._mapping) for row in connection.execute(scope.limit(query, _samplers.c.account_id))]


def weights(
    connection: Connection, scope: Scope, *, job_id: str | None = None, path: WeightsPath | None = None
) -> list[Checkpoint]:
    """What runs saved, the newest first: of one job or of all, under one path or under any.

    Of several that were saved under one path, the latest lies there.
    """
    query = _WEIGHTS
    if job_id is not None:
        query = query.where(_checkpoints.c.job_id == job_id)
    if path is not None:
        query = query.where(_checkpoints.c.kind == path.kind, _checkpoints.c.name == path.name)
    found: dict[tuple[str, str, str], Checkpoint] = {}
    for row in connection.execute(scope.limit(query, _checkpoints.c.account_id)):
        checkpoint = CHECKPOINTS.from_row(row)
        if checkpoint.attributes.get("door") == TINKER:
            model_id = str(checkpoint.attributes.get("model_id"))
            found.setdefault((model_id, checkpoint.kind, checkpoint.name), checkpoint)
    return list(found.values())


def weights_of_run(
    connection: Connection, scope: Scope, run: TinkerRun, path: WeightsPath | None = None
) -> list[Checkpoint]:
    """Newest first."""
    if run.job_id is None:
        return []
    saved = weights(connection, scope, job_id=run.job_id, path=path)
    return [checkpoint for checkpoint in saved if checkpoint.attributes.get("model_id") == run.model_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What is left of a session that ended, and that nobody can use."""

    session_id: str
    account_id: str
    model_ids: tuple[str, ...]
    """Of its runs that have no weights."""
    sampler_ids: tuple[str, ...]
    whole: bool
    """No other runs are left: the session goes, too."""


def leftovers(
    connection: Connection, scope: Scope, *, before: float, after: str = "", limit: int = 500
) -> tuple[list[Leftover], str | None]:
    """What can be deleted of sessions that ended before `before`; looks at `limit` of them, behind the id `after`.

    The second value is the `after` of the next call; None when there are no more sessions.
    """
    scope.require_everything()
    ended = (
        select(_sessions.c.session_id, _sessions.c.account_id)
        .where(_sessions.c.finished_at < before, _sessions.c.session_id > after)
        .order_by(_sessions.c.session_id)
        .limit(limit)
    )
    keys = [(row.session_id, row.account_id) for row in connection.execute(ended)]
    if not keys:
        return [], None
    inside = [session_id for session_id, _ in keys]
    models: dict[tuple[str, str], list[tuple[str, str | None]]] = {key: [] for key in keys}
    samplers: dict[tuple[str, str], list[str]] = {key: [] for key in keys}
    columns = (_runs.c.session_id, _runs.c.account_id, _runs.c.model_id, _runs.c.job_id)
    for session_id, account_id, model_id, job_id in connection.execute(
        select(*columns).where(_runs.c.session_id.in_(inside)).order_by(_runs.c.model_id)
    ):
        models.get((session_id, account_id), []).append((model_id, job_id))
    for session_id, account_id, sampler_id in connection.execute(
        select(_samplers.c.session_id, _samplers.c.account_id, _samplers.c.sampler_id)
        .where(_samplers.c.session_id.in_(inside))
        .order_by(_samplers.c.sampler_id)
    ):
        samplers.get((session_id, account_id), []).append(sampler_id)
    kept = _models_with_weights(connection, {job_id for each in models.values() for _, job_id in each if job_id})
    found = []
    for session_id, account_id in keys:
        runs_of_it = [model_id for model_id, _ in models[session_id, account_id]]
        useless = tuple(model_id for model_id in runs_of_it if (account_id, model_id) not in kept)
        whole = len(useless) == len(runs_of_it)
        gone = tuple(samplers[session_id, account_id])
        if useless or gone or whole:
            found.append(
                Leftover(session_id=session_id, account_id=account_id, model_ids=useless, sampler_ids=gone, whole=whole)
            )
    return found, inside[-1] if len(keys) == limit else None


def forget(connection: Connection, scope: Scope, gone: Leftover) -> None:
    scope.require(gone.account_id)

    def remove(table: Table, condition: ColumnElement[bool]) -> None:
        connection.execute(delete(table).where(condition, table.c.account_id == gone.account_id))

    remove(_samplers, _samplers.c.session_id == gone.session_id)
    for some in portions(gone.model_ids):
        remove(_runs, _runs.c.model_id.in_(some))
    if gone.whole:
        remove(_sessions, _sessions.c.session_id == gone.session_id)


def _models_with_weights(connection: Connection, job_ids: set[str]) -> set[tuple[str, str]]:
    """The account and the id of each run of these jobs whose weights are still there."""
    saved = select(_checkpoints.c.account_id, _checkpoints.c.attributes).where(
        _checkpoints.c.status == COMMITTED, _checkpoints.c.kind != ""
    )
    return {
        (account_id, str(json.loads(attributes).get("model_id")))
        for some in portions(job_ids)
        for account_id, attributes in connection.execute(saved.where(_checkpoints.c.job_id.in_(some)))
    }


def _change(session: TinkerSession) -> Update:
    return update(_sessions).where(
        _sessions.c.session_id == session.session_id, _sessions.c.account_id == session.account_id
    )


def _session(row: Any) -> TinkerSession:
    values = dict(row._mapping)
    values["tags"] = tuple(json.loads(values["tags"]))
    values["user_metadata"] = json.loads(values["user_metadata"])
    values["finish"] = json.loads(values["finish"])
    return TinkerSession(**values)


def _run(row: Any) -> TinkerRun:
    values = dict(row._mapping)
    values["mode"] = Mode(values["mode"])
    values["state"] = RunState(values["state"])
    values["request"] = json.loads(values["request"])
    return TinkerRun(**values)
