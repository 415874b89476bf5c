"""The gateway: `/v1/jobs/{id}/proxy/...` is the service that the job is; a request counts as use to its last byte."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import ConflictError
from trainmaster.server.core.job import Job
from trainmaster.server.core.states import ACTIVE, WAITING, Desired
from trainmaster.server.http.auth import credential_of, guard, require
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import REQUEST_ID, request_id_of
from trainmaster.server.http.errors import BadGatewayError, ServiceNotReadyError
from trainmaster.server.http.proxy import (
    BrokenOffError,
    Connections,
    Headers,
    ServiceResponse,
    forwarded_headers,
    target_of,
)
from trainmaster.server.http.requests import ALIAS, PREFIX, pieces_of
from trainmaster.server.http.router import JobId
from trainmaster.server.store import accounts, jobs
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)

router = APIRouter(prefix=PREFIX, tags=["gateway"])

T = TypeVar("T")

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
RETRY_AFTER_S = 2
"""A service that is on its way may take longer; asking again costs nothing."""
WRITE_USE_EVERY_S = 1.0
"""Small against any sensible time after which a service is parked for want of use."""
_CLIENT_GONE = 499
"""Nobody will read it; it is there for the access log."""
_ADDRESS = re.compile(rf"(?:{PREFIX}{ALIAS}|{PREFIX})/jobs/[^/]+/proxy(?P<rest>/.*)?".encode(), re.DOTALL)
_BODY_HEADERS = frozenset((b"content-length", b"transfer-encoding"))
"""A request has a body if it has one of these."""


@router.api_route(
    "/jobs/{job_id}/proxy/{path:path}",
    methods=METHODS,
    include_in_schema=False,  # what lies behind it is not ours to describe
)
@router.api_route("/jobs/{job_id}/proxy", methods=METHODS, include_in_schema=False)
@guard
async def proxy(request: Request, context: Context, job_id: JobId) -> Response:
    principal = require(request, KeyScope.VIEW if request.method in SAFE_METHODS else KeyScope.MANAGE)

    def find(connection: Connection) -> tuple[Job, int | None]:
        job = jobs.get(connection, principal.scope, job_id)
        return job, accounts.get(connection, principal.scope, job.account_id).uid

    job, uid = await context.read(find)
    gateway: Gateway = request.app.state.gateway
    return await gateway.forward(request, job, uid)


class Gateway:
    """Passes requests on to services. Belongs to one event loop."""

    def __init__(self, context: ApiContext) -> None:
        self._activity = Activity(context)
        self._connections = Connections()

    async def forward(self, request: Request, job: Job, uid: int | None) -> Response:
        """The response of a service; `uid` is that of its account, where it has one."""
        address = dial(job)
        with contextlib.ExitStack() as use:
            use.enter_context(self._activity.use(job.job_id))
            if (response := await self._exchange(request, job, address, uid)) is None:
                return Response(status_code=_CLIENT_GONE)
            return StreamedResponse(response, use.pop_all(), job.job_id)

    async def _exchange(self, request: Request, job: Job, address: str, uid: int | None) -> ServiceResponse | None:
        """The head of the service's response; None when the client left before."""
        has_body = not _BODY_HEADERS.isdisjoint(name for name, _ in request.scope["headers"])
        sent_all = asyncio.Event()
        if not has_body:
            sent_all.set()

        async def pieces() -> AsyncIterator[bytes]:
            # At any rate: a service may take what its client makes bit by bit.
            async for piece in pieces_of(request, slowest_bytes_per_s=0):
                yield piece
            sent_all.set()

        async def departure() -> None:
            await sent_all.wait()
            await disconnected(request.receive)

        async def send() -> ServiceResponse:
            body = pieces() if has_body else None
            # Not a kept one: the next process at the same port may be another service.
            token = job.attempt.rank_token if job.attempt else ""
            connection = await self._connections.open(None, address, token, uid)
            headers = _headers(request, address, forwarded_headers(request, body))
            target = target_of(request, _ADDRESS)
            # Without a time limit: a training step may well take an hour.
            return await self._connections.exchange(connection, request.method, target, headers, body)

        try:
            return await _unless(departure(), send())
        except ClientDisconnect:
            return None
        except BrokenOffError as error:
            raise BadGatewayError(f"job {job.job_id}: {error}") from None


