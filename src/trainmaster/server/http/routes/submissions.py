"""Submissions: from the body of a request, and the tokens that it forwards, to a job on disk.

A request at the limits takes a tenth of a second to read and to compile. Large ones are handled in threads, a few at a
time, so that the event loop answers others meanwhile.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from trainmaster.protocol.secrets import SCAIATLAS_TOKEN, SCAIDRIVE_TOKEN
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.job import Job
from trainmaster.server.core.spec.parse import parse_submit
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.http.auth import Principal, credential_of
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.envelope import Wire, ok
from trainmaster.server.http.requests import idempotency_of, parse_json
from trainmaster.server.http.token_exchange import MAX_TOKEN_LENGTH

HEADERS = {SCAIDRIVE_TOKEN: "X-ScaiDrive-Token", SCAIATLAS_TOKEN: "X-ScaiAtlas-Token"}
"""The secret that each header becomes."""
FORWARDING_PARAMETERS: list[dict[str, Any]] = [
    {
        "name": header,
        "in": "header",
        "required": False,
        "description": "Your token for that service, kept sealed until the job ends.",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_TOKEN_LENGTH, "pattern": r"^[!-~]+$"},
    }
    for header in HEADERS.values()
]

_TOKEN = re.compile(r"[!-~]+")


async def forwarded_tokens(request: Request, context: ApiContext) -> dict[str, str]:
    """The tokens that a request passes on to its job; those that it lacks are exchanged for, where that is set up.

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

REPLAYED = {"Idempotent-Replayed": "true"}
LARGE_BYTES = 32 << 10
"""A body from this size on takes more than a few milliseconds; a thread costs a fraction of one."""
AT_ONCE = 2
"""Threads with large requests: they compete with the event loop for the interpreter."""


class SubmittedJob(Wire):
    """A job that was accepted."""

    job_id: str
    handle: str | None
    name: str
    status: str
    message: str
    estimated_wait_seconds: float | None
    checkpoint_id: str | None = Field(description="What it will go on from.")


def submitted_job(job: Job) -> SubmittedJob:
    """The answer to a submission."""
    return SubmittedJob(
        job_id=job.job_id,
        handle=job.handle,
        name=job.name,
        status=job.status,
        message=f"job {job.handle or job.job_id} was accepted",
        estimated_wait_seconds=None,
        checkpoint_id=job.resume_checkpoint_id,
    )


class Submissions:
    """Reads, checks and submits requests for new jobs. Belongs to one event loop."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def run(self, work: Callable[[], T], *, large: bool) -> T:
        """Do a piece of work for a request: at once, or in a thread where the request is large."""
        if not large:
            return work()
        async with self._slots:
            return await run_in_threadpool(work)

    async def read(self, document: bytes, account_id: str) -> SubmitJobRequest:
        """The checked request that a body holds.

        Raises:
            SpecError: the body holds none, or a wrong one.
            RefusedError: the request asks for something that is not available.
        """
        wanted = await self.run(lambda: parse_submit(parse_json(document)), large=is_large(document))
        return await self.check(wanted, account_id)

    async def check(self, wanted: SubmitJobRequest, account_id: str) -> SubmitJobRequest:
        """Check what takes a process or reads files: the source of a function, and a base model, which is looked up.

        Raises:
            SpecError: one of them is wrong.
        """
        await self._context.sources.check(wanted, account_id)
        return await self._context.models.looked_up(wanted, account_id)

    async def submit(
        self, request: Request, principal: Principal, wanted: SubmitJobRequest, *, document: bytes, large: bool
    ) -> Response:
        """Submit what was read; the answer comes when the job is on disk. `document` is the body of the request."""
        tokens = await forwarded_tokens(request, self._context)
        idempotency = idempotency_of(request, document)
        submission = await self.run(
            lambda: self._context.commands.submit(
                principal.scope, wanted, created_by=principal.name, tokens=tokens, idempotency=idempotency
            ),
            large=large,
        )
        outcome = await asyncio.wrap_future(submission)
        return ok(submitted_job(outcome.job), HTTPStatus.CREATED, REPLAYED if outcome.replayed else None)


def is_large(document: bytes) -> bool:
    """Whether a request of this body belongs into a thread."""
    return len(document) >= LARGE_BYTES


def submissions_of(request: Request) -> Submissions:
    """Those of the application that got the request."""
    submissions: Submissions = request.app.state.submissions
    return submissions
