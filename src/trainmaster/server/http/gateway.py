"""The gateway: what is sent to `/v1/jobs/{id}/proxy/...` reaches the service that the job is.

Bodies flow through in both directions as they come. Our own credentials stay here. A request counts as use of the
service from its first byte to the last one of its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import httpx
from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from trainmaster.protocol.addresses import stranger_at
from trainmaster.protocol.environment import TOKEN_HEADER
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import ConflictError
from trainmaster.server.core.job import Job
from trainmaster.server.core.states import ACTIVE, WAITING, Desired
from trainmaster.server.http.activity import Activity
from trainmaster.server.http.auth import credential_of, guard, require
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import REQUEST_ID, request_id_of
from trainmaster.server.http.errors import BadGatewayError, ServiceNotReadyError
from trainmaster.server.http.requests import ALIAS, PREFIX, pieces_of
from trainmaster.server.http.router import JobId
from trainmaster.server.store import accounts, jobs

_log = logging.getLogger(__name__)

router = APIRouter(tags=["gateway"])

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
RETRY_AFTER_S = 2
"""A service that is on its way may take longer; asking again costs nothing."""
CONNECT_TIMEOUT_S = 5.0
STATUSES = range(200, 600)
"""What an answer may have; the server cannot send others."""
_WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)
_CLIENT_GONE = 499
"""Nobody will read it; it is there for the access log."""

_ADDRESS = re.compile(rf"(?:{PREFIX}{ALIAS}|{PREFIX})/jobs/[^/]+/proxy(?P<rest>/.*)?".encode(), re.DOTALL)
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""About one connection, and not to be passed on to the next."""
OURS = b"x-trainmaster-"
"""How headers begin that only the server may set."""
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
    """Pass a request on to the service that a job is."""
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
        self._client: httpx.AsyncClient | None = None

    async def forward(self, request: Request, job: Job, uid: int | None) -> Response:
        """The answer of a service; `uid` is that of its account, where it has one.

        Raises:
            ConflictError: the job is no service.
            ServiceNotReadyError: it does not answer now.
            BadGatewayError: it broke off before it answered, its answer is not HTTP, or somebody else has its port.
            StalledError: the rest of the request's body does not come.
        """
        host = dial(job)
        with contextlib.ExitStack() as use:
            use.enter_context(self._activity.use(job.job_id))
            answer = await self._exchange(request, job, host, uid)
            if answer is None:
                return Response(status_code=_CLIENT_GONE)
            if answer.status_code not in STATUSES:
                await answer.aclose()
                raise BadGatewayError(f"the service of job {job.job_id} answered with the status {answer.status_code}")
            return _Answer(answer, use.pop_all(), job.job_id)

    async def _exchange(self, request: Request, job: Job, host: str, uid: int | None) -> httpx.Response | None:
        """The beginning of the service's answer; None when the client left before."""
        sent_all = asyncio.Event()
        has_body = not _BODY_HEADERS.isdisjoint(name for name, _ in request.scope["headers"])
        if not has_body:
            sent_all.set()
        onward = httpx.Request(
            request.method,
            _target(host, request),
            headers=_onward_headers(request, job, host),
            content=_body(request, sent_all) if has_body else None,
            # Only the connection has a time limit: a training step may well take an hour.
            extensions={
                "timeout": httpx.Timeout(None, connect=CONNECT_TIMEOUT_S).as_dict(),
                "trace": functools.partial(_refuse_strangers, uid),
            },
        )
        sending = asyncio.ensure_future(self._send(onward))
        leaving = asyncio.ensure_future(_departure(request, sent_all))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return await sending if sending.done() else None
        except ClientDisconnect:
            return None
        except httpx.TransportError as error:
            raise BadGatewayError(
                f"the service of job {job.job_id} broke off: {error or type(error).__name__}"
            ) from None
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send(self, onward: httpx.Request) -> httpx.Response:
        if self._client is None:
            # Connections are not kept: the next one at the same port may be another service.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self._client = httpx.AsyncClient(limits=limits, trust_env=False, follow_redirects=False)
        return await self._client.send(onward, stream=True)


