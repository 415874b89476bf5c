"""Models: those that the account promoted, and the base models that the operator named."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.server.coordinator.base_models import BaseModel
from trainmaster.server.coordinator.promotion import BASE_MODEL, PEFT_ADDON
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.core.shapes import ANYBODYS, Shape, ShapeVersion
from trainmaster.server.doors.fireworks.job_documents import job_name
from trainmaster.server.doors.fireworks.resources import (
    AccountPath,
    Listed,
    ManagedScope,
    ResourcePath,
    own,
    present,
    router,
    words,
)
from trainmaster.server.doors.futures import ok
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import clean, instant
from trainmaster.server.store import jobs, promoted
from trainmaster.server.store.promoted import PromotedModel

READY = "READY"
MODEL_MEMBERS = words("""
    name displayName createTime state status.code status.message kind public importedFrom fineTuningJob sizeBytes
    contextLength peftDetails.baseModel peftDetails.r peftDetails.targetModules baseModelDetails.moe
    baseModelDetails.checkpointFormat baseModelDetails.huggingfaceModelType baseModelDetails.supportsFireattention
""")


def promoted_document(model: PromotedModel, job: Job) -> dict[str, Any]:
    details = model.details
    return present(
        name=f"accounts/{model.account_id}/models/{model.model_id}",
        displayName=model.model_id,
        createTime=instant(model.created_at),
        state=READY,
        status={"code": "OK", "message": ""},
        kind=model.kind,
        public=False,
        importedFrom=job_name(job),
        fineTuningJob=job_name(job),
        sizeBytes=str(model.size_bytes),
        peftDetails={
            "baseModel": model.base_model,
            "r": details.get("r"),
            "targetModules": clean(details.get("target_modules")),
        }
        if model.kind == PEFT_ADDON
        else None,
        baseModelDetails={"moe": False, "checkpointFormat": "HUGGINGFACE"} if model.kind == BASE_MODEL else None,
    )


def base_model_document(model: BaseModel) -> dict[str, Any]:
    config = model.config()
    return present(
        name=model.name,
        displayName=model.path.name,
        state=READY,
        status={"code": "OK", "message": ""},
        kind=BASE_MODEL,
        public=True,
        contextLength=model.context_length,
        baseModelDetails=present(
            moe=model.is_moe,
            checkpointFormat="HUGGINGFACE",
            huggingfaceModelType=clean(config.get("model_type")),
            supportsFireattention=False,
        ),
    )


@router.get("/models")
async def list_models(principal: Viewer, context: Context, account_id: AccountPath, query: Listed) -> Response:
    """Of the key's account, those that it promoted; of any account, those that the operator named there."""

    def find(connection: Connection) -> list[dict[str, Any]]:
        found = [base_model_document(model) for model in context.models.of_account(account_id)]
        if account_id == principal.account_id:
            for model in promoted.all(connection, principal.scope):
                job = jobs.get(connection, principal.scope, model.job_id, deleted=True)
                found.append(promoted_document(model, job))
        return found

    if not (documents := sorted(await context.read(find), key=lambda each: str(each["name"]))):
        own(principal, account_id)
    return query.page("models", [(str(each["name"]), each) for each in documents], MODEL_MEMBERS)


@router.get("/models/{model_id}")
async def show_model(principal: Viewer, context: Context, account_id: AccountPath, model_id: ResourcePath) -> Response:
    name = f"accounts/{account_id}/models/{model_id}"

    def find(connection: Connection) -> dict[str, Any]:
        for model in context.models.of_account(account_id):
            if model.name == name:
                return base_model_document(model)
        if account_id != principal.account_id:
            raise NotFoundError(f"there is no model {name}")
        found = promoted.get(connection, principal.scope, model_id)
        return promoted_document(found, jobs.get(connection, principal.scope, found.job_id, deleted=True))

    return ok(await context.read(find))


@router.delete("/models/{model_id}")
async def remove_model(scope: ManagedScope, context: Context, model_id: ResourcePath) -> Response:
    await run_in_threadpool(context.promotions.remove, scope, model_id)
    return ok({})


