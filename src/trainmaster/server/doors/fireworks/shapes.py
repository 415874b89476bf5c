"""Training shapes and their versions: list and show them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from trainmaster.server.core.shapes import ANYBODYS, Shape, ShapeVersion
from trainmaster.server.doors.fireworks.resources import (
    AccountPath,
    Filter,
    PageSize,
    PageToken,
    ReadMask,
    ResourcePath,
    answer,
    filtered,
    own,
)
from trainmaster.server.doors.fireworks.wire import present
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.router import StrictRoute

_SNAPSHOT = frozenset(
    {
        "trainerMode",
        "baseModels",
        "region",
        "acceleratorType",
        "acceleratorCount",
        "nodeCount",
        "trainerImageTag",
        "maxSupportedContextLength",
        "baseModelWeightPrecision",
        "trainerShardingScheme.pipelineParallelism",
        "trainerShardingScheme.tensorParallelism",
        "trainerShardingScheme.contextParallelism",
        "trainerShardingScheme.expertParallelism",
        "deploymentShapeVersion",
        "deploymentImageTag",
    }
)
SHAPE_MEMBERS = _SNAPSHOT | {"name", "displayName", "description"}
"""What a shape may show."""
VERSION_MEMBERS = frozenset({f"snapshot.{member}" for member in _SNAPSHOT}) | {
    "name",
    "validated",
    "latestValidated",
    "statusMessage",
}
"""What a version of a shape may show."""


def shape_name(account_id: str, shape: str) -> str:
    """What clients call a shape."""
    return f"accounts/{account_id}/trainingShapes/{shape}"


def shape_document(account_id: str, shape: Shape) -> dict[str, Any]:
    """A shape as it is shown: its latest version that can be launched, where there is one."""
    latest = shape.latest
    about = {"name": shape_name(account_id, shape.name), "displayName": shape.name, "description": shape.description}
    return present({**about, **(_snapshot(latest) if latest is not None else {})})


def version_document(account_id: str, shape: Shape, version: ShapeVersion) -> dict[str, Any]:
    """A version of a shape as it is shown."""
    return present(
        {
            "name": f"{shape_name(account_id, shape.name)}/versions/{version.version}",
            "snapshot": _snapshot(version),
            "validated": version.validated and version.unusable is None,
            "latestValidated": version == shape.latest,
            "statusMessage": version.unusable,
        }
    )


def _snapshot(version: ShapeVersion) -> dict[str, Any]:
    sharding = version.sharding
    return present(
        {
            "trainerMode": version.trainer_mode,
            "baseModels": list(version.base_models) or None,
            "region": version.region,
            "acceleratorType": version.accelerator_type or "",
            "acceleratorCount": version.accelerator_count,
            "nodeCount": version.node_count,
            "trainerImageTag": version.image_tag or "",
            "maxSupportedContextLength": version.max_context_length,
            "baseModelWeightPrecision": version.precision,
            "trainerShardingScheme": {
                "pipelineParallelism": sharding.pipeline_parallelism,
                "tensorParallelism": sharding.tensor_parallelism,
                "contextParallelism": sharding.context_parallelism,
                "expertParallelism": sharding.expert_parallelism,
            },
            "deploymentShapeVersion": version.deployment_shape or "",
            "deploymentImageTag": version.deployment_image_tag or "",
        }
    )


router = APIRouter(
    prefix="/v1/accounts/{account_id}/trainingShapes",
    route_class=StrictRoute,
    include_in_schema=False,
    tags=["fireworks"],
)


@router.get("")
async def list_shapes(
    principal: Viewer,
    context: Context,
    account_id: AccountPath,
    filter: Filter = "",  # noqa: A002 - the protocol's name
    asked: PageSize = 0,
    token: PageToken = "",
    read_mask: ReadMask = "",
) -> Response:
    """List shapes."""
    own(principal, account_id, ANYBODYS)
    documents = [(shape.name, shape_document(account_id, shape)) for shape in context.shapes]
    return filtered(
        "trainingShapes", documents, members=SHAPE_MEMBERS, condition=filter, asked=asked, token=token, mask=read_mask
    )


@router.get("/{shape}")
async def show_shape(principal: Viewer, context: Context, account_id: AccountPath, shape: ResourcePath) -> Response:
    """Show a shape."""
    own(principal, account_id, ANYBODYS)
    return answer(shape_document(account_id, context.shapes.get(shape)))


@router.get("/{shape}/versions")
async def list_versions(
    principal: Viewer,
    context: Context,
    account_id: AccountPath,
    shape: ResourcePath,
    filter: Filter = "",  # noqa: A002 - the protocol's name
    asked: PageSize = 0,
    token: PageToken = "",
    read_mask: ReadMask = "",
) -> Response:
    """List the versions of a shape, the latest first; `latest_validated=true` leaves one."""
    own(principal, account_id, ANYBODYS)
    found = context.shapes.get(shape)
    documents = [(each.version, version_document(account_id, found, each)) for each in reversed(found.versions)]
    return filtered(
        "trainingShapeVersions",
        documents,
        members=VERSION_MEMBERS,
        condition=filter,
        asked=asked,
        token=token,
        mask=read_mask,
    )


@router.get("/{shape}/versions/{version}")
async def show_version(
    principal: Viewer, context: Context, account_id: AccountPath, shape: ResourcePath, version: ResourcePath
) -> Response:
    """Show a version of a shape."""
    own(principal, account_id, ANYBODYS)
    found = context.shapes.get(shape)
    return answer(version_document(account_id, found, context.shapes.version(shape, version)))
