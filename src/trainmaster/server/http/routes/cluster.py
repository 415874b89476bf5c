"""The cluster: its resources and their use, the leader, nodes and training runtimes."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field, Strict, StringConstraints
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster import __version__
from trainmaster.schema import cluster as schema
from trainmaster.server.core.fields import Flag, Model, Names
from trainmaster.server.core.resources import Free, Node, NodeState, whole
from trainmaster.server.core.spec.configs import NodeLabels
from trainmaster.server.core.states import JobStatus
from trainmaster.server.http.auth import VIEWERS_ONLY, Admin, Principal, Viewer
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import instant, ok, resource
from trainmaster.server.http.requests import PREFIX, read_model
from trainmaster.server.http.router import NO_NUL, StrictRoute, answers
from trainmaster.server.store import attempts, events, leases, nodes, queues
from trainmaster.server.store.attempts import Allocation
from trainmaster.server.store.scope import Scope

router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["cluster"])

_EVERYTHING = Scope.everything()


@router.get("/cluster", **answers(schema.ClusterResource))
async def show_cluster(principal: Viewer, context: Context) -> Response:
    """Show the cluster: nodes, GPUs, jobs, how much of it is used, and which server leads."""
    return ok(await context.read(_cluster, principal.scope, context.clock()))


def _cluster(connection: Connection, scope: Scope, now: float) -> schema.ClusterResource:
    """The cluster over all accounts; nodes that are offline do not count."""
    held = _held(connection)
    every = nodes.all(connection, scope)
    present = [node for node in every if node.state is not NodeState.OFFLINE]
    free = {node.node_id: _free(node, held[node.node_id]) for node in present}
    ready = [node for node in present if node.state is NodeState.READY]
    total = Counter(gpu.type for node in present for gpu in node.gpus)
    unhealthy = Counter(gpu.type for node in present for gpu in node.gpus if not gpu.healthy)
    idle = Counter(gpu.type for node in ready for gpu in node.gpus if gpu.index in free[node.node_id].gpus)
    gpus_held = sum(gpu.healthy and gpu.index not in free[node.node_id].gpus for node in present for gpu in node.gpus)
    cores = sum(node.cpu_cores for node in present)
    cores_held = sum(node.cpu_cores - free[node.node_id].cpu_cores for node in present)
    jobs = queues.by_status(connection, _EVERYTHING)
    lease = leases.current(connection, scope)
    leader = None
    if lease is not None and lease.expires_at > now:
        leader = resource(schema.LeaderResource, lease, id=lease.holder, since=instant(lease.since))
    return schema.ClusterResource(
        version=__version__,
        leader=leader,
        backends=sorted({node.backend for node in every}),
        nodes=dict(Counter(node.state for node in every)),
        gpus=[
            schema.GpuTypeResource(type=name, total=count, free=idle[name], unhealthy=unhealthy[name])
            for name, count in sorted(total.items())
        ],
        cpu_cores=schema.Amount(total=cores, free=sum(free[node.node_id].cpu_cores for node in ready)),
        ram_mb=schema.Amount(
            total=sum(node.ram_mb for node in present), free=sum(free[node.node_id].ram_mb for node in ready)
        ),
        gpu_utilisation=round(gpus_held / total.total(), 4) if total else None,
        cpu_utilisation=round(cores_held / cores, 4) if cores else None,
        jobs={str(status): count for status, count in jobs.items()},
        queue_depth=jobs.get(JobStatus.QUEUED, 0),
    )


# Training runtimes: files of the server that clients read


runtimes_router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["runtimes"], dependencies=VIEWERS_ONLY)

RuntimeName = Annotated[str, Path(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]


@runtimes_router.get("/runtimes", **answers(schema.RuntimeList))
async def list_runtimes(context: Context) -> Response:
    """List the runtimes of this server, for every account the same; built-in ones are the clients'."""
    found = await run_in_threadpool(context.runtimes)
    runtimes = [resource(schema.RuntimeResource, runtime) for runtime in found.runtimes]
    problems = [resource(schema.RuntimeProblem, each) for each in found.broken]
    return ok(schema.RuntimeList(runtimes=runtimes, problems=problems))


@runtimes_router.get("/runtimes/{name}", **answers(schema.RuntimeResource, 404))
async def show_runtime(context: Context, name: RuntimeName) -> Response:
    """Show one runtime."""
    return ok(resource(schema.RuntimeResource, (await run_in_threadpool(context.runtimes)).get(name)))


# Nodes: the machines that jobs run on, their resources, and draining.

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


