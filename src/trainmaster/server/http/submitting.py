"""New jobs: the way from the body of a request to a job on disk, which a submission, a clone and a check share.

A request at the limits takes a tenth of a second to read and to compile. Large ones are handled in threads, a few at a
time, so that the event loop answers others meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from trainmaster.server.core.spec import SubmitJobRequest, parse_submit
from trainmaster.server.http.auth import Principal
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.envelope import ok
from trainmaster.server.http.forwarded_tokens import forwarded_tokens
from trainmaster.server.http.requests import idempotency_of, parse_json
from trainmaster.server.http.wire.commands import submitted_job

T = TypeVar("T")

REPLAYED = {"Idempotent-Replayed": "true"}
LARGE_BYTES = 32 << 10
"""A body from this size on takes more than a few milliseconds; a thread costs a fraction of one."""
AT_ONCE = 2
"""Threads with large requests: they compete with the event loop for the interpreter."""


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
