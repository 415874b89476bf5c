"""Backends: where jobs can run, the engine that runs them, and the clusters that operators declare."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response
from pydantic import Field, StringConstraints
from starlette.concurrency import run_in_threadpool

from trainmaster.schema import cluster as schema
from trainmaster.server.core.fields import Model
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.http.auth import VIEWERS_ONLY, Admin
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import Nothing, ok
from trainmaster.server.http.requests import PREFIX, read_model
from trainmaster.server.http.router import NO_NUL, StrictRoute, answers
from trainmaster.server.store.clusters import Cluster

router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["cluster"])

_PATIENCE_S = 8.0
_looks: dict[tuple[Callable[[str], EngineFacts | None], str], Future[EngineFacts | None]] = {}
"""The questions to engines that are under way."""

BackendName = Annotated[str, Path(min_length=1, max_length=64, pattern=r"^[^\x00]*$")]


class ClusterBody(Model):
    """A cluster that jobs can name as their backend."""

    kind: Annotated[str, StringConstraints(max_length=64), NO_NUL] = Field(
        description="What engine runs its jobs, such as `slurm`."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="What the kind needs to know; replaces all options. A secret that is given "
        "as `***` stays as it is.",
    )


@router.get("/backends", dependencies=VIEWERS_ONLY, **answers(schema.BackendList))
async def list_backends(context: Context) -> Response:
    """List where jobs can run."""
    return ok(schema.BackendList(backends=await run_in_threadpool(_summaries, context)))


@router.get("/backends/{name}", dependencies=VIEWERS_ONLY, **answers(schema.BackendResource, 404))
async def show_backend(context: Context, name: BackendName) -> Response:
    """Show one backend, and the engine that runs its jobs, where there is one."""
    summary = await run_in_threadpool(_summary, context, name)
    facts = await _looked_at(context.engine, name)
    engine = None
    if facts is not None:
        engine = schema.EngineResource(name=facts.name or None, host=facts.host or None, problem=facts.problem or None)
    server_url, unreachable = await context.read(context.commands.admission.reach, name)
    return ok(
        schema.BackendResource(**summary, engine=engine, server_url=server_url or None, unreachable=unreachable or None)
    )


@router.put("/backends/{name}", **answers(schema.BackendSummary, 422, body=ClusterBody, required=True))
async def put_backend(request: Request, principal: Admin, context: Context, name: BackendName) -> Response:  # noqa: ARG001 - whose scope is checked
    """Add a cluster, or change it. Jobs can name it as their backend at once."""
    wanted = await read_model(request, ClusterBody)
    await context.change_cluster(context.clusters.put, name, wanted.kind, wanted.options)
    context.clusters.has_changed()
    return ok(await run_in_threadpool(_summary, context, name))


@router.delete("/backends/{name}", **answers(Nothing, 404, 409))
async def delete_backend(principal: Admin, context: Context, name: BackendName) -> Response:  # noqa: ARG001 - whose scope is checked
    """Remove a cluster on which no job waits or runs."""
    await context.change_cluster(context.clusters.remove, name)
    context.clusters.has_changed()
    return ok(Nothing())


def _summaries(context: ApiContext) -> list[schema.BackendSummary]:
    default = context.commands.admission.default_backend
    names = sorted(context.commands.admission.backends, key=lambda name: name != default)
    declared = {cluster.name: cluster for cluster in context.clusters.all()}
    return [_summary_of(context, name, declared.get(name)) for name in names]


def _summary(context: ApiContext, name: str) -> schema.BackendSummary:
    context.commands.admission.backend(name)
    declared = {cluster.name: cluster for cluster in context.clusters.all()}
    return _summary_of(context, name, declared.get(name))


def _summary_of(context: ApiContext, name: str, cluster: Cluster | None) -> schema.BackendSummary:
    admission = context.commands.admission
    return schema.BackendSummary(
        name=name,
        default=name == admission.default_backend,
        images=admission.backends[name].images,
        here=admission.backends[name].runs_here,
        kind=name if cluster is None else cluster.kind,
        options=None if cluster is None else context.clusters.shown(cluster),
    )


async def _looked_at(ask: Callable[[str], EngineFacts | None], name: str) -> EngineFacts | None:
    """Ask for an engine once for all who wait, in a thread of its own: if it hangs, it takes none that others need."""
    if (take_snapshot := _looks.get((ask, name))) is None:
        take_snapshot = _looks[ask, name] = Future()
        take_snapshot.set_running_or_notify_cancel()  # so that no waiting request can cancel it for the others
        threading.Thread(target=_look, args=(take_snapshot, ask, name), name=f"look at {name}", daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(take_snapshot), _PATIENCE_S)
    except TimeoutError:
        return EngineFacts(problem=f"the engine has not answered for {_PATIENCE_S:.0f} s")


def _look(take_snapshot: Future[EngineFacts | None], ask: Callable[[str], EngineFacts | None], name: str) -> None:
    try:
        found = ask(name)
    except Exception as error:  # for the requests that wait
        take_snapshot.set_exception(error)
    else:
        take_snapshot.set_result(found)
    finally:
        del _looks[ask, name]