async def _refuse_strangers(uid: int | None, event: str, info: dict[str, Any]) -> None:
    """Give up a new connection, before anything is sent, where another user than the service's has its port."""
    if event == "connection.connect_tcp.complete":
        stream = info["return_value"]
        peer, own = (stream.get_extra_info(name) for name in ("server_addr", "client_addr"))
        if (stranger := stranger_at(peer[:2], own[:2], uid)) is not None:
            await stream.aclose()
            raise httpx.ConnectError(f"its port is taken by uid {stranger}")


def dial(job: Job) -> str:
    """Where the service of a job answers, as host:port.

    Raises:
        ConflictError: the job is no service.
        ServiceNotReadyError: it does not answer now.
    """
    if not job.is_service:
        raise ConflictError(f"job {job.job_id} is no service: its workload is of kind '{job.workload_kind}'")
    if job.endpoint is not None:
        return job.endpoint
    if job.desired is Desired.RUN and job.status in WAITING | ACTIVE:
        raise ServiceNotReadyError(
            f"the service is {job.status} and not ready yet; try again soon", retry_after_s=RETRY_AFTER_S
        )
    raise ServiceNotReadyError(f"the service is {job.status}; resume it to use it", retry_after_s=None)


class _Answer(Response):
    """A service's answer, passed on as it comes; `use` is closed when it is through."""

    def __init__(self, answer: httpx.Response, use: contextlib.ExitStack, job_id: str) -> None:
        self._answer = answer
        self._use = use
        self._job_id = job_id
        self.status_code = answer.status_code
        self.background = None
        left_out = _HOP_BY_HOP | _named_by_connection(answer.headers.raw) | {b"date"}
        if "transfer-encoding" in answer.headers or answer.status_code in _WITHOUT_BODY:
            left_out |= {b"content-length"}  # it is not the length of what follows
        self.raw_headers = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in left_out]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - as every response
        """Send it. When the service breaks off in the middle, so do we: half an answer must not look whole."""
        passing = asyncio.ensure_future(self._pass_on(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                await passing
        except httpx.TransportError as error:
            _log.info("the service of job %s broke off in the middle of an answer: %r", self._job_id, error)
        finally:
            for task in (passing, leaving):
                task.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)
            self._use.close()
            await asyncio.shield(self._answer.aclose())

    async def _pass_on(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._answer.aiter_raw():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _body(request: Request, sent_all: asyncio.Event) -> AsyncIterator[bytes]:
    # At any rate: a service may take what its client makes bit by bit.
    async for piece in pieces_of(request, slowest_bytes_per_s=0):
        yield piece
    sent_all.set()


async def _departure(request: Request, sent_all: asyncio.Event) -> None:
    """Wait until the client leaves; its body is somebody else's to read first."""
    await sent_all.wait()
    await _disconnected(request.receive)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _target(host: str, request: Request) -> httpx.URL:
    # The path goes on as it was written: what is escaped in it may mean something to the service.
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    match = _ADDRESS.fullmatch(raw.partition(b"?")[0])
    path = (match["rest"] if match else None) or b"/"
    query = request.scope["query_string"]
    return httpx.URL(f"http://{host}", raw_path=path + (b"?" + query if query else b""))


def _onward_headers(request: Request, job: Job, host: str) -> list[tuple[bytes, bytes]]:
    scope = request.scope
    named = _named_by_connection(scope["headers"])
    credential = credential_of(request).encode("latin-1", "replace")
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in _HOP_BY_HOP | named | {b"host", b"x-api-key"}
        # What trainers are told by the server, nobody else may tell them.
        and not name.startswith(OURS)
        and not (name == b"authorization" and credential in value)
    ]
    client = scope.get("client")
    address = PREFIX + "/jobs/" + str(request.path_params["job_id"]) + "/proxy"
    forwarded = {
        "Host": host,
        "X-Forwarded-Host": request.headers.get("host", ""),
        "X-Forwarded-Proto": scope["scheme"],
        "X-Forwarded-Prefix": address,
        "X-Forwarded-For": client[0] if client else "",
        REQUEST_ID: request_id_of(request),
        TOKEN_HEADER: job.attempt.rank_token if job.attempt else "",
    }
    ours = {name.lower().encode() for name in forwarded}
    headers = [(name, value) for name, value in headers if name not in ours]
    return headers + [(name.encode(), value.encode("latin-1", "replace")) for name, value in forwarded.items()]


def _named_by_connection(headers: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    return frozenset(
        option.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for option in value.split(b",")
    )