def dial(job: Job) -> str:
    """Where the service of a job answers, as host:port."""
    if not job.is_service:
        raise ConflictError(f"job {job.job_id} is no service: its workload is of kind '{job.workload_kind}'")
    if job.endpoint is not None:
        return job.endpoint
    if job.desired is Desired.RUN and job.status in WAITING | ACTIVE:
        raise ServiceNotReadyError(
            f"the service is {job.status} and not ready yet; try again soon", retry_after_s=RETRY_AFTER_S
        )
    raise ServiceNotReadyError(f"the service is {job.status}; resume it to use it", retry_after_s=None)


def _headers(request: Request, address: str, given: Headers) -> Headers:
    """The headers of the request to a service: the client's without our credential, and those of a proxy."""
    scope = request.scope
    client = scope.get("client")
    forwarded = {
        "host": address,
        "x-forwarded-host": request.headers.get("host", ""),
        "x-forwarded-proto": scope["scheme"],
        "x-forwarded-prefix": f"{PREFIX}/jobs/{request.path_params['job_id']}/proxy",
        "x-forwarded-for": client[0] if client else "",
        REQUEST_ID.lower(): request_id_of(request),
        "connection": "close",
    }
    own = [(name.encode(), value.encode("latin-1", "replace")) for name, value in forwarded.items()]
    credential = credential_of(request).encode("latin-1", "replace")
    kept = [
        (name, value)
        for name, value in given
        if name.decode("latin-1") not in forwarded and not (name == b"authorization" and credential in value)
    ]
    return kept + own


class StreamedResponse(Response):
    """A service's response, passed on as it comes; `use` is closed at its end."""

    def __init__(self, response: ServiceResponse, use: contextlib.ExitStack, job_id: str) -> None:
        self._response = response
        self._use = use
        self._job_id = job_id
        self.status_code = response.status
        self.background = None
        self.raw_headers = response.headers

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - as every response
        """Send it. Where the service breaks off in the middle, so does this: half a response must not look whole."""
        try:
            await _unless(disconnected(receive), self._pass_on(send))
        except BrokenOffError as error:
            _log.info("the service of job %s broke off in the middle of a response: %s", self._job_id, error)
        finally:
            self._response.close()
            self._use.close()

    async def _pass_on(self, send: Send) -> None:
        async with contextlib.aclosing(self._response.pieces()) as pieces:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless(leaves: Awaitable[None], work: Awaitable[T]) -> T | None:
    """The result of `work`; None when the client `leaves` before. Both have ended afterwards."""
    leaving, working = asyncio.ensure_future(leaves), asyncio.ensure_future(work)
    try:
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (leaving, working):
            task.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Wait until the client is gone; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Activity:
    """Records when services were used: in memory, written every second while one is. Belongs to one event loop."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._in_flight: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        self._due: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def use(self, job_id: str) -> Iterator[None]:
        """A service is in use until this ends, however long that takes."""
        self._in_flight[job_id] += 1
        self._touch(job_id)
        try:
            yield
        finally:
            self._in_flight[job_id] -= 1
            if not self._in_flight[job_id]:
                del self._in_flight[job_id]
            self._touch(job_id)

    def _touch(self, job_id: str) -> None:
        self._used[job_id] = self._context.clock()
        if self._due is None:
            # The first use after a pause is written at once, so that nobody parks the service meanwhile.
            self._write()

    def _again(self) -> None:
        self._due = None
        self._used.update(dict.fromkeys(self._in_flight, self._context.clock()))
        if self._used:
            self._write()

    def _write(self) -> None:
        used, self._used = self._used, {}

        def work(connection: Connection) -> None:
            for job_id, at in used.items():
                jobs.record_use(connection, Scope.everything(), job_id, at)

        self._due = asyncio.get_running_loop().call_later(WRITE_USE_EVERY_S, self._again)
        self._context.database.write(work).add_done_callback(_report)


def _report(written: Future[None]) -> None:
    if not written.cancelled() and (error := written.exception()) is not None:
        _log.warning("the use of services could not be recorded: %s", error)
