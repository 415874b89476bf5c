"""Checkpoints of trainers: list and promote them, whether or not their trainer runs, or is there at all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from pydantic import Field
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.server.coordinator.promotion import DELTA, EXTERNAL, SAMPLER, Promotion, why_not
from trainmaster.server.core.errors import NotFoundError, RefusedError
from trainmaster.server.core.fields import Matches
from trainmaster.server.core.job import CheckpointRecord, Job
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.doors.fireworks.job_documents import NO_DEPLOYMENTS, job_name
from trainmaster.server.doors.fireworks.models import promoted_document
from trainmaster.server.doors.fireworks.resources import (
    ONE_LINE,
    FireworksBody,
    ManagedScope,
    PageSize,
    PageToken,
    ResourcePath,
    ViewedScope,
    listing,
    own,
    page_size,
    present,
    read_filter,
    router,
    trainer_job,
    unknown_token,
    words,
)
from trainmaster.server.doors.futures import ok
from trainmaster.server.http.auth import Manager
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import clean, instant
from trainmaster.server.http.requests import parse_json, read_body
from trainmaster.server.http.router import PlainText
from trainmaster.server.store import checkpoints, jobs
from trainmaster.server.store.promoted import Operation
from trainmaster.server.store.scope import Scope

LOOK_EVERY_S = 0.5
"""At a promotion whose client waits for its end."""
CHECKPOINT_MEMBERS = words(
    "name createTime updateTime expireTime checkpointType promotable sizeBytes step baseModel loraRank"
)
MODEL_TYPE = "type.googleapis.com/gateway.Model"
_TINKER = "tinker"
_MODEL_NAME = Matches(
    r"accounts/[^/]{1,63}/models/[a-z0-9-]{1,63}",
    "is like accounts/ACCOUNT/models/MODEL, with 1 to 63 lower-case letters, digits and dashes at the end",
)
_JOB_NAME = Matches(r"accounts/[^/]{1,63}/rlorTrainerJobs/[^/]{1,128}", "is like accounts/ACCOUNT/rlorTrainerJobs/JOB")


class PromoteBody(FireworksBody):
    output_model: Annotated[str, _MODEL_NAME]
    trainer_job_id: Annotated[str, _JOB_NAME]
    base_model: Annotated[str, Field(min_length=1, max_length=1024), ONE_LINE]
    async_promotion: bool = False

    refused: ClassVar[Mapping[str, str]] = {"hot_load_deployment_id": NO_DEPLOYMENTS}


def checkpoint_id(checkpoint: CheckpointRecord) -> str:
    """The id that clients use: the checkpoint's name, or its own id where the name belongs to one model."""
    return checkpoint.checkpoint_id if checkpoint.attributes.get("door") == _TINKER else checkpoint.name


def checkpoint_document(job: Job, checkpoint: CheckpointRecord) -> dict[str, Any]:
    said: Mapping[str, Any] = checkpoint.attributes
    return present(
        name=clean(f"{job_name(job)}/checkpoints/{checkpoint_id(checkpoint)}"),
        createTime=instant(checkpoint.created_at),
        updateTime=instant(checkpoint.created_at),
        expireTime=instant(checkpoint.expires_at),
        checkpointType=checkpoint_type(checkpoint),
        promotable=why_not(checkpoint) is None,
        sizeBytes=str(checkpoint.size_bytes),
        step=checkpoint.step,
        baseModel=clean(said.get("base_model")),
        loraRank=said.get("lora_rank"),
    )


def checkpoint_type(checkpoint: CheckpointRecord) -> str:
    said = checkpoint.attributes
    if checkpoint.kind not in (SAMPLER, EXTERNAL):
        return "CHECKPOINT_TYPE_TRAINING_LORA" if said.get("is_lora") else "CHECKPOINT_TYPE_TRAINING"
    if said.get("sampler_kind") == DELTA:
        return "CHECKPOINT_TYPE_INFERENCE_ARC_V2"
    adapter = said.get("is_lora") and said.get("sampler_kind") != "merged"
    return "CHECKPOINT_TYPE_INFERENCE_LORA" if adapter else "CHECKPOINT_TYPE_INFERENCE_BASE"


