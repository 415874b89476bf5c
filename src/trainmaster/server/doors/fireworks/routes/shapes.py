"""Training shapes: list and show them, and their versions."""

from __future__ import annotations

from fastapi import APIRouter, Response

from trainmaster.server.core.shapes import ANYBODYS
from trainmaster.server.doors.fireworks.routes.resources import (
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
from trainmaster.server.doors.fireworks.wire.shapes import (
    SHAPE_MEMBERS,
    VERSION_MEMBERS,
    shape_document,
    version_document,
)
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.router import StrictRoute

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
