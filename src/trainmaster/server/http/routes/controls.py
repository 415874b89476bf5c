"""Controls: cancel, pause, resume, retry, clone. Each of them accepts an empty body."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field, StringConstraints

from trainmaster.schema.jobs import ControlledJob, JobResource, SubmittedJob
from trainmaster.server.core.fields import Flag, Model
from trainmaster.server.core.spec.configs import ResourceConfig
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import Handle, SubmitJobRequest
from trainmaster.server.http.auth import Manager
from trainmaster.server.http.context import Context
from trainmaster.server.http.job_json import controlled_json
from trainmaster.server.http.requests import PREFIX, parse_json, read_body, read_command
from trainmaster.server.http.router import NO_NUL, JobId, StrictRoute, answers
from trainmaster.server.http.routes.jobs import answer
from trainmaster.server.http.routes.submissions import FORWARDING_PARAMETERS, forwarded_tokens, new_seed, submissions_of
from trainmaster.server.store import jobs

router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["controls"])


RestartPoint = Annotated[str, StringConstraints(max_length=512), NO_NUL]


class CancelBody(Model):
    """How to cancel a job."""

    reason: Annotated[str, StringConstraints(max_length=1024), NO_NUL] = Field(
        default="", description="Kept with the job, for people."
    )


class PauseBody(Model):
    """How to pause a job."""

    save_checkpoint: Flag = Field(default=True, description="Save first; false stops it as it is.")


class ResumeBody(Model):
    """How to resume a job."""

    checkpoint_id: RestartPoint = Field(default="", description="The checkpoint to start from; empty: the latest.")


class RetryBody(Model):
    """How to retry a job."""

    checkpoint_id: RestartPoint = Field(default="", description="The checkpoint to start from; empty: the latest.")
    modify_resources: Flag = Field(default=False, description="Use new_resource_config.")
    new_resource_config: ResourceConfig | None = Field(
        default=None, description="Replaces the whole resource_config of the job."
    )
    handle: Handle | None = Field(default=None, description="Of the new job; it has none otherwise.")


@router.post("/jobs/{job_id}/cancel", **answers(JobResource, 404, 409, body=CancelBody, keyed=True))
async def cancel(request: Request, principal: Manager, context: Context, job_id: JobId) -> Response:
    """End a job for good. One that runs is CANCELLED once it has stopped; until then `cancel_requested` is true."""
    wanted, idempotency = await read_command(request, CancelBody)
    command = context.commands.cancel(principal.scope, job_id, message=wanted.reason, idempotency=idempotency)
    return await answer(context, principal.scope, command)


@router.post("/jobs/{job_id}/pause", **answers(ControlledJob, 404, 409, body=PauseBody, keyed=True))
async def pause(request: Request, principal: Manager, context: Context, job_id: JobId) -> Response:
    """Park a running job: it saves, stops, gives back what it holds, and then becomes PAUSED."""
    wanted, idempotency = await read_command(request, PauseBody)
    command = context.commands.pause(principal.scope, job_id, save=wanted.save_checkpoint, idempotency=idempotency)
    return await answer(context, principal.scope, command, shown_as=controlled_json)


@router.post(
    "/jobs/{job_id}/resume",
    **answers(ControlledJob, 404, 409, body=ResumeBody, keyed=True, parameters=FORWARDING_PARAMETERS),
)
async def resume(request: Request, principal: Manager, context: Context, job_id: JobId) -> Response:
    """Queue a paused job again; a service also after its end."""
    wanted, idempotency = await read_command(request, ResumeBody)
    tokens = await forwarded_tokens(request, context)
    command = context.commands.resume(
        principal.scope, job_id, checkpoint_id=wanted.checkpoint_id, tokens=tokens, idempotency=idempotency
    )
    return await answer(context, principal.scope, command, shown_as=controlled_json)


@router.post(
    "/jobs/{job_id}/retry",
    status_code=HTTPStatus.CREATED,
    **answers(ControlledJob, 404, 409, body=RetryBody, keyed=True, parameters=FORWARDING_PARAMETERS),
)
async def retry(request: Request, principal: Manager, context: Context, job_id: JobId) -> Response:
    """Make a child of a job that ended; it starts from a checkpoint of its parent."""
    wanted, idempotency = await read_command(request, RetryBody)
    resources = wanted.new_resource_config
    command = context.commands.retry(
        principal.scope,
        job_id,
        created_by=principal.name,
        checkpoint_id=wanted.checkpoint_id,
        modify_resources=wanted.modify_resources,
        new_resource_config=None if resources is None else resources.model_dump(mode="json"),
        handle=wanted.handle,
        tokens=await forwarded_tokens(request, context),
        idempotency=idempotency,
    )
    return await answer(context, principal.scope, command, HTTPStatus.CREATED, shown_as=controlled_json)


@router.post(
    "/jobs/{job_id}/clone",
    status_code=HTTPStatus.CREATED,
    **answers(SubmittedJob, 400, 404, 409, body=SubmitJobRequest, keyed=True, parameters=FORWARDING_PARAMETERS),
)
async def clone(request: Request, principal: Manager, context: Context, job_id: JobId) -> Response:
    """Submit a job again, from the start, as a new job. It may be in any state.

    The body is the request of the new job; an empty one means the request of the old job. Where the body has `***`,
    which is how a job shows the value of a secret, the old job's value is used.
    """
    submissions = submissions_of(request)
    document = await read_body(request)

    def filled() -> SubmitJobRequest:
        given = parse_json(document) if document.strip() else None
        with context.database.read() as connection:
            cloned = context.vault.cloned(connection, jobs.get(connection, principal.scope, job_id), given)
        return parse_submit(cloned, seed=new_seed())

    # The old job's request may be large whatever the body is.
    wanted = await context.commands.admission.look_up(await submissions.run(filled, large=True), principal.account_id)
    return await submissions.submit(request, principal, wanted, document=document, large=True)