def operation_document(operation: Operation, model: dict[str, Any] | None) -> dict[str, Any]:
    said = {"statusMessage": "done" if operation.done else "the files are being put in place"}
    document: dict[str, Any] = {
        "name": f"accounts/{operation.account_id}/operations/{operation.operation_id}",
        "metadata": {**said, "createTime": instant(operation.created_at)},
        "done": operation.done,
    }
    if operation.done and operation.error:
        document["error"] = {"code": 9, "message": clean(operation.error)}
    elif operation.done and model is not None:
        document["response"] = {"@type": MODEL_TYPE, **model}
    elif operation.done:
        document["error"] = {"code": 5, "message": "the model was deleted since"}
    return document


@router.get("/rlorTrainerJobs/{job_id}/checkpoints")
async def list_checkpoints(
    scope: ViewedScope,
    context: Context,
    job_id: ResourcePath,
    filter: PlainText = "",  # noqa: A002 - the protocol's name
    asked: PageSize = 0,
    token: PageToken = "",
) -> Response:
    """Oldest first."""
    conditions = read_filter(filter, CHECKPOINT_MEMBERS)
    size = page_size(asked)

    def find(connection: Connection) -> tuple[list[dict[str, Any]], str | None]:
        job = trainer_job(connection, scope, job_id)
        entries: list[tuple[str, dict[str, Any]]] = []
        following: str | None = None
        if token:
            if not (named := checkpoints.named(connection, scope, job.job_id, [token])):
                raise unknown_token()
            following = checkpoints.page_token_after(named[0])
        while True:
            page = checkpoints.page(connection, scope, job.job_id, page_size=size + 1, page_token=following)
            for each in page.checkpoints:
                document = checkpoint_document(job, each)
                if each.kind and all(condition.holds(document) for condition in conditions):
                    entries.append((each.checkpoint_id, document))
            if (following := page.next_page_token) is None or len(entries) > size:
                shown = [document for _, document in entries[:size]]
                return shown, entries[size - 1][0] if len(entries) > size else None

    return listing("checkpoints", *await context.read(find))


@router.post("/checkpoints/{checkpoint}:promote")
async def promote(
    request: Request, principal: Manager, scope: ManagedScope, context: Context, checkpoint: ResourcePath
) -> Response:
    body = parse(PromoteBody, parse_json(await read_body(request)))
    for name in (body.output_model, body.trainer_job_id):
        own(principal, name.split("/")[1])

    def find(connection: Connection) -> Promotion:
        job = trainer_job(connection, scope, body.trainer_job_id.rpartition("/")[2])
        found = _named(checkpoints.called(connection, scope, job.job_id, checkpoint), checkpoint)
        return Promotion(
            job_id=job.job_id,
            checkpoint_id=found.checkpoint_id,
            model_id=body.output_model.rpartition("/")[2],
            base_model=body.base_model,
        )

    operation = await run_in_threadpool(context.promotions.start, scope, await context.read(find))
    if not body.async_promotion:
        while not operation.done:
            await asyncio.sleep(LOOK_EVERY_S)
            operation, _ = await run_in_threadpool(context.promotions.poll, scope, operation.operation_id)
    document = await _operation(context, scope, operation.operation_id)
    made = {"model": _without_type(document["response"])} if "response" in document else {}
    if body.async_promotion:
        return ok({"operation": document, **made})
    if "error" in document:
        raise RefusedError(document["error"]["message"])
    return ok(made)


@router.get("/operations/{operation_id}")
async def show_operation(scope: ViewedScope, context: Context, operation_id: ResourcePath) -> Response:
    return ok(await _operation(context, scope, operation_id))


async def _operation(context: ApiContext, scope: Scope, operation_id: str) -> dict[str, Any]:
    def find() -> tuple[Operation, dict[str, Any] | None]:
        operation, model = context.promotions.poll(scope, operation_id)
        if model is None:
            return operation, None
        with context.database.read() as connection:
            return operation, promoted_document(model, jobs.get(connection, scope, model.job_id, deleted=True))

    return operation_document(*await run_in_threadpool(find))


def _named(found: list[CheckpointRecord], name: str) -> CheckpointRecord:
    """The checkpoint that a client means: one for sampling before others, and of several the latest."""
    named = [each for each in found if each.kind and name in (checkpoint_id(each), each.checkpoint_id)]
    if not named:
        raise NotFoundError(f"the trainer has no checkpoint {name}")
    return max(named, key=lambda each: (each.kind == SAMPLER, each.created_at))


def _without_type(model: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name != "@type"}
