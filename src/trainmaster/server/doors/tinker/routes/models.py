"""Models: made by the server with a trainer that it starts for them, and what is known of them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.spec import parse
from trainmaster.server.core.workloads.trainer_service import Mode
from trainmaster.server.doors.tinker import records
from trainmaster.server.doors.tinker.door import TinkerDoor
from trainmaster.server.doors.tinker.names import RunState, TinkerRun, creation_id, mode_of, model_id_of
from trainmaster.server.doors.tinker.responses import ok, read, read_document
from trainmaster.server.doors.tinker.router import answer
from trainmaster.server.doors.tinker.wire import CreateModel, OfModel, OfWeights
from trainmaster.server.http.auth import Principal


@answer("POST", "/create_model", KeyScope.MANAGE, note="starts a trainer for the base model where none runs")
async def create_model(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """Have a model made; a request that comes again is the same one."""
    document = await read_document(request)
    wanted = parse(CreateModel, document)
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
    kept = await door.context.write(lambda connection: records.open_run(connection, principal.scope, run))
    if kept.state is RunState.PENDING:
        door.creations.begin(kept, created_by=principal.name)
    return ok({"request_id": creation_id(kept.model_id), "model_id": kept.model_id})


@answer("POST", "/get_info", KeyScope.VIEW)
async def get_info(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """What a model is, whether its trainer runs or not."""
    wanted = await read(request, OfModel)
    run = await door.sessions.run(principal.scope, wanted.model_id)
    return ok(
        {
            "type": "get_info",
            "model_id": run.model_id,
            # Its client loads the tokenizer by this name.
            "model_data": {"model_name": run.base_model, "tokenizer_id": run.base_model},
            "is_lora": run.mode is Mode.LORA,
            "lora_rank": run.lora_rank,
            "model_name": run.base_model,
        }
    )


@answer("POST", "/weights_info", KeyScope.VIEW, note="of one's own weights, and of public ones")
async def weights_info(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """What a model has to be like to load saved weights."""
    wanted = await read(request, OfWeights)
    found = await door.weights(principal.scope, wanted.tinker_path)
    attributes = found.checkpoint.attributes
    told: dict[str, Any] = {
        "base_model": found.run.base_model,
        "is_lora": bool(attributes.get("is_lora", found.run.mode is Mode.LORA)),
        "lora_rank": attributes.get("lora_rank") or found.run.lora_rank,
    }
    trained = {name: attributes.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
    return ok({**told, **{name: value for name, value in trained.items() if isinstance(value, bool)}})
