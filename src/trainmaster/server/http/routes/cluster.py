"""The cluster: its resources, how much of them is used, the leader, and the backends."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Response
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.schema.cluster import (
    Amount,
    BackendList,
    BackendResource,
    BackendSummary,
    ClusterResource,
    EngineResource,
    GpuTypeResource,
    LeaderResource,
    RuntimeList,
    RuntimeProblem,
    RuntimeResource,
)
from trainmaster.server.coordinator.operator_files import RuntimeDocument, RuntimeFiles
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.core.resources import Free, Node, NodeState, whole
from trainmaster.server.core.states import JobStatus
from trainmaster.server.http.auth import VIEWERS_ONLY, Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, instant, ok
from trainmaster.server.http.router import StrictRoute, errors
from trainmaster.server.store import attempts, leases, nodes, queues
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
    """The cluster from its parts; what is on nodes that are offline does not count."""
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


@router.get("/cluster", response_model=Ok[ClusterResource], responses=errors())
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
    """An engine, if there is one."""
    if facts is None:
        return None
    return EngineResource(name=facts.name or None, host=facts.host or None, problem=facts.problem or None)


_PATIENCE_S = 8.0
_looks: dict[tuple[Callable[[str], EngineFacts | None], str], Future[EngineFacts | None]] = {}
"""The looks at engines that are under way, by whom they ask, and for which backend."""

BackendName = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[^\x00]*$")]


@router.get("/backends", response_model=Ok[BackendList], responses=errors(), dependencies=VIEWERS_ONLY)
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


@router.get(
    "/backends/{name}",
    response_model=Ok[BackendResource],
    responses=errors(HTTPStatus.NOT_FOUND),
    dependencies=VIEWERS_ONLY,
)
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
    """What runs the jobs of a backend, asked now: once for all who want to know, and in a thread of its own.

    An engine that hangs keeps none of the threads that other requests need.
    """
    look = _looks.get((ask, name))
    if look is None:
        look = _looks[ask, name] = Future()
        look.set_running_or_notify_cancel()  # so that nobody who goes takes it from the others
        threading.Thread(target=_look, args=(look, ask, name), name=f"look at {name}", daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(look), _PATIENCE_S)
    except TimeoutError:
        return EngineFacts(problem=f"the engine has not answered for {_PATIENCE_S:.0f} s")


def _look(look: Future[EngineFacts | None], ask: Callable[[str], EngineFacts | None], name: str) -> None:
    try:
        found = ask(name)
    except Exception as error:  # whoever waits for it shall know
        look.set_exception(error)
    else:
        look.set_result(found)
    finally:
        del _looks[ask, name]


# Training runtimes from files of the server, which clients read.


def runtime_resource(runtime: RuntimeDocument) -> RuntimeResource:
    """One runtime."""
    return RuntimeResource(name=runtime.name, kind=runtime.kind, file=runtime.file, document=dict(runtime.document))


def runtime_list(found: RuntimeFiles) -> RuntimeList:
    """What a directory has."""
    return RuntimeList(
        runtimes=[runtime_resource(runtime) for runtime in found.runtimes],
        problems=[RuntimeProblem(file=each.file, message=each.message) for each in found.broken],
    )


runtimes_router = APIRouter(route_class=StrictRoute, tags=["runtimes"], dependencies=VIEWERS_ONLY)

RuntimeName = Annotated[str, Path(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]


@runtimes_router.get("/runtimes", response_model=Ok[RuntimeList], responses=errors())
async def list_runtimes(context: Context) -> Response:
    """List the runtimes of this server, for every account the same; built-in ones are the clients'."""
    return ok(runtime_list(await run_in_threadpool(context.runtimes)))


@runtimes_router.get("/runtimes/{name}", response_model=Ok[RuntimeResource], responses=errors(HTTPStatus.NOT_FOUND))
async def show_runtime(context: Context, name: RuntimeName) -> Response:
    """Show one runtime."""
    return ok(runtime_resource((await run_in_threadpool(context.runtimes)).get(name)))
