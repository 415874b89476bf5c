"""What the root Tinker door keeps: sessions, the training runs in them, and samplers that were asked for by name."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, Update, and_, delete, func, or_, select, tuple_, update

from trainmaster.protocol.trainer_requests import PLACE_OF_KIND, TINKER, ModelMode, Trainer, WeightsPath
from trainmaster.server.core.job import CheckpointRecord
from trainmaster.server.core.retention import COMMITTED
from trainmaster.server.doors.futures import Category
from trainmaster.server.store import schema
from trainmaster.server.store.checkpoints import RECORDS as CHECKPOINTS
from trainmaster.server.store.records import Records, dumps, portions
from trainmaster.server.store.scope import Scope

ACTIVE_FOR_S = 120.0
"""Clients send a heartbeat every ten seconds, and warn their users after two minutes without an answer."""
SESSION_OVER = "its session ended before the model was made; make it in a new session"
_SESSIONS_AT_ONCE = 100


class RunState(StrEnum):
    PENDING = "pending"  # its trainer is being started, or creates it
    CREATED = "created"  # its trainer has it, as long as that attempt lives
    FAILED = "failed"  # it was never created


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSession:
    """A client's session: its models and samplers belong to it."""

    session_id: str
    account_id: str
    created_at: float
    idempotency_key: str | None = None
    """Of the request that created it: a repeated request gets the same session."""
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    heartbeat_at: float
    """Written every few seconds."""
    finished_at: float | None = None
    finish: Mapping[str, Any] = field(default_factory=dict)
    """Why it was finished: `reason` and `detail`."""

    def is_active(self, now: float) -> bool:
        return self.finished_at is None and now - self.heartbeat_at < ACTIVE_FOR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerRun:
    """One model that was asked for; clients call it a training run."""

    model_id: str
    account_id: str
    session_id: str
    base_model: str
    """As its client calls it."""
    mode: ModelMode
    request: Mapping[str, Any]
    """The body of its create_model."""
    created_at: float
    used_at: float
    """Written every few seconds."""
    state: RunState = RunState.PENDING
    job_id: str | None = None
    """The job whose trainer creates it; None until that was found or submitted."""
    attempt: int | None = None
    """Of that job: the trainer that has the model. The model is lost when this attempt ends."""
    error: str = ""
    category: str = Category.SERVER

    @property
    def lora_rank(self) -> int | None:
        """None when it has no adapter."""
        rank = (self.request.get("lora_config") or {}).get("rank")
        return rank if self.mode is ModelMode.LORA and isinstance(rank, int) else None

    @property
    def trainer(self) -> Trainer | None:
        if self.state is not RunState.CREATED or self.job_id is None or self.attempt is None:
            return None
        return Trainer(self.job_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSampler:
    """A sampling session of a base model, or of weights that were saved under a name."""

    sampler_id: str
    account_id: str
    session_id: str
    base_model: str
    model_path: str | None = None
    created_at: float


_sessions, _runs, _samplers = schema.tinker_sessions, schema.tinker_runs, schema.tinker_samplers
_checkpoints = schema.checkpoints

SESSIONS = Records(TinkerSession, _sessions)
RUNS = Records(TinkerRun, _runs)
SAMPLERS = Records(TinkerSampler, _samplers)


def open_session(connection: Connection, scope: Scope, session: TinkerSession) -> TinkerSession:
    """The session; an earlier one, where the same request created it before."""
    scope.require(session.account_id)
    if session.idempotency_key is not None:
        same_request = _sessions.c.idempotency_key == session.idempotency_key
        if (before := SESSIONS.first(connection, Scope(session.account_id), same_request)) is not None:
            return before
    SESSIONS.insert(connection, session)
    return session


def get_session(connection: Connection, scope: Scope, session_id: str) -> TinkerSession:
    missing = f"there is no session {session_id}"
    return SESSIONS.get(connection, scope, _sessions.c.session_id == session_id, missing=missing)


def sessions(
    connection: Connection, scope: Scope, *, limit: int, offset: int = 0, before: tuple[float, str] | None = None
) -> list[TinkerSession]:
    """Newest first, from behind `before`: a creation time and an id."""
    older = () if before is None else (tuple_(_sessions.c.created_at, _sessions.c.session_id) < before,)
    order = (_sessions.c.created_at.desc(), _sessions.c.session_id.desc())
    return SESSIONS.find(connection, scope, *older, order_by=order, limit=limit, offset=offset)


def finish_session(
    connection: Connection, scope: Scope, session_id: str, *, at: float, finish: Mapping[str, Any]
) -> None:
    """Finish a session, and abandon its pending runs; the first reason stays. NotFoundError where there is none."""
    session = get_session(connection, scope, session_id)
    if session.finished_at is None:
        connection.execute(_change(session).values(finished_at=at, finish=dumps(finish)))
    abandon_pending(connection, scope, session_id)


def end_silent(
    connection: Connection, scope: Scope, *, before: float, at: float, finish: Mapping[str, Any]
) -> list[str]:
    """Finish sessions whose last heartbeat is older than `before`; their ids."""
    scope.require_everything()
    silent = select(_sessions.c.session_id).where(_sessions.c.finished_at.is_(None), _sessions.c.heartbeat_at < before)
    session_ids = list(connection.execute(silent.limit(_SESSIONS_AT_ONCE)).scalars())
    for session_id in session_ids:
        finish_session(connection, scope, session_id, at=at, finish=finish)
    return session_ids


def last_finished(connection: Connection, scope: Scope) -> list[str]:
    scope.require_everything()
    finished = select(_sessions.c.session_id).where(_sessions.c.finished_at.is_not(None))
    newest_first = finished.order_by(_sessions.c.finished_at.desc())
    return list(connection.execute(newest_first.limit(_SESSIONS_AT_ONCE)).scalars())


def move_session(connection: Connection, scope: Scope, session_id: str, project_id: str) -> None:
    connection.execute(_change(get_session(connection, scope, session_id)).values(project_id=project_id))


def open_run(connection: Connection, scope: Scope, run: TinkerRun) -> TinkerRun:
    """The run; an earlier one, where its model was asked for before."""
    scope.require(run.account_id)
    before = RUNS.first(connection, Scope(run.account_id), _runs.c.model_id == run.model_id)
    if before is not None:
        return before
    RUNS.insert(connection, run)
    return run


def get_run(connection: Connection, scope: Scope, model_id: str) -> TinkerRun:
    return RUNS.get(connection, scope, _runs.c.model_id == model_id, missing=f"there is no model {model_id}")


def runs(
    connection: Connection, scope: Scope, *, limit: int, offset: int = 0, project_id: str | None = None
) -> tuple[list[TinkerRun], int]:
    """A page of the runs whose models were created, newest first, and how many there are."""
    conditions = [_runs.c.state == RunState.CREATED]
    if project_id is not None:
        inside = select(_sessions.c.session_id).where(_sessions.c.project_id == project_id)
        conditions.append(_runs.c.session_id.in_(inside))
    order = (_runs.c.created_at.desc(), _runs.c.model_id.desc())
    found = RUNS.find(connection, scope, *conditions, order_by=order, limit=limit, offset=offset)
    count = scope.limit(select(func.count()).select_from(_runs).where(*conditions), _runs.c.account_id)
    return found, connection.execute(count).scalar_one()


def runs_of_session(connection: Connection, scope: Scope, session_id: str) -> list[TinkerRun]:
    """Oldest first."""
    order = (_runs.c.created_at, _runs.c.model_id)
    return RUNS.find(connection, scope, _runs.c.session_id == session_id, order_by=order)


def settle_run(connection: Connection, scope: Scope, run: TinkerRun) -> None:
    """One that was given up meanwhile does not become pending again."""
    scope.require(run.account_id)
    values = {name: getattr(run, name) for name in ("state", "job_id", "attempt", "error", "category")}
    changed = update(_runs).where(_runs.c.model_id == run.model_id, _runs.c.account_id == run.account_id)
    if run.state is RunState.PENDING:
        changed = changed.where(_runs.c.state == RunState.PENDING)
    connection.execute(changed.values(**values))


def abandon_pending(connection: Connection, scope: Scope, session_id: str) -> list[str]:
    """Give up the models of a finished session that are not made yet. NotFoundError where there is none in scope.

    Returns the jobs of its models that were never made: the same ones however often it is called.
    """
    session = get_session(connection, scope, session_id)
    of_session = (_runs.c.session_id == session_id, _runs.c.account_id == session.account_id)
    given_up = {"state": RunState.FAILED, "error": SESSION_OVER, "category": Category.USER}
    connection.execute(update(_runs).where(*of_session, _runs.c.state == RunState.PENDING).values(**given_up))
    failed = (_runs.c.state == RunState.FAILED, _runs.c.job_id.is_not(None))
    return sorted(set(connection.execute(select(_runs.c.job_id).where(*of_session, *failed)).scalars()))


def is_waited_for(connection: Connection, account_id: str, job_id: str) -> bool:
    """Whether a model of a session that goes on waits for this trainer, or may be about to: no job is known of it yet,
    and its base model and mode are those of a model that has waited for this one."""
    going_on = select(_sessions.c.session_id).where(
        _sessions.c.account_id == account_id, _sessions.c.finished_at.is_(None)
    )
    of_account = _runs.c.account_id == account_id
    kinds = select(_runs.c.base_model, _runs.c.mode).where(of_account, _runs.c.job_id == job_id)
    alike = and_(_runs.c.job_id.is_(None), tuple_(_runs.c.base_model, _runs.c.mode).in_(kinds))
    waiting = select(_runs.c.model_id).where(
        of_account,
        _runs.c.state == RunState.PENDING,
        _runs.c.session_id.in_(going_on),
        or_(_runs.c.job_id == job_id, alike),
    )
    return connection.execute(waiting.limit(1)).first() is not None


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
        SAMPLERS.insert(connection, sampler)


def find_sampler(connection: Connection, scope: Scope, sampler_id: str) -> TinkerSampler | None:
    """None where there is none in scope with this id that was asked for by name."""
    return SAMPLERS.first(connection, scope, _samplers.c.sampler_id == sampler_id)


def samplers_of_session(connection: Connection, scope: Scope, session_id: str) -> list[TinkerSampler]:
    """Oldest first."""
    order = (_samplers.c.created_at, _samplers.c.sampler_id)
    return SAMPLERS.find(connection, scope, _samplers.c.session_id == session_id, order_by=order)


def weights(
    connection: Connection, scope: Scope, *, job_id: str | None = None, path: WeightsPath | None = None
) -> list[CheckpointRecord]:
    """What runs saved, newest first: of one job or of all, under one path or any, where the latest save counts."""
    conditions = [_checkpoints.c.status == COMMITTED, _checkpoints.c.kind.in_(PLACE_OF_KIND)]
    if job_id is not None:
        conditions.append(_checkpoints.c.job_id == job_id)
    if path is not None:
        conditions += [_checkpoints.c.kind == path.kind, _checkpoints.c.name == path.name]
    order = (_checkpoints.c.created_at.desc(), _checkpoints.c.checkpoint_id.desc())
    found: dict[tuple[str, str, str], CheckpointRecord] = {}
    for checkpoint in CHECKPOINTS.find(connection, scope, *conditions, order_by=order):
        if checkpoint.attributes.get("door") == TINKER:
            found.setdefault((str(checkpoint.attributes.get("model_id")), checkpoint.kind, checkpoint.name), checkpoint)
    return list(found.values())


def weights_of_run(
    connection: Connection, scope: Scope, run: TinkerRun, path: WeightsPath | None = None
) -> list[CheckpointRecord]:
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
    """What can be deleted of `limit` sessions ended before `before`; and `after` for the next call, None at the end."""
    scope.require_everything()
    ended = select(_sessions.c.session_id, _sessions.c.account_id).where(
        _sessions.c.finished_at < before, _sessions.c.session_id > after
    )
    in_order = ended.order_by(_sessions.c.session_id).limit(limit)
    accounts = {row.session_id: row.account_id for row in connection.execute(in_order)}
    of_them = select(_runs.c.session_id, _runs.c.model_id, _runs.c.job_id).where(_runs.c.session_id.in_(list(accounts)))
    runs_found = connection.execute(of_them.order_by(_runs.c.model_id)).all()
    with_weights = _models_with_weights(connection, {job_id for _, _, job_id in runs_found if job_id})
    model_ids, sampler_ids, useful = defaultdict(list), defaultdict(list), set()
    for session_id, model_id, _ in runs_found:
        if (accounts[session_id], model_id) in with_weights:
            useful.add(session_id)
        else:
            model_ids[session_id].append(model_id)
    samplers = select(_samplers.c.session_id, _samplers.c.sampler_id).where(_samplers.c.session_id.in_(list(accounts)))
    for session_id, sampler_id in connection.execute(samplers.order_by(_samplers.c.sampler_id)):
        sampler_ids[session_id].append(sampler_id)
    found = [
        Leftover(
            session_id=session_id,
            account_id=account_id,
            model_ids=tuple(model_ids[session_id]),
            sampler_ids=tuple(sampler_ids[session_id]),
            whole=session_id not in useful,
        )
        for session_id, account_id in accounts.items()
        if session_id not in useful or model_ids[session_id] or sampler_ids[session_id]
    ]
    return found, list(accounts)[-1] if len(accounts) == limit else None


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
