"""The cluster: its resources and their present and past use, the leader, backends and training runtimes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field, Strict, StringConstraints
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.schema.cluster import (
    Amount,
    BackendList,
    BackendResource,
    BackendSummary,
    ClusterEventList,
    ClusterEventResource,
    ClusterResource,
    EngineResource,
    GpuResource,
    GpuTypeResource,
    LeaderResource,
    NodeList,
    NodeResource,
    RuntimeList,
    RuntimeProblem,
    RuntimeResource,
)
from trainmaster.server.coordinator.operator_files import RuntimeDocument
from trainmaster.server.core.fields import Flag, Model, Names
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.core.resources import ClusterEvent, Free, Node, NodeState, whole
from trainmaster.server.core.spec.configs import NodeLabels
from trainmaster.server.core.states import JobStatus
from trainmaster.server.http.auth import VIEWERS_ONLY, Admin, Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import instant, ok
from trainmaster.server.http.requests import read_model
from trainmaster.server.http.router import NO_NUL, StrictRoute, answers
from trainmaster.server.store import attempts, events, leases, nodes, queues
from trainmaster.server.store.attempts import Allocation
from trainmaster.server.store.leases import Lease
from trainmaster.server.store.scope import Scope


def cluster_resource(
    nodes: Iterable[Node],
    free: Mapping[str, Free],
    jobs: Mapping[JobStatus, int],
    lease: Lease | None,
    *,
    version: str,
    now: float,
) -> ClusterResource:
    """The cluster from its parts; nodes that are offline do not count."""
    every = list(nodes)
    present = [node for node in every if node.state is not NodeState.OFFLINE]
    total: Counter[str] = Counter(gpu.type for node in present for gpu in node.gpus)
    unhealthy: Counter[str] = Counter(gpu.type for node in present for gpu in node.gpus if not gpu.healthy)
    held = sum(gpu.healthy and gpu.index not in free[node.node_id].gpus for node in present for gpu in node.gpus)
    idle: Counter[str] = Counter(
        gpu.type
        for node in present
        for gpu in node.gpus
        if node.state is NodeState.READY and gpu.index in free[node.node_id].gpus
    )
    cores = sum(node.cpu_cores for node in present)
    cores_held = sum(node.cpu_cores - free[node.node_id].cpu_cores for node in present)
    ready = [node for node in present if node.state is NodeState.READY]
    return ClusterResource(
        version=version,
        leader=_leader(lease) if lease is not None and lease.expires_at > now else None,
        backends=sorted({node.backend for node in every}),
        nodes=dict(Counter(node.state for node in every)),
        gpus=[
            GpuTypeResource(type=name, total=count, free=idle[name], unhealthy=unhealthy[name])
            for name, count in sorted(total.items())
        ],
        cpu_cores=Amount(total=cores, free=sum(free[node.node_id].cpu_cores for node in ready)),
        ram_mb=Amount(
            total=sum(node.ram_mb for node in present), free=sum(free[node.node_id].ram_mb for node in ready)
        ),
        gpu_utilisation=round(held / total.total(), 4) if total else None,
        cpu_utilisation=round(cores_held / cores, 4) if cores else None,
        jobs={str(status): count for status, count in jobs.items()},
        queue_depth=jobs.get(JobStatus.QUEUED, 0),
    )


def _leader(lease: Lease) -> LeaderResource:
    return LeaderResource(id=lease.holder, url=lease.url, epoch=lease.epoch, since=instant(lease.since))


router = APIRouter(route_class=StrictRoute, tags=["cluster"])


@router.get("/cluster", **answers(ClusterResource))
async def show_cluster(principal: Viewer, context: Context) -> Response:
    """Show the cluster: nodes, GPUs, jobs, how much of it is used, and which server leads."""
    now = context.clock()

    def find(connection: Connection) -> ClusterResource:
        # Amounts are those of all accounts: what others hold is not free either.
        found = nodes.all(connection, principal.scope)
        free = {node.node_id: whole(node) for node in found}
        for held in attempts.all_allocations(connection, Scope.everything()):
            if held.share.node_id in free:
                free[held.share.node_id] = free[held.share.node_id].without(held.share)
        return cluster_resource(
            found,
            free,
            queues.by_status(connection, Scope.everything()),
            leases.current(connection, principal.scope),
            version=context.version,
            now=now,
        )

    return ok(await context.read(find))


def engine_resource(facts: EngineFacts | None) -> EngineResource | None:
    if facts is None:
        return None
    return EngineResource(name=facts.name or None, host=facts.host or None, problem=facts.problem or None)


_PATIENCE_S = 8.0
_looks: dict[tuple[Callable[[str], EngineFacts | None], str], Future[EngineFacts | None]] = {}
"""The questions to engines that are under way."""

BackendName = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[^\x00]*$")]


@router.get("/backends", dependencies=VIEWERS_ONLY, **answers(BackendList))
async def list_backends(context: Context) -> Response:
    """List where jobs can run."""
    default, known = context.commands.admission.default_backend, context.commands.admission.backends
    return ok(
        BackendList(
            backends=[
                BackendSummary(name=name, default=name == default, images=known[name].images)
                for name in sorted(known, key=lambda name: name != default)
            ]
        )
    )


@router.get("/backends/{name}", dependencies=VIEWERS_ONLY, **answers(BackendResource, 404))
async def show_backend(context: Context, name: BackendName) -> Response:
    """Show one backend, and the engine that runs its jobs, where there is one."""
    capable = context.commands.admission.backend(name)
    return ok(
        BackendResource(
            name=name,
            default=name == context.commands.admission.default_backend,
            images=capable.images,
            engine=engine_resource(await _looked_at(context.engine, name)),
        )
    )


async def _looked_at(ask: Callable[[str], EngineFacts | None], name: str) -> EngineFacts | None:
    """Ask for the engine of a backend now: once for all requests that wait for it.

    A thread of its own asks, so that an engine that hangs keeps no thread that other requests need.
    """
    look = _looks.get((ask, name))
    if look is None:
        look = _looks[ask, name] = Future()
        look.set_running_or_notify_cancel()  # so that no waiting request can cancel it for the others
        threading.Thread(target=_look, args=(look, ask, name), name=f"look at {name}", daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(look), _PATIENCE_S)
    except TimeoutError:
        return EngineFacts(problem=f"the engine has not answered for {_PATIENCE_S:.0f} s")


def _look(look: Future[EngineFacts | None], ask: Callable[[str], EngineFacts | None], name: str) -> None:
    try:
        found = ask(name)
    except Exception as error:  # for the requests that wait
        look.set_exception(error)
    else:
        look.set_result(found)
    finally:
        del _looks[ask, name]


# Training runtimes: files of the server that clients read


def runtime_resource(runtime: RuntimeDocument) -> RuntimeResource:
    return RuntimeResource(name=runtime.name, kind=runtime.kind, file=runtime.file, document=dict(runtime.document))


runtimes_router = APIRouter(route_class=StrictRoute, tags=["runtimes"], dependencies=VIEWERS_ONLY)

RuntimeName = Annotated[str, Path(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]


@runtimes_router.get("/runtimes", **answers(RuntimeList))
async def list_runtimes(context: Context) -> Response:
    """List the runtimes of this server, for every account the same; built-in ones are the clients'."""
    found = await run_in_threadpool(context.runtimes)
    return ok(
        RuntimeList(
            runtimes=[runtime_resource(runtime) for runtime in found.runtimes],
            problems=[RuntimeProblem(file=each.file, message=each.message) for each in found.broken],
        )
    )


