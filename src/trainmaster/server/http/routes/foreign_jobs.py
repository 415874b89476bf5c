"""What the engine of a cluster has that is not ours: jobs that others made there, to read, and training runtimes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Response
from starlette.concurrency import run_in_threadpool

from trainmaster.schema import cluster as schema
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.foreign_jobs import ForeignJob, ForeignJobs
from trainmaster.server.http.auth import ADMINS_ONLY, VIEWERS_ONLY
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import ok
from trainmaster.server.http.requests import PREFIX
from trainmaster.server.http.router import PlainText, StrictRoute, answers

router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["cluster"])

_threads = ThreadPoolExecutor(4, thread_name_prefix="foreign jobs")
"""An engine that hangs holds up these, and nothing else."""
T = TypeVar("T")
Name = Annotated[str, Path(min_length=1, max_length=256, pattern=r"^[^\x00]*$")]
JobName = Annotated[str, Path(max_length=253, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")]
"""It becomes a part of a request to the engine."""


@router.get("/backends/{name}/runtimes", dependencies=VIEWERS_ONLY, **answers(schema.RuntimeList, 404, 503))
async def list_runtimes(context: Context, name: Name) -> Response:
    """List the training runtimes of a cluster, asked now; none, where Kubeflow Trainer is not installed."""
    documents = await _ask(context, name, lambda jobs: jobs.runtimes()) or ()
    runtimes = [
        schema.RuntimeResource(
            name=each["metadata"]["name"], kind=each["kind"], file=f"the cluster {name}", document=dict(each)
        )
        for each in documents
    ]
    return ok(schema.RuntimeList(runtimes=runtimes, problems=[]))


@router.get("/backends/{name}/foreign-jobs", dependencies=VIEWERS_ONLY, **answers(schema.ForeignJobList, 404, 503))
async def list_foreign_jobs(context: Context, name: Name) -> Response:
    """List the jobs on a cluster that others made there, the newest first: on Kubernetes, TrainJobs."""
    found = await _ask(context, name, lambda jobs: jobs.others()) or ()
    return ok(schema.ForeignJobList(jobs=[_resource(each) for each in found]))


@router.get(
    "/backends/{name}/foreign-jobs/{job}", dependencies=VIEWERS_ONLY, **answers(schema.ForeignJobResource, 404, 503)
)
async def show_foreign_job(context: Context, name: Name, job: JobName) -> Response:
    """Show one of them."""
    return ok(_resource(await _job(context, name, job)))


@router.get(
    "/backends/{name}/foreign-jobs/{job}/logs", dependencies=ADMINS_ONLY, **answers(schema.ForeignLog, 404, 503)
)
async def foreign_log(
    context: Context,
    name: Name,
    job: JobName,
    step: Annotated[PlainText, Query(description="One of the job's steps.")] = "node-0",
    cursor: Annotated[PlainText, Query(description="Begin where the last answer ended.")] = "",
) -> Response:
    """Read what a step of one of them wrote, as long as the engine has it."""
    found = await _job(context, name, job)
    chosen = next((each for each in found.steps if each.name == step), None)
    if chosen is None:
        return ok(schema.ForeignLog(lines=[], next_cursor=cursor, complete=found.has_ended))
    part = await _ask(context, name, lambda jobs: jobs.log(chosen.pod, step, cursor))
    assert part is not None
    return ok(schema.ForeignLog(lines=list(part.lines), next_cursor=part.cursor, complete=chosen.has_ended))


async def _job(context: ApiContext, name: str, job: str) -> ForeignJob:
    found = await _ask(context, name, lambda jobs: jobs.other(job))
    if found is None:
        raise NotFoundError(f"on {name} there is no job {job} of others")
    return found


async def _ask(context: ApiContext, name: str, question: Callable[[ForeignJobs], T]) -> T | None:
    """None: that backend has no jobs of others."""
    await run_in_threadpool(context.commands.admission.backend, name)

    def ask() -> T | None:
        jobs = context.foreign_jobs(name)
        return question(jobs) if jobs is not None else None

    return await asyncio.get_running_loop().run_in_executor(_threads, ask)


def _resource(job: ForeignJob) -> schema.ForeignJobResource:
    steps: list[Any] = [
        schema.ForeignStep(
            name=step.name, status=step.status, pod=step.pod, device=step.device, device_count=step.device_count
        )
        for step in job.steps
    ]
    return schema.ForeignJobResource(
        name=job.name,
        status=job.status,
        created_at=job.created_at,
        node_count=job.node_count,
        runtime=job.runtime,
        message=job.message,
        labels=dict(job.labels),
        steps=steps,
    )
