"""Sampling. The id of a sampling session says which trainer has it: to sample, nothing is looked up."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import NotFoundError, Problem, RefusedError, SpecError
from trainmaster.server.core.job import Job
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.core.workloads.trainer_service import Mode
from trainmaster.server.doors.tinker import records
from trainmaster.server.doors.bodies import Body, plain_id, text_field
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.doors.tinker.door import TinkerDoor
from trainmaster.server.doors.tinker.model_creation import LOOK_EVERY_S, for_names_of
from trainmaster.server.doors.tinker.names import Category, TinkerSampler, Trainer, trainer_of_sampler
from trainmaster.server.doors.tinker.router import MAX_SMALL_BYTES, By, accepted_failure, answer, ok, read_document
from trainmaster.server.doors.tinker.trainer_jobs import TrainerFailedError, TrainerLetGoError
from trainmaster.server.doors.trainers import SOURCE, TrainerGoneError
from trainmaster.server.doors.tinker.wire import CreateSamplingSession
from trainmaster.server.http.auth import Principal
from trainmaster.server.http.errors import ServiceNotReadyError
from trainmaster.server.http.requests import parse_json, read_body

HOLD_S = 45.0
"""How long the request for a sampling session is held while its trainer starts; clients give up after 60 s, and ask
ten times more when they are told to."""
_MOST_SAMPLES = 65_536


@answer(
    "POST",
    "/create_sampling_session",
    KeyScope.MANAGE,
    by=By.TRAINER,
    note="held while the trainer starts",
)
async def create_sampling_session(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """A sampling session of a base model or of saved weights."""
    document = await read_document(request)
    wanted = parse(CreateSamplingSession, document)
    await door.sessions.require(principal.scope, wanted.session_id)
    base_model, mode, extra = wanted.base_model, Mode.LORA, {}
    if wanted.model_path is not None:
        found = await door.weights(principal.scope, wanted.model_path)
        base_model, mode = found.run.base_model, found.run.mode
        extra[SOURCE] = door.source(found.checkpoint).encode()
    if base_model is None:
        raise SpecError([Problem(field="base_model", message="required, or else model_path")])
    deadline = time.monotonic() + HOLD_S
    while True:
        job = await _serving(door, principal, base_model, mode, deadline)
        trainer = Trainer(job.job_id, job.live.number)
        body = json.dumps(for_names_of(document, job)).encode()
        try:
            response = await door.trainers.pass_on(request, trainer, body, extra=extra)
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
        await door.context.write(lambda connection: records.add_sampler(connection, principal.scope, sampler))
        door.sessions.joined(wanted.session_id, trainer)
    return response


@answer("POST", "/asample", KeyScope.MANAGE, by=By.TRAINER)
async def asample(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """Sample."""
    async with Body(request, principal.account_id) as body:
        sampler_id = await text_field(body, "sampling_session_id")
        trainer = await _trainer(door, principal, sampler_id)
        try:
            return await door.trainers.pass_on(request, trainer, await body.content())
        except TrainerGoneError as gone:
            message = await door.epitaph(gone, principal.account_id, sampler_id)
            return accepted_failure(message, Category.SERVER, sample_sequence_ids=_sequence_ids(await body.whole()))


@answer("POST", "/retrieve_futures", KeyScope.VIEW, by=By.TRAINER)
async def retrieve_futures(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """Which samples of a sampling session are done."""
    body = await read_body(request, MAX_SMALL_BYTES)
    document = parse_json(body)
    target = document.get("target") if isinstance(document, dict) else None
    found = target.get("sampling_session_id") if isinstance(target, dict) else None
    sampler_id = plain_id(found, "target.sampling_session_id")
    return await door.trainers.pass_on(request, await _trainer(door, principal, sampler_id), body)


@answer("GET", "/samplers/{sampler_id}", KeyScope.VIEW, note="of what was saved without a name by the trainer")
async def get_sampler(request: Request, door: TinkerDoor, principal: Principal) -> Response:
    """What a sampling session samples from."""
    sampler_id = str(request.path_params["sampler_id"])
    known = await door.context.read(lambda connection: records.find_sampler(connection, principal.scope, sampler_id))
    if known is None:
        return await door.trainers.pass_on(request, await _trainer(door, principal, sampler_id), b"")
    return ok({"sampler_id": sampler_id, "base_model": known.base_model, "model_path": known.model_path})


async def _trainer(door: TinkerDoor, principal: Principal, sampler_id: str) -> Trainer:
    trainer = trainer_of_sampler(sampler_id)
    if trainer is None:
        raise NotFoundError(f"there is no sampling session {sampler_id[:256]}")
    await door.trainers.require(principal.account_id, trainer.job_id)
    return trainer


async def _serving(door: TinkerDoor, principal: Principal, base_model: str, mode: Mode, deadline: float) -> Job:
    """The job of a trainer that answers, once there is one."""
    begun: str | None = None
    while True:
        try:
            standing = await run_in_threadpool(
                door.supply.stand, principal.scope, base_model, mode, created_by=principal.name, begun_job=begun
            )
        except TrainerLetGoError:
            begun = None  # by a session that did not know of this one
            await _until_later(deadline, "its trainer starts")
            continue
        except TrainerFailedError as error:
            raise RefusedError(error.message) from None
        if standing.job is not None and standing.ready:
            return standing.job
        if standing.job is not None and standing.begun:
            begun = standing.job.job_id
        await _until_later(deadline, f"its trainer, job {begun}, is not ready yet" if begun else "its trainer starts")


def _made(response: Response) -> str:
    """The id of the sampling session that a trainer made.

    Raises:
        BrokenOffError: its answer has none.
    """
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
