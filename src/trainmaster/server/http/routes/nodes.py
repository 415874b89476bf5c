"""Nodes: the machines that jobs run on, and what operators do with them."""

from __future__ import annotations

from collections import defaultdict
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from sqlalchemy import Connection

from trainmaster.server.http.auth import Admin, Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, ok
from trainmaster.server.http.requests import parse_optional, read_body
from trainmaster.server.http.router import StrictRoute, body, errors
from trainmaster.server.http.wire.nodes import (
    ClusterEventList,
    DrainBody,
    EnableBody,
    NodeBody,
    NodeList,
    NodeResource,
    cluster_event,
    node_resource,
)
from trainmaster.server.store import allocations, events, nodes
from trainmaster.server.store.allocations import Allocation
from trainmaster.server.store.scope import Scope

router = APIRouter(route_class=StrictRoute, tags=["nodes"])

NodeId = Annotated[str, Path(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]

_EVERYTHING = Scope.everything()
_CHANGING = errors(HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


@router.get("/nodes", response_model=Ok[NodeList], responses=errors())
async def list_nodes(principal: Viewer, context: Context) -> Response:
    """List all nodes with what is free on them."""

    def find(connection: Connection) -> NodeList:
        held = _held(connection)
        found = nodes.all(connection, principal.scope)
        return NodeList(nodes=[node_resource(node, held[node.node_id], principal.scope) for node in found])

    return ok(await context.read(find))


@router.get("/nodes/{node_id}", response_model=Ok[NodeResource], responses=errors(HTTPStatus.NOT_FOUND))
async def show_node(principal: Viewer, context: Context, node_id: NodeId) -> Response:
    """Show one node."""
    return ok(await context.read(lambda connection: _node(connection, principal.scope, node_id)))


@router.get("/nodes/{node_id}/events", response_model=Ok[ClusterEventList], responses=errors(HTTPStatus.NOT_FOUND))
async def node_events(
    principal: Viewer,
    context: Context,
    node_id: NodeId,
    limit: Annotated[int, Query(ge=1, le=1000, description="The newest so many.")] = 100,
) -> Response:
    """Read what happened to a node: drains, GPUs that left the pool, changed labels."""

    def find(connection: Connection) -> ClusterEventList:
        node = nodes.get(connection, principal.scope, node_id)
        found = events.of_subject(connection, principal.scope, f"node/{node.node_id}", limit)
        return ClusterEventList(events=[cluster_event(event) for event in found])

    return ok(await context.read(find))


@router.post(
    "/nodes/{node_id}/drain", response_model=Ok[NodeResource], responses=_CHANGING, openapi_extra=body(DrainBody)
)
async def drain_node(request: Request, principal: Admin, context: Context, node_id: NodeId) -> Response:
    """Give a node no more work. It is DRAINED when nothing runs there; with `force`, what runs is preempted."""
    wanted = parse_optional(DrainBody, await read_body(request))
    now = context.clock()

    def change(connection: Connection) -> NodeResource:
        nodes.drain(
            connection,
            _EVERYTHING,
            node_id,
            now,
            reason=wanted.reason,
            force=wanted.force,
            grace_s=wanted.grace_seconds,
        )
        return _node(connection, principal.scope, node_id)

    changed = await context.write(change)
    context.hint("")
    return ok(changed)


@router.post(
    "/nodes/{node_id}/enable", response_model=Ok[NodeResource], responses=_CHANGING, openapi_extra=body(EnableBody)
)
async def enable_node(request: Request, principal: Admin, context: Context, node_id: NodeId) -> Response:
    """Give a node work again."""
    parse_optional(EnableBody, await read_body(request))
    now = context.clock()

    def change(connection: Connection) -> NodeResource:
        nodes.enable(connection, _EVERYTHING, node_id, now)
        return _node(connection, principal.scope, node_id)

    changed = await context.write(change)
    context.hint("")
    return ok(changed)


@router.patch("/nodes/{node_id}", response_model=Ok[NodeResource], responses=_CHANGING, openapi_extra=body(NodeBody))
async def change_node(request: Request, principal: Admin, context: Context, node_id: NodeId) -> Response:
    """Set the labels or capabilities that a node has beside those that its backend reports."""
    wanted = parse_optional(NodeBody, await read_body(request))
    now = context.clock()

    def change(connection: Connection) -> NodeResource:
        nodes.give(connection, _EVERYTHING, node_id, now, labels=wanted.labels, capabilities=wanted.capabilities)
        return _node(connection, principal.scope, node_id)

    changed = await context.write(change)
    context.hint("")
    return ok(changed)


def _node(connection: Connection, scope: Scope, node_id: str) -> NodeResource:
    node = nodes.get(connection, scope, node_id)
    return node_resource(node, _held(connection)[node_id], scope)


def _held(connection: Connection) -> defaultdict[str, list[Allocation]]:
    # What others hold is not free either; whose it is, they are not told.
    held: defaultdict[str, list[Allocation]] = defaultdict(list)
    for allocation in allocations.all(connection, _EVERYTHING):
        held[allocation.share.node_id].append(allocation)
    return held
