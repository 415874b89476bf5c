"""Nodes: the machines that jobs run on, their resources, and draining."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field, Strict, StringConstraints
from sqlalchemy import Connection

from trainmaster.schema.cluster import (
    Amount,
    ClusterEventList,
    ClusterEventResource,
    GpuResource,
    NodeList,
    NodeResource,
)
from trainmaster.server.core.fields import Flag, Model, Names
from trainmaster.server.core.resources import ClusterEvent, Node, whole
from trainmaster.server.core.spec.configs import NodeLabels
from trainmaster.server.http.auth import Admin, Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, instant, ok
from trainmaster.server.http.requests import read_model
from trainmaster.server.http.router import NO_NUL, StrictRoute, body, errors
from trainmaster.server.store import attempts, events, nodes
from trainmaster.server.store.attempts import Allocation
from trainmaster.server.store.scope import Scope

MAX_GRACE_S = 86400.0


class DrainBody(Model):
    """How to drain a node."""

    reason: Annotated[str, StringConstraints(max_length=1024), NO_NUL] = Field(
        default="", description="Shown to everybody who asks why a job waits."
    )
    force: Flag = Field(default=False, description="Preempt what runs there, instead of waiting for it.")
    grace_seconds: Annotated[float, Strict(), Field(ge=0, le=MAX_GRACE_S)] | None = Field(
        default=None, description="With force: how long those get to save; null: as for any preemption."
    )


class EnableBody(Model):
    """How to enable a node: there is nothing to say."""


class NodeBody(Model):
    """What to change about a node; what is left out stays."""

    labels: NodeLabels | None = Field(default=None, description="Replaces all labels that operators gave it.")
    capabilities: Names | None = Field(default=None, description="Replaces all capabilities that operators gave it.")


def cluster_event(event: ClusterEvent) -> ClusterEventResource:
    return ClusterEventResource(ts=instant(event.at), type=event.type, message=event.message, data=dict(event.data))


def node_resource(node: Node, allocations: Iterable[Allocation], scope: Scope) -> NodeResource:
    """A node and its allocations as an account sees them: without the names of others' jobs."""
    free = whole(node)
    holders: dict[int, str | None] = {}
    jobs: dict[str, None] = {}
    for held in allocations:
        free = free.without(held.share)
        mine = held.job_id if scope.admits(held.account_id) else None
        holders.update(dict.fromkeys(held.share.gpus, mine))
        if mine is not None:
            jobs[mine] = None
    return NodeResource(
        id=node.node_id,
        hostname=node.hostname,
        backend=node.backend,
        state=node.state,
        drain_reason=node.drain_reason or None,
        drain_force=node.drain_force,
        labels=sorted(node.marks),
        capabilities=sorted(node.tags),
        given_labels=list(node.given_labels),
        given_capabilities=list(node.given_capabilities),
        gpus=[
            GpuResource(
                index=gpu.index,
                type=gpu.type,
                memory_mb=gpu.memory_mb,
                healthy=gpu.healthy,
                problem=None if gpu.healthy else gpu.problem or "unhealthy",
                free=gpu.index in free.gpus,
                job_id=holders.get(gpu.index),
            )
            for gpu in node.gpus
        ],
        cpu_cores=Amount(total=node.cpu_cores, free=free.cpu_cores),
        ram_mb=Amount(total=node.ram_mb, free=free.ram_mb),
        storage_mb=Amount(total=node.storage_mb, free=free.storage_mb),
        slots=Amount(total=node.slots, free=free.slots),
        jobs=list(jobs),
        last_heartbeat=instant(node.last_seen_at),
    )


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
    wanted = await read_model(request, DrainBody)
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

    return ok(await context.change_cluster(change))


@router.post(
    "/nodes/{node_id}/enable", response_model=Ok[NodeResource], responses=_CHANGING, openapi_extra=body(EnableBody)
)
async def enable_node(request: Request, principal: Admin, context: Context, node_id: NodeId) -> Response:
    """Give a node work again."""
    await read_model(request, EnableBody)
    now = context.clock()

    def change(connection: Connection) -> NodeResource:
        nodes.enable(connection, _EVERYTHING, node_id, now)
        return _node(connection, principal.scope, node_id)

    return ok(await context.change_cluster(change))


@router.patch("/nodes/{node_id}", response_model=Ok[NodeResource], responses=_CHANGING, openapi_extra=body(NodeBody))
async def change_node(request: Request, principal: Admin, context: Context, node_id: NodeId) -> Response:
    """Set the labels or capabilities that a node has beside those that its backend reports."""
    wanted = await read_model(request, NodeBody)
    now = context.clock()

    def change(connection: Connection) -> NodeResource:
        nodes.give(connection, _EVERYTHING, node_id, now, labels=wanted.labels, capabilities=wanted.capabilities)
        return _node(connection, principal.scope, node_id)

    return ok(await context.change_cluster(change))


def _node(connection: Connection, scope: Scope, node_id: str) -> NodeResource:
    node = nodes.get(connection, scope, node_id)
    return node_resource(node, _held(connection)[node_id], scope)


def _held(connection: Connection) -> defaultdict[str, list[Allocation]]:
    # Of all accounts: what others hold is not free either.
    held: defaultdict[str, list[Allocation]] = defaultdict(list)
    for allocation in attempts.all_allocations(connection, _EVERYTHING):
        held[allocation.share.node_id].append(allocation)
    return held