def node_resource(node: Node, allocations: Sequence[Allocation], scope: Scope) -> schema.NodeResource:
    """A node and its allocations as an account sees them: without the names of others' jobs."""
    free = _free(node, allocations)
    mine = [held for held in allocations if scope.admits(held.account_id)]
    holders = {gpu: held.job_id for held in mine for gpu in held.share.gpus}
    return resource(
        schema.NodeResource,
        node,
        id=node.node_id,
        drain_reason=node.drain_reason or None,
        labels=sorted(node.marks),
        capabilities=sorted(node.tags),
        gpus=[
            resource(
                schema.GpuResource,
                gpu,
                problem=None if gpu.healthy else gpu.problem or "unhealthy",
                free=gpu.index in free.gpus,
                job_id=holders.get(gpu.index),
            )
            for gpu in node.gpus
        ],
        cpu_cores=schema.Amount(total=node.cpu_cores, free=free.cpu_cores),
        ram_mb=schema.Amount(total=node.ram_mb, free=free.ram_mb),
        storage_mb=schema.Amount(total=node.storage_mb, free=free.storage_mb),
        slots=schema.Amount(total=node.slots, free=free.slots),
        jobs=list(dict.fromkeys(held.job_id for held in mine)),
        last_heartbeat=instant(node.last_seen_at),
    )


def _free(node: Node, allocations: Iterable[Allocation]) -> Free:
    free = whole(node)
    if node.is_in_pool:
        in_use = sorted(free.gpus)[: node.held_gpus]  # how many is known, but not which
        return free.less(in_use, node.held_cpu_cores, node.held_ram_mb, 0, 0)
    for held in allocations:
        free = free.without(held.share)
    return free


nodes_router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["nodes"])

NodeId = Annotated[str, Path(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]


@nodes_router.get("/nodes", **answers(schema.NodeList))
async def list_nodes(principal: Viewer, context: Context) -> Response:
    """List all nodes with what is free on them."""

    def find(connection: Connection) -> schema.NodeList:
        held = _held(connection)
        found = nodes.all(connection, principal.scope)
        return schema.NodeList(nodes=[node_resource(node, held[node.node_id], principal.scope) for node in found])

    return ok(await context.read(find))


@nodes_router.get("/nodes/{node_id}", **answers(schema.NodeResource, 404))
async def show_node(principal: Viewer, context: Context, node_id: NodeId) -> Response:
    """Show one node."""
    return ok(await context.read(_node, principal.scope, node_id))


@nodes_router.get("/nodes/{node_id}/events", **answers(schema.ClusterEventList, 404))
async def node_events(
    principal: Viewer,
    context: Context,
    node_id: NodeId,
    limit: Annotated[int, Query(ge=1, le=1000, description="The newest so many.")] = 100,
) -> Response:
    """Read what happened to a node: drains, GPUs that left the pool, changed labels."""

    def find(connection: Connection) -> schema.ClusterEventList:
        node = nodes.get(connection, principal.scope, node_id)
        found = events.of_subject(connection, principal.scope, f"node/{node.node_id}", limit)
        return schema.ClusterEventList(
            events=[resource(schema.ClusterEventResource, event, ts=instant(event.at)) for event in found]
        )

    return ok(await context.read(find))


@nodes_router.post("/nodes/{node_id}/drain", **answers(schema.NodeResource, 404, 409, body=DrainBody))
async def drain_node(request: Request, principal: Admin, context: Context, node_id: NodeId) -> Response:
    """Give a node no more work. It is DRAINED when nothing runs there; with `force`, what runs is preempted."""
    wanted = await read_model(request, DrainBody)
    drain = functools.partial(nodes.drain, reason=wanted.reason, force=wanted.force, grace_s=wanted.grace_seconds)
    return await _changed(context, principal, node_id, drain)


@nodes_router.post("/nodes/{node_id}/enable", **answers(schema.NodeResource, 404, body=EnableBody))
async def enable_node(request: Request, principal: Admin, context: Context, node_id: NodeId) -> Response:
    """Give a node work again."""
    await read_model(request, EnableBody)
    return await _changed(context, principal, node_id, nodes.enable)


@nodes_router.patch("/nodes/{node_id}", **answers(schema.NodeResource, 404, 409, body=NodeBody))
async def change_node(request: Request, principal: Admin, context: Context, node_id: NodeId) -> Response:
    """Set the labels or capabilities that a node has beside those that its backend reports."""
    wanted = await read_model(request, NodeBody)
    given = functools.partial(nodes.give, labels=wanted.labels, capabilities=wanted.capabilities)
    return await _changed(context, principal, node_id, given)


async def _changed(
    context: ApiContext, principal: Principal, node_id: str, change: Callable[[Connection, Scope, str, float], object]
) -> Response:
    now = context.clock()

    def work(connection: Connection) -> schema.NodeResource:
        change(connection, _EVERYTHING, node_id, now)
        return _node(connection, principal.scope, node_id)

    return ok(await context.change_cluster(work))


def _node(connection: Connection, scope: Scope, node_id: str) -> schema.NodeResource:
    return node_resource(nodes.get(connection, scope, node_id), _held(connection)[node_id], scope)


def _held(connection: Connection) -> defaultdict[str, list[Allocation]]:
    # Of all accounts: what others hold is not free either.
    held: defaultdict[str, list[Allocation]] = defaultdict(list)
    for allocation in attempts.all_allocations(connection, _EVERYTHING):
        held[allocation.share.node_id].append(allocation)
    return held
