"""Sampling. The id of a sampling session names its trainer, so a sample needs no lookup."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from trainmaster.protocol.trainer_requests import SOURCE_HEADER, TINKER, ModelMode, Trainer, trainer_of_sampling_session
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import NotFoundError, RefusedError
from trainmaster.server.core.job import Job
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.doors.bodies import IncomingBody, plain_id, text_field
from trainmaster.server.doors.futures import MAX_SMALL_BYTES, Category, accepted_failure, ok
from trainmaster.server.doors.tinker import records
from trainmaster.server.doors.tinker.door import TinkerDoor
from trainmaster.server.doors.tinker.model_creation import LOOK_EVERY_S, with_known_name
from trainmaster.server.doors.tinker.records import TinkerSampler
from trainmaster.server.doors.tinker.router import AnsweredBy, answer, read_document
from trainmaster.server.doors.tinker.trainer_jobs import TrainerCancelledError, TrainerFailedError
from trainmaster.server.doors.tinker.wire import CreateSamplingSession
from trainmaster.server.doors.trainers import TrainerGoneError, location_of
from trainmaster.server.http.auth import Principal
from trainmaster.server.http.errors import ServiceNotReadyError, wrong
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.http.requests import parse_json, read_body

HOLD_S = 45.0
"""How long a sampling session's request is held while its trainer starts. Clients give up after 60 s, and may retry."""
_MOST_SAMPLES = 65_536


@answer(
    "POST", "/create_sampling_session", KeyScope.MANAGE, by=AnsweredBy.TRAINER, note="blocks while the trainer starts"
)
async def create_sampling_session(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    document = await read_document(request)
    wanted = parse(CreateSamplingSession, document)
    await door.sessions.require(principal.scope, wanted.session_id)
    base_model, mode, extra = wanted.base_model, ModelMode.LORA, {}
    if wanted.model_path is not None:
        found = await door.weights(principal.scope, wanted.model_path)
        base_model, mode = found.run.base_model, found.run.mode
        extra[SOURCE_HEADER] = location_of(door.context, found.checkpoint)
    if base_model is None:
        raise wrong("base_model", "required, or else model_path")
    deadline = time.monotonic() + HOLD_S
    while True:
        job = await _serving(door, principal, base_model, mode, deadline)
        trainer = Trainer(job.job_id, job.live.number)
        body = json.dumps(with_known_name(document, job)).encode()
        try:
            response = await door.trainers.pass_on(request, trainer, body, door=TINKER, extra=extra)
            sampler_id = _made(response) if response.status_code < 300 else None
            break
        except (TrainerGoneError, BrokenOffError):
            await _until_later(deadline, "the trainer broke off")
    if sampler_id is not None:
        sampler = TinkerSampler(
            sampler_id=sampler_id,
            account_id=principal.account_id,
            session_id=wanted.session_id,
            base_model=base_model,
            model_path=wanted.model_path,
            created_at=door.context.clock(),
        )
        await door.context.write(records.add_sampler, principal.scope, sampler)
        door.sessions.joined(wanted.session_id, trainer)
    return response


@answer("POST", "/asample", KeyScope.MANAGE, by=AnsweredBy.TRAINER)
async def asample(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    async with IncomingBody(request, principal.account_id) as body:
        sampler_id = await text_field(body, "sampling_session_id")
        trainer = await _trainer(door, principal, sampler_id)
        try:
            return await door.trainers.pass_on(request, trainer, await body.content(), door=TINKER)
        except TrainerGoneError as gone:
            message = await door.explain_loss(gone.message, principal.account_id, sampler_id)
            return accepted_failure(message, Category.SERVER, sample_sequence_ids=_sequence_ids(await body.whole()))


@answer("POST", "/retrieve_futures", KeyScope.VIEW, by=AnsweredBy.TRAINER)
async def retrieve_futures(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    body = await read_body(request, MAX_SMALL_BYTES)
    document = parse_json(body)
    target = document.get("target") if isinstance(document, dict) else None
    found = target.get("sampling_session_id") if isinstance(target, dict) else None
    sampler_id = plain_id(found, "target.sampling_session_id")
    return await door.trainers.pass_on(request, await _trainer(door, principal, sampler_id), body, door=TINKER)


@answer(
    "GET", "/samplers/{sampler_id}", KeyScope.VIEW, note="for samplers saved without a name: answered by the trainer"
)
async def get_sampler(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    sampler_id = str(request.path_params["sampler_id"])
    if (known := await door.context.read(records.find_sampler, principal.scope, sampler_id)) is None:
        return await door.trainers.pass_on(request, await _trainer(door, principal, sampler_id), b"", door=TINKER)
    return ok({"sampler_id": sampler_id, "base_model": known.base_model, "model_path": known.model_path})


async def _trainer(door: TinkerDoor, principal: Principal, sampler_id: str) -> Trainer:
    if (trainer := trainer_of_sampling_session(sampler_id)) is None:
        raise NotFoundError(f"there is no sampling session {sampler_id[:256]}")
    await door.trainers.require(principal.account_id, trainer.job_id)
    return trainer


async def _serving(door: TinkerDoor, principal: Principal, base_model: str, mode: ModelMode, deadline: float) -> Job:
    started: str | None = None
    while True:
        try:
            status = await run_in_threadpool(
                door.trainer_jobs.ensure,
                principal.scope,
                base_model,
                mode,
                created_by=principal.name,
                started_job=started,
            )
        except TrainerCancelledError:
            started = None  # by a session that did not know of this one
            await _until_later(deadline, "its trainer starts")
            continue
        except TrainerFailedError as error:
            raise RefusedError(error.message) from None
        if status.job is not None and status.ready:
            return status.job
        if status.job is not None and status.started:
            started = status.job.job_id
        await _until_later(
            deadline, f"its trainer, job {started}, is not ready yet" if started else "its trainer starts"
        )


def _made(response: Response) -> str:
    """The id of the new sampling session. Raises BrokenOffError where the response has none."""
    try:
        return str(json.loads(bytes(response.body))["sampling_session_id"])
    except (AttributeError, ValueError, TypeError, KeyError, RecursionError):
        raise BrokenOffError("the trainer's answer has no sampling session") from None


async def _until_later(deadline: float, why: str) -> None:
    if time.monotonic() > deadline:
        raise ServiceNotReadyError(why, retry_after_s=1)
    await asyncio.sleep(LOOK_EVERY_S)


def _sequence_ids(body: bytes) -> list[str]:
    """As many as samples were asked for: clients count them."""
    document: Any = parse_json(body)
    count = document.get("num_samples", 1)
    return [f"lost:{number}" for number in range(min(count, _MOST_SAMPLES) if isinstance(count, int) else 1)]