@runtimes_router.get("/runtimes/{name}", **answers(RuntimeResource, 404))
async def show_runtime(context: Context, name: RuntimeName) -> Response:
    """Show one runtime."""
    return ok(runtime_resource((await run_in_threadpool(context.runtimes)).get(name)))


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


nodes_router = APIRouter(route_class=StrictRoute, tags=["nodes"])

NodeId = Annotated[str, Path(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]

_EVERYTHING = Scope.everything()


@nodes_router.get("/nodes", **answers(NodeList))
async def list_nodes(principal: Viewer, context: Context) -> Response:
    """List all nodes with what is free on them."""

    def find(connection: Connection) -> NodeList:
        held = _held(connection)
        found = nodes.all(connection, principal.scope)
        return NodeList(nodes=[node_resource(node, held[node.node_id], principal.scope) for node in found])

    return ok(await context.read(find))


@nodes_router.get("/nodes/{node_id}", **answers(NodeResource, 404))
async def show_node(principal: Viewer, context: Context, node_id: NodeId) -> Response:
    """Show one node."""
    return ok(await context.read(lambda connection: _node(connection, principal.scope, node_id)))


@nodes_router.get("/nodes/{node_id}/events", **answers(ClusterEventList, 404))
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


@nodes_router.post("/nodes/{node_id}/drain", **answers(NodeResource, 404, body=DrainBody))
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


@nodes_router.post("/nodes/{node_id}/enable", **answers(NodeResource, 404, body=EnableBody))
async def enable_node(request: Request, principal: Admin, context: Context, node_id: NodeId) -> Response:
    """Give a node work again."""
    await read_model(request, EnableBody)
    now = context.clock()

    def change(connection: Connection) -> NodeResource:
        nodes.enable(connection, _EVERYTHING, node_id, now)
        return _node(connection, principal.scope, node_id)

    return ok(await context.change_cluster(change))


@nodes_router.patch("/nodes/{node_id}", **answers(NodeResource, 404, body=NodeBody))
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