# Training shapes and their versions: list and show them.

_SNAPSHOT = words("""
    trainerMode baseModels region acceleratorType acceleratorCount nodeCount trainerImageTag maxSupportedContextLength
    baseModelWeightPrecision trainerShardingScheme.pipelineParallelism trainerShardingScheme.tensorParallelism
    trainerShardingScheme.contextParallelism trainerShardingScheme.expertParallelism deploymentShapeVersion
    deploymentImageTag
""")
SHAPE_MEMBERS = (*_SNAPSHOT, "name", "displayName", "description")
VERSION_MEMBERS = (
    *(f"snapshot.{member}" for member in _SNAPSHOT),
    *words("name validated latestValidated statusMessage"),
)


def shape_name(account_id: str, shape: str) -> str:
    return f"accounts/{account_id}/trainingShapes/{shape}"


def shape_document(account_id: str, shape: Shape) -> dict[str, Any]:
    """Shows the latest version that can be launched, where there is one."""
    latest = shape.latest
    about = {"name": shape_name(account_id, shape.name), "displayName": shape.name, "description": shape.description}
    return present(**about, **(_snapshot(latest) if latest is not None else {}))


def version_document(account_id: str, shape: Shape, version: ShapeVersion) -> dict[str, Any]:
    return present(
        name=f"{shape_name(account_id, shape.name)}/versions/{version.version}",
        snapshot=_snapshot(version),
        validated=version.validated and version.unusable is None,
        latestValidated=version == shape.latest,
        statusMessage=version.unusable,
    )


def _snapshot(version: ShapeVersion) -> dict[str, Any]:
    sharding = version.sharding
    return present(
        trainerMode=version.trainer_mode,
        baseModels=list(version.base_models) or None,
        region=version.region,
        acceleratorType=version.accelerator_type or "",
        acceleratorCount=version.accelerator_count,
        nodeCount=version.node_count,
        trainerImageTag=version.image_tag or "",
        maxSupportedContextLength=version.max_context_length,
        baseModelWeightPrecision=version.precision,
        trainerShardingScheme={
            "pipelineParallelism": sharding.pipeline_parallelism,
            "tensorParallelism": sharding.tensor_parallelism,
            "contextParallelism": sharding.context_parallelism,
            "expertParallelism": sharding.expert_parallelism,
        },
        deploymentShapeVersion=version.deployment_shape or "",
        deploymentImageTag=version.deployment_image_tag or "",
    )


@router.get("/trainingShapes")
async def list_shapes(principal: Viewer, context: Context, account_id: AccountPath, query: Listed) -> Response:
    own(principal, account_id, ANYBODYS)
    documents = [(shape.name, shape_document(account_id, shape)) for shape in context.shapes]
    return query.page("trainingShapes", documents, SHAPE_MEMBERS)


@router.get("/trainingShapes/{shape}")
async def show_shape(principal: Viewer, context: Context, account_id: AccountPath, shape: ResourcePath) -> Response:
    own(principal, account_id, ANYBODYS)
    return ok(shape_document(account_id, context.shapes.get(shape)))


@router.get("/trainingShapes/{shape}/versions")
async def list_versions(
    principal: Viewer, context: Context, account_id: AccountPath, shape: ResourcePath, query: Listed
) -> Response:
    """Latest first; the filter `latest_validated=true` leaves one."""
    own(principal, account_id, ANYBODYS)
    found = context.shapes.get(shape)
    documents = [(each.version, version_document(account_id, found, each)) for each in reversed(found.versions)]
    return query.page("trainingShapeVersions", documents, VERSION_MEMBERS)


@router.get("/trainingShapes/{shape}/versions/{version}")
async def show_version(
    principal: Viewer, context: Context, account_id: AccountPath, shape: ResourcePath, version: ResourcePath
) -> Response:
    own(principal, account_id, ANYBODYS)
    return ok(version_document(account_id, context.shapes.get(shape), context.shapes.version(shape, version)))
