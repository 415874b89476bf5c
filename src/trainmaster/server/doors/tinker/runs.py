"""Training runs: create a model, which alone needs a trainer; list, publish, expire and delete what a run saved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sqlalchemy import Connection
from starlette.requests import Request
from starlette.responses import Response

from trainmaster.protocol.trainer_requests import ModelMode, WeightsPath, model_id_of
from trainmaster.server.coordinator import checkpoints
from trainmaster.server.coordinator.commands import CommandOutcome
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import CheckpointRecord
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.doors.futures import ok
from trainmaster.server.doors.tinker import records, wire
from trainmaster.server.doors.tinker.door import TinkerDoor, Weights, path_of
from trainmaster.server.doors.tinker.model_creation import creation_id, mode_of
from trainmaster.server.doors.tinker.records import RunState, TinkerRun
from trainmaster.server.doors.tinker.router import answer, page_of, read, read_document
from trainmaster.server.http.auth import Principal
from trainmaster.server.store.scope import Scope


@answer("POST", "/create_model", KeyScope.MANAGE, note="starts a trainer for the base model if none runs")
async def create_model(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """A repeated request gets the same model."""
    document = await read_document(request)
    wanted = parse(wire.CreateModel, document)
    await door.sessions.require(principal.scope, wanted.session_id)
    now = door.context.clock()
    run = TinkerRun(
        model_id=model_id_of(wanted.session_id, wanted.model_seq_id),
        account_id=principal.account_id,
        session_id=wanted.session_id,
        base_model=wanted.base_model,
        mode=mode_of(document),
        request=document,
        created_at=now,
        used_at=now,
    )
    kept = await door.context.write(records.open_run, principal.scope, run)
    if kept.state is RunState.PENDING:
        door.creations.start(kept, created_by=principal.name)
    return ok({"request_id": creation_id(kept.model_id), "model_id": kept.model_id})


@answer("POST", "/get_info", KeyScope.VIEW)
async def get_info(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    run = await door.sessions.run(principal.scope, (await read(request, wire.ModelRequest)).model_id)
    return ok(
        {
            "type": "get_info",
            "model_id": run.model_id,
            # Its client loads the tokenizer by this name.
            "model_data": {"model_name": run.base_model, "tokenizer_id": run.base_model},
            "is_lora": run.mode is ModelMode.LORA,
            "lora_rank": run.lora_rank,
            "model_name": run.base_model,
        }
    )


@answer("POST", "/weights_info", KeyScope.VIEW, note="for the account's own and published weights")
async def weights_info(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    found = await door.weights(principal.scope, (await read(request, wire.WeightsRequest)).tinker_path)
    attributes = found.checkpoint.attributes
    info: dict[str, Any] = {
        "base_model": found.run.base_model,
        "is_lora": bool(attributes.get("is_lora", found.run.mode is ModelMode.LORA)),
        "lora_rank": attributes.get("lora_rank") or found.run.lora_rank,
    }
    trained = {name: attributes.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
    return ok({**info, **{name: value for name, value in trained.items() if isinstance(value, bool)}})


_RUNS_PAGE = 20
_CHECKPOINTS_PAGE = 100
CHECKPOINT = "/training_runs/{run_id}/checkpoints/{place}/{name}"


@answer("GET", "/training_runs", KeyScope.VIEW)
async def list_training_runs(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    limit, offset = page_of(request, _RUNS_PAGE)
    project_id = request.query_params.get("project_id")

    def question(connection: Connection) -> dict[str, Any]:
        found, total = records.runs(connection, principal.scope, limit=limit, offset=offset, project_id=project_id)
        saved: dict[str, list[CheckpointRecord]] = {}
        for job_id in sorted({run.job_id for run in found if run.job_id is not None}):
            for checkpoint in records.weights(connection, principal.scope, job_id=job_id):
                saved.setdefault(str(checkpoint.attributes.get("model_id")), []).append(checkpoint)
        return {
            "training_runs": [wire.run_resource(run, saved.get(run.model_id, ())) for run in found],
            "cursor": {"offset": offset, "limit": limit, "total_count": total},
        }

    return ok(await door.context.read(question))


@answer("GET", "/training_runs/{run_id}", KeyScope.VIEW)
async def get_training_run(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    def question(connection: Connection) -> dict[str, Any]:
        return wire.run_resource(*_run_of(connection, principal.scope, request))

    return ok(await door.context.read(question))


@answer("GET", "/training_runs/{run_id}/checkpoints", KeyScope.VIEW)
async def list_checkpoints(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    def question(connection: Connection) -> list[dict[str, Any]]:
        _, saved = _run_of(connection, principal.scope, request)
        return [wire.checkpoint_resource(checkpoint) for checkpoint in saved]

    return ok({"checkpoints": await door.context.read(question)})


def _run_of(connection: Connection, scope: Scope, request: Request) -> tuple[TinkerRun, list[CheckpointRecord]]:
    """The run that the path of a request names, and what it saved."""
    run = records.get_run(connection, scope, str(request.path_params["run_id"]))
    return run, records.weights_of_run(connection, scope, run)


@answer("GET", "/checkpoints", KeyScope.VIEW)
async def list_user_checkpoints(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    limit, offset = page_of(request, _CHECKPOINTS_PAGE)
    saved = await door.context.read(records.weights, principal.scope)
    page = [wire.checkpoint_resource(checkpoint) for checkpoint in saved[offset : offset + limit]]
    return ok({"checkpoints": page, "cursor": {"offset": offset, "limit": limit, "total_count": len(saved)}})


@answer("GET", "/billing/usage/checkpoints/current", KeyScope.VIEW, note="without costs")
async def checkpoint_usage(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    wanted = request.query_params.get("project_id")

    def question(connection: Connection) -> list[tuple[str, int]]:
        found = records.sessions(connection, principal.scope, limit=2**31 - 1)
        projects = {session.session_id: session.project_id or wire.NO_PROJECT for session in found}
        return [
            (projects.get(str(checkpoint.attributes.get("session_id")), wire.NO_PROJECT), checkpoint.size_bytes)
            for checkpoint in records.weights(connection, principal.scope)
        ]

    sizes: dict[str, list[int]] = {}
    for project_id, size in await door.context.read(question):
        if wanted in (None, project_id):
            sizes.setdefault(project_id, []).append(size)
    rows = [
        {
            "project_id": project_id,
            "org_user_urn": principal.account_id,
            "checkpoint_count": len(each),
            "size_bytes": sum(each),
            "size_gigabytes": sum(each) / 1e9,
        }
        for project_id, each in sorted(sizes.items())
    ]
    return ok({"data": rows})


@answer("DELETE", CHECKPOINT, KeyScope.MANAGE)
async def delete_checkpoint(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """Gone at once from all lists, and soon from the disk."""
    return await _command(request, door, principal, checkpoints.delete)


@answer("POST", f"{CHECKPOINT}/publish", KeyScope.MANAGE, note="then every account of the server can load the weights")
async def publish(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    return await _command(request, door, principal, checkpoints.edit, "public", True)


@answer("DELETE", f"{CHECKPOINT}/publish", KeyScope.MANAGE)
async def unpublish(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    return await _command(request, door, principal, checkpoints.edit, "public", False)


@answer("PUT", f"{CHECKPOINT}/ttl", KeyScope.MANAGE)
async def set_ttl(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    wanted = await read(request, wire.SetTtl)
    at = None if wanted.ttl_seconds is None else door.context.clock() + wanted.ttl_seconds
    return await _command(request, door, principal, checkpoints.edit, "expires_at", at)


async def _command(
    request: Request,
    door: TinkerDoor,
    principal: Principal,
    command: Callable[..., Future[CommandOutcome]],
    *edited: str | float | bool | None,
) -> Response:
    """Weights of others are not found, public or not. The job of the weights may have been deleted."""
    found = await weights_of(request, door, principal)
    checkpoint = found.checkpoint
    if not principal.scope.admits(found.run.account_id):
        raise NotFoundError(f"there are no weights {path_of(checkpoint)}")
    done = command(
        door.context.commands,
        principal.scope,
        checkpoint.job_id,
        checkpoint.checkpoint_id,
        *edited,
        now=door.context.clock(),
    )
    await asyncio.wrap_future(done)
    return ok({})


async def weights_of(request: Request, door: TinkerDoor, principal: Principal) -> Weights:
    run_id, place, name = (str(request.path_params[part]) for part in ("run_id", "place", "name"))
    return await door.weights(principal.scope, str(WeightsPath(run=run_id, place=place, name=name)))
