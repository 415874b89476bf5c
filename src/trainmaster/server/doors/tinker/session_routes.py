"""Sessions: begun, kept alive, finished, listed and searched. They need no trainer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.job import CheckpointRecord
from trainmaster.server.doors.futures import ok
from trainmaster.server.doors.tinker import records, wire
from trainmaster.server.doors.tinker.door import TinkerDoor
from trainmaster.server.doors.tinker.records import TinkerSession
from trainmaster.server.doors.tinker.router import answer, page_of, read
from trainmaster.server.http.auth import Principal
from trainmaster.server.http.requests import read_body
from trainmaster.server.store.scope import Scope

_LIST_PAGE = 20
_SEARCHED_AT_ONCE = 500
_LONGEST_KEY = 256


@answer("POST", "/create_session", KeyScope.MANAGE)
async def create_session(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """A repeated request with the same idempotency key gets the same session."""
    wanted = await read(request, wire.CreateSession)
    now = round(door.context.clock(), 6)  # as exact as the times in the cursor of a search
    session = TinkerSession(
        session_id=f"sess-{secrets.token_hex(16)}",
        account_id=principal.account_id,
        created_at=now,
        idempotency_key=(request.headers.get("x-idempotency-key") or "")[:_LONGEST_KEY] or None,
        tags=tuple(wanted.tags),
        user_metadata=wanted.user_metadata or {},
        sdk_version=wanted.sdk_version,
        project_id=wanted.project_id,
        display_name=wanted.display_name,
        heartbeat_at=now,
    )
    kept = await door.context.write(records.open_session, principal.scope, session)
    return ok({"session_id": kept.session_id, "type": "create_session"})


@answer(
    "POST", "/session_heartbeat", KeyScope.VIEW, note="counts as use of the trainers that have the session's models"
)
async def session_heartbeat(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    wanted = await read(request, wire.SessionRequest)
    session = await door.sessions.require(principal.scope, wanted.session_id)
    door.heartbeats.heard(wanted.session_id)
    for trainer in session.trainers:
        door.trainers.touch(trainer.job_id)
    return ok({"type": "session_heartbeat"})


@answer("POST", "/sessions/{session_id}/finish", KeyScope.MANAGE)
async def finish_session(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """May be repeated."""
    wanted = await read(request, wire.FinishSession)
    session_id = str(request.path_params["session_id"])
    finish = {"reason": {"type": wanted.reason.type}, "detail": wanted.detail}
    now = door.context.clock()
    await door.context.write(records.finish_session, principal.scope, session_id, at=now, finish=finish)
    await door.heartbeats.end(session_id)
    return ok({})


@answer("GET", "/sessions", KeyScope.VIEW)
async def list_sessions(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    limit, offset = page_of(request, _LIST_PAGE)
    found = await door.context.read(records.sessions, principal.scope, limit=limit, offset=offset)
    return ok({"sessions": [session.session_id for session in found]})


@answer("GET", "/sessions/{session_id}", KeyScope.VIEW, note="does not list samplers that were saved without a name")
async def get_session(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    session_id = str(request.path_params["session_id"])

    def question(connection: Connection) -> dict[str, Any]:
        session = records.get_session(connection, principal.scope, session_id)
        runs = records.runs_of_session(connection, principal.scope, session_id)
        samplers = records.samplers_of_session(connection, principal.scope, session_id)
        return {
            "training_run_ids": [run.model_id for run in runs],
            "sampler_ids": [sampler.sampler_id for sampler in samplers],
            "user_metadata": wire.texts(session.user_metadata),
            "display_name": session.display_name,
            "tags": list(session.tags),
            "sdk_version": session.sdk_version,
        }

    return ok(await door.context.read(question))


@answer("PUT", "/sessions/{session_id}/project", KeyScope.MANAGE, note="a project is a name that sessions share")
async def assign_project(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    wanted = await read(request, wire.AssignProject)
    session_id = str(request.path_params["session_id"])
    await door.context.write(records.move_session, principal.scope, session_id, wanted.project_id)
    return ok({})


@answer("POST", "/sessions/search", KeyScope.VIEW)
async def search_sessions(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    wanted = await read(request, wire.SearchSessions)
    now = door.context.clock()

    def question(connection: Connection) -> dict[str, Any]:
        found = _search(connection, principal.scope, wanted, now)
        page, more = found[: wanted.limit], len(found) > wanted.limit
        saved: dict[str, list[CheckpointRecord]] = {}
        for checkpoint in records.weights(connection, principal.scope) if page else ():
            saved.setdefault(str(checkpoint.attributes.get("session_id")), []).append(checkpoint)
        last = page[-1] if more else None
        cursor = (
            {"last_created_at": wire.instant(last.created_at), "last_session_id": last.session_id} if last else None
        )
        resources = [wire.session_resource(each, saved.get(each.session_id, ()), now=now) for each in page]
        return {"sessions": resources, "next_cursor": cursor}

    return ok(await door.context.read(question))


def _search(connection: Connection, scope: Scope, wanted: wire.SearchSessions, now: float) -> list[TinkerSession]:
    """One session more than a page has, where there are so many."""
    if wanted.owner.type == "user" and scope.account not in wanted.owner.owner_urns:
        return []
    cursor = wanted.cursor
    before = (cursor.last_created_at.timestamp(), cursor.last_session_id) if cursor is not None else None
    found: list[TinkerSession] = []
    while len(found) <= wanted.limit:
        some = records.sessions(connection, scope, limit=_SEARCHED_AT_ONCE, before=before)
        found += (session for session in some if _fits(session, wanted, now))
        if len(some) < _SEARCHED_AT_ONCE:
            break
        before = (some[-1].created_at, some[-1].session_id)
    return found[: wanted.limit + 1]


def _fits(session: TinkerSession, wanted: wire.SearchSessions, now: float) -> bool:
    if wanted.session_id is not None or wanted.display_name is not None:
        name, words = (session.display_name or "").casefold(), (wanted.display_name or "").casefold().split()
        if session.session_id != wanted.session_id and not (words and all(word in name for word in words)):
            return False
    if wanted.project_ids is not None and (session.project_id or wire.NO_PROJECT) not in wanted.project_ids:
        return False
    known: Mapping[str, Any] = session.user_metadata
    if any(str(known.get(name)) != str(value) for name, value in wanted.user_metadata.items()):
        return False
    return wanted.statuses is None or any(_has(session, each.type, each.reasons, now) for each in wanted.statuses)


def _has(session: TinkerSession, status: str, reasons: list[str] | None, now: float) -> bool:
    if status == "active":
        return session.is_active(now)
    if status == "client_finished" and session.finished_at is not None:
        return reasons is None or (session.finish.get("reason") or {}).get("type") in reasons
    return False


# What clients ask before anything else: settings, capabilities, whose key they hold.

MAX_TELEMETRY_BYTES = 8 << 20


def _constant(method: str, path: str, document: Mapping[str, Any], note: str = "") -> None:
    @answer(method, path, KeyScope.VIEW, note=note)
    async def constant(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
        return ok(document)


_constant("GET", "/healthz", {"status": "ok"})
# What is not supported here is off by default.
_constant("POST", "/client/config", {}, "returns the client's own defaults")
_constant(
    "POST",
    "/client/dynamic_config",
    {"sample_cancel_enabled": True},
    "tells clients to cancel samples that nobody waits for",
)


@answer("POST", "/telemetry", KeyScope.VIEW, note="accepted and discarded")
async def telemetry(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    """Accepted and dropped: clients would send it again and again."""
    await read_body(request, MAX_TELEMETRY_BYTES)
    return ok({"status": "accepted"})


@answer("GET", "/get_server_capabilities", KeyScope.VIEW, note="lists the names set with --model-alias")
async def get_server_capabilities(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    def look() -> list[dict[str, Any]]:
        return [
            {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
            for name in door.context.models.names
            if (length := door.trainer_jobs.context_length(principal.scope, name)) is not None
        ]

    # Models may lie on a disk that does not answer, which must not keep everybody else waiting.
    return ok({"supported_models": await run_in_threadpool(look)})


@answer("GET", "/auth/apikey/me", KeyScope.VIEW)
async def own_key(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    return ok(
        {
            # Clients want a number; the end of the id is one.
            "key_id": int(principal.key_id.removeprefix("key-"), 16),
            "name": principal.name,
            "note": principal.key_id,
            "details": {"org_details": {"name": principal.account_id}, "user_details": {"email": principal.name}},
        }
    )
