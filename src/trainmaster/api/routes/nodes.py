"""Nodes: the machines that jobs run on."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Response
from sqlalchemy import Connection

from trainmaster.api.auth import Viewer
from trainmaster.api.context import Context
from trainmaster.api.envelope import Ok, ok
from trainmaster.api.routing import StrictRoute, errors
from trainmaster.api.wire.nodes import NodeList, NodeResource, node_resource
from trainmaster.core.errors import NotFoundError
from trainmaster.store import allocations, nodes
from trainmaster.store.scope import Scope

router = APIRouter(route_class=StrictRoute, tags=["nodes"])


@router.get("/nodes", response_model=Ok[NodeList], responses=errors())
async def list_nodes(principal: Viewer, context: Context) -> Response:
    """List all nodes with what is free on them."""
    return ok(NodeList(nodes=await context.read(lambda connection: _nodes(connection, principal.scope))))


@router.get("/nodes/{node_id}", response_model=Ok[NodeResource], responses=errors(HTTPStatus.NOT_FOUND))
async def show_node(
    principal: Viewer, context: Context, node_id: Annotated[str, Path(min_length=1, max_length=256)]
) -> Response:
    """Show one node."""
    found = await context.read(lambda connection: _nodes(connection, principal.scope))
    node = next((node for node in found if node.id == node_id), None)
    if node is None:
        raise NotFoundError("there is no such node")
    return ok(node)


def _nodes(connection: Connection, scope: Scope) -> list[NodeResource]:
    # What others hold is not free either; whose it is, they are not told.
    held = allocations.all(connection, Scope.everything())
    return [node_resource(node, held, scope) for node in nodes.all(connection, scope)]
