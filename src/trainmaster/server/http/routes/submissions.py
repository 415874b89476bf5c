"""Submit and validate jobs: from the body of a request, and the tokens that it forwards, to a job on disk.

A request at the limits takes a tenth of a second to read and to compile. Large ones are handled in threads, a few at a
time, so that the event loop answers others meanwhile.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from trainmaster.protocol.secrets import SCAIATLAS_TOKEN, SCAIDRIVE_TOKEN
from trainmaster.schema.jobs import CheckedJob, SubmittedJob
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.http.auth import Principal, credential_of, guard, require
from trainmaster.server.http.context import ApiContext, context_of
from trainmaster.server.http.envelope import ok, resource
from trainmaster.server.http.requests import REPLAYED, idempotency_of, parse_json, read_body
from trainmaster.server.http.router import RawRoute, answers
from trainmaster.server.http.routes.blobs import blob_file
from trainmaster.server.http.token_exchange import MAX_TOKEN_LENGTH
from trainmaster.server.store import job_inputs

HEADERS = {SCAIDRIVE_TOKEN: "X-ScaiDrive-Token", SCAIATLAS_TOKEN: "X-ScaiAtlas-Token"}
"""The secret that each header becomes."""
FORWARDING_PARAMETERS: list[dict[str, Any]] = [
    {
        "name": header,
        "in": "header",
        "required": False,
        "description": "Your token for that service, kept encrypted until the job ends.",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_TOKEN_LENGTH, "pattern": r"^[!-~]+$"},
    }
    for header in HEADERS.values()
]

_TOKEN = re.compile(r"[!-~]+")


async def forwarded_tokens(request: Request, context: ApiContext) -> dict[str, str]:
    """The tokens that a request forwards to its job; missing ones come from the token exchange, if there is one.

    Raises:
        SpecError: a token is malformed.
        CredentialsRefusedError: the exchange refuses the caller's credential.
        ExchangeUnavailableError: the exchange does not answer.
    """
    tokens = {name: token for name, header in HEADERS.items() if (token := request.headers.get(header))}
    for name, token in tokens.items():
        if len(token) > MAX_TOKEN_LENGTH or not _TOKEN.fullmatch(token):
            message = f"must have at most {MAX_TOKEN_LENGTH} printable characters without spaces"
            raise SpecError([Problem(field=HEADERS[name], message=message)])
    if context.token_exchange is None or len(tokens) == len(HEADERS):
        return tokens
    missing = [name for name in HEADERS if name not in tokens]
    return {**tokens, **await context.token_exchange.tokens(credential_of(request), missing)}


T = TypeVar("T")

LARGE_BYTES = 32 << 10
"""Larger bodies take more than a few milliseconds; a thread costs a fraction of one."""
AT_ONCE = 2
"""Threads with large requests: they compete with the event loop for the interpreter."""


class Submissions:
    """Reads, checks and submits requests for new jobs. Belongs to one event loop."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def run(self, work: Callable[[], T], *, large: bool) -> T:
        """Work for a request: at once, or in a thread if the request is large."""
        if not large:
            return work()
        async with self._slots:
            return await run_in_threadpool(work)

    async def read(self, document: bytes, account_id: str) -> SubmitJobRequest:
        """The checked submission in a body.

        Raises:
            SpecError: the body holds none, or a wrong one.
            RefusedError: the request asks for something that is not available.
        """
        seed = new_seed()
        wanted = await self.run(lambda: parse_submit(parse_json(document), seed=seed), large=is_large(document))
        return await self._context.commands.admission.look_up(wanted, account_id)

    async def submit(
        self, request: Request, principal: Principal, wanted: SubmitJobRequest, *, document: bytes, large: bool
    ) -> Response:
        """Submit a checked request, with the body `document`; returns when the job is on disk."""
        tokens = await forwarded_tokens(request, self._context)
        idempotency = idempotency_of(request, document)
        submission = await self.run(
            lambda: self._context.commands.submit(
                principal.scope, wanted, created_by=principal.name, tokens=tokens, idempotency=idempotency
            ),
            large=large,
        )
        outcome = await asyncio.wrap_future(submission)
        job = outcome.job
        submitted = resource(
            SubmittedJob,
            job,
            message=f"job {job.handle or job.job_id} was accepted",
            estimated_wait_seconds=None,
            checkpoint_id=job.resume_checkpoint_id,
        )
        return ok(submitted, HTTPStatus.CREATED, REPLAYED if outcome.replayed else None)


def new_seed() -> int:
    """For a training that names none; it is stored with the job."""
    return secrets.randbelow(2**31)


def is_large(document: bytes) -> bool:
    return len(document) >= LARGE_BYTES


def submissions_of(request: Request) -> Submissions:
    submissions: Submissions = request.app.state.submissions
    return submissions


router = APIRouter(route_class=RawRoute, tags=["jobs"])


@router.post(
    "/jobs",
    status_code=HTTPStatus.CREATED,
    **answers(
        SubmittedJob, 400, 409, body=SubmitJobRequest, required=True, keyed=True, parameters=FORWARDING_PARAMETERS
    ),
)
@guard
async def submit(request: Request) -> Response:
    """Submit a job.

    The answer comes when the job is on disk; it is admitted, queued and run from then on, whatever happens.
    """
    principal = require(request, KeyScope.MANAGE)
    submissions = submissions_of(request)
    document = await read_body(request)
    wanted = await submissions.read(document, principal.account_id)
    return await submissions.submit(request, principal, wanted, document=document, large=is_large(document))


@router.post(
    "/jobs/validate",
    **answers(CheckedJob, 400, 409, body=SubmitJobRequest, required=True, parameters=FORWARDING_PARAMETERS),
)
@guard
async def validate(request: Request) -> Response:
    """See whether a job would be accepted, without submitting it, and which of its files have to be uploaded first.

    What is refused is refused as by a submission. Nothing is kept.
    """
    context = context_of(request)
    principal = require(request, KeyScope.MANAGE)
    submissions = submissions_of(request)
    document = await read_body(request)
    wanted = await submissions.read(document, principal.account_id)
    await forwarded_tokens(request, context)
    check = await submissions.run(
        lambda: context.commands.check(principal.scope, wanted, created_by=principal.name), large=is_large(document)
    )
    await asyncio.wrap_future(check)
    shipped = {file.sha256 for file in wanted.workload.files} if wanted.workload else set()
    missing = set(await context.read(lambda connection: job_inputs.missing_blobs(connection, principal.scope, shipped)))

    def lost() -> set[str]:
        return {each for each in shipped - missing if not blob_file(context, principal.account_id, each).exists()}

    return ok(CheckedJob(missing_blobs=sorted(missing | await run_in_threadpool(lost))))
