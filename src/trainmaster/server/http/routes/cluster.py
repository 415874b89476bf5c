"""The cluster: its resources and their present and past use, the leader, backends and training runtimes."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
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
from trainmaster.schema.reports import Usage, UsageRow
from trainmaster.server.coordinator.operator_files import RuntimeDocument
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.core.resources import Free, Node, NodeState, whole
from trainmaster.server.core.states import JobStatus
from trainmaster.server.http.auth import VIEWERS_ONLY, Viewer, require
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, instant, ok
from trainmaster.server.http.requests import not_a_time, parse_time
from trainmaster.server.http.router import PlainText, StrictRoute, errors
from trainmaster.server.store import attempts, leases, nodes, queues, usage
from trainmaster.server.store.leases import Lease
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.usage import Used


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
    if facts is None:
        return None
    return EngineResource(name=facts.name or None, host=facts.host or None, problem=facts.problem or None)


_PATIENCE_S = 8.0
_looks: dict[tuple[Callable[[str], EngineFacts | None], str], Future[EngineFacts | None]] = {}
"""The questions to engines that are under way."""

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


@runtimes_router.get("/runtimes", response_model=Ok[RuntimeList], responses=errors())
async def list_runtimes(context: Context) -> Response:
    """List the runtimes of this server, for every account the same; built-in ones are the clients'."""
    found = await run_in_threadpool(context.runtimes)
    return ok(
        RuntimeList(
            runtimes=[runtime_resource(runtime) for runtime in found.runtimes],
            problems=[RuntimeProblem(file=each.file, message=each.message) for each in found.broken],
        )
    )


@runtimes_router.get("/runtimes/{name}", response_model=Ok[RuntimeResource], responses=errors(HTTPStatus.NOT_FOUND))
async def show_runtime(context: Context, name: RuntimeName) -> Response:
    """Show one runtime."""
    return ok(runtime_resource((await run_in_threadpool(context.runtimes)).get(name)))


# Usage: what jobs held, and for how long


def usage_row(used: Used) -> UsageRow:
    return UsageRow(
        key=used.key,
        jobs=used.jobs,
        attempts=used.attempts,
        gpu_seconds=used.gpu_seconds,
        cpu_seconds=used.cpu_seconds,
        wall_seconds=used.wall_seconds,
    )


usage_router = APIRouter(route_class=StrictRoute, tags=["usage"])

_GROUP = re.compile(rf"{'|'.join(usage.GROUPS)}|{usage.LABEL}[A-Za-z0-9._/-]{{1,63}}")
_LATEST = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


@usage_router.get("/usage", response_model=Ok[Usage], responses=errors(HTTPStatus.FORBIDDEN))
async def show_usage(
    request: Request,
    principal: Viewer,
    context: Context,
    since: Annotated[
        PlainText | None, Query(alias="from", description="ISO 8601, or seconds since 1970; default: all time.")
    ] = None,
    until: Annotated[PlainText | None, Query(alias="to", description="The same; default: now.")] = None,
    group_by: Annotated[
        PlainText, Query(description="`job`, `attempt`, `queue`, `account`, `day` (of UTC) or `label:KEY`.")
    ] = "queue",
    all_accounts: Annotated[bool, Query(description="Of every account; needs `cluster_admin`.")] = False,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The most groups.")] = 1000,
) -> Response:
    """Add up what attempts used: those that ended, as far as they lie in the interval; those that run, up to now."""
    if not _GROUP.fullmatch(group_by):
        known = ", ".join(usage.GROUPS)
        raise SpecError([Problem(field="group_by", message=f"must be one of {known}, or {usage.LABEL}KEY")])
    scope = principal.scope
    if all_accounts:
        require(request, KeyScope.CLUSTER_ADMIN)
        scope = Scope.everything()
    now = context.clock()
    begin = _parse_bound("from", since) if since else 0.0
    end = _parse_bound("to", until) if until else now
    if end < begin:
        raise SpecError([Problem(field="to", message="must not be before `from`")])

    def find(connection: Connection) -> Usage:
        rows = usage.by_group(connection, scope, group_by, since=begin, until=end, now=now, limit=limit + 1)
        return {
            "from": instant(begin) if since else None,
            "to": instant(end),
            "group_by": group_by,
            "rows": [usage_row(used) for used in rows[:limit]],
            "total": usage_row(usage.total(connection, scope, since=begin, until=end, now=now)),
            "truncated": len(rows) > limit,
        }

    return ok(await context.read(find))


def _parse_bound(field: str, text: str) -> float:
    seconds = parse_time(field, text)
    if not 0 <= seconds <= _LATEST:
        raise not_a_time(field)
    return seconds
