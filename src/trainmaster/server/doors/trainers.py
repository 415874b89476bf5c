"""Where trainers answer, and passing requests on to them.

A trainer is one attempt of a job. Whose it is never changes, and a connection that is open leads to it and to nothing
else: a request over one that was kept asks the database nothing. A new connection is only made to where the database
has said within the last second that it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection as Read
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trainmaster.server.core.errors import JobNotFoundError, NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.core.workloads.trainer_service import KIND
from trainmaster.server.http.proxy import Answer, BrokenOffError, Connection, Connections, Headers
from trainmaster.server.doors.tinker.names import Trainer
from trainmaster.server.http.activity import Activity
from trainmaster.server.http.context import ApiContext
from trainmaster.server.store import accounts, jobs
from trainmaster.server.store.scope import Scope as StoreScope

_log = logging.getLogger(__name__)

FRESH_S = 1.0
"""How old what the database said of a job may be, to open a connection by it."""
MOST_REMEMBERED = 16_384
DOOR = b"x-trainmaster-door"
TINKER = b"tinker"
SOURCE = b"x-trainmaster-source"
REFUSAL = b"x-trainmaster-refusal"
OURS = b"x-trainmaster-"
"""How headers begin that only the server may set."""
_STAYS = frozenset(
    (
        b"authorization",
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-api-key",
        b"x-tinker-weights-access-token",
    )
)
"""Of a request: about one connection, or a secret. The body's length is said anew."""
_NOT_BACK = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server"))
_WHOLE_BYTES = 256 << 10
"""An answer of up to this length is sent as one piece."""


class TrainerGoneError(NotFoundError):
    """The trainer has ended; what it held is gone."""

    code = "TRAINER_GONE"

    def __init__(self, trainer: Trainer, job: Job | None) -> None:
        super().__init__(_how_it_ended(trainer, job))
        self.trainer = trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    at: float
    job: Job | None
    uid: int | None = None
    """As whom the jobs of its account run, where it has a user of its own."""


class Trainers:
    """Reaches trainers. Belongs to one event loop."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._activity = Activity(context)
        self._connections = Connections()
        self._urgent = Connections()
        """Of heartbeats alone: they must not stand in line behind a burst that takes all that are open."""
        self._owners: dict[str, str] = {}
        self._seen: dict[str, _Seen] = {}
        self._looks: dict[str, asyncio.Task[_Seen]] = {}

    def close(self) -> None:
        """Let go of all connections that nobody uses."""
        self._connections.close()
        self._urgent.close()

    async def require(self, account_id: str, job_id: str) -> None:
        """See that a job is an account's, and a trainer: what other services answer is no business of the doors.

        Raises:
            NotFoundError: it is not.
        """
        owner = self._owners.get(job_id)
        if owner is None:
            job = (await self._look(job_id)).job
            owner = job.account_id if job is not None and job.workload_kind == KIND else None
        if owner != account_id:
            raise JobNotFoundError(f"there is no job {job_id}")

    def touch(self, job_id: str) -> None:
        """A job was used."""
        with self._activity.use(job_id):
            pass

    async def ask(
        self,
        trainer: Trainer,
        method: str,
        target: bytes,
        headers: Headers,
        body: AsyncIterator[bytes] | bytes = b"",
        *,
        use: contextlib.ExitStack | None = None,
        door: bytes = TINKER,
        counts: bool = True,
        urgent: bool = False,
    ) -> Answer:
        """Send a request to a trainer; `use` is where its use ends, or else with the head of the answer.

        `door` is what clients came by, `counts` whether it is use of the trainer at all, and `urgent` whether it goes
        past all others.

        Raises:
            TrainerGoneError: that attempt does not run any more.
            BrokenOffError: it does not answer now.
        """
        with contextlib.ExitStack() as within:
            if counts:
                (use or within).enter_context(self._activity.use(trainer.job_id))
            whole = [*headers, (DOOR, door)]
            pool = self._urgent if urgent else self._connections
            kept = pool.kept(trainer)
            if kept is not None:
                try:
                    return await pool.exchange(kept, method, target, whole, body)
                except BrokenOffError:
                    # It may have been closed just now. Trainers carry out what they are sent twice once.
                    if not isinstance(body, bytes):
                        raise
            return await pool.exchange(await self._open(trainer, pool), method, target, whole, body)

    async def pass_on(
        self,
        request: Request,
        trainer: Trainer,
        body: AsyncIterator[bytes] | bytes,
        *,
        extra: Mapping[bytes, bytes] | None = None,
        target: bytes | None = None,
        door: bytes = TINKER,
        counts: bool = True,
        urgent: bool = False,
    ) -> Response:
        """The answer of a trainer to a client's request; `target` is the path there, where it is another one.

        Raises:
            TrainerGoneError: that attempt does not run any more.
            BrokenOffError: it does not answer now.
        """
        headers = onward_headers(request, body)
        headers += (extra or {}).items()
        with contextlib.ExitStack() as use:
            whither = target_of(request) if target is None else target
            answer = await self.ask(
                trainer, request.method, whither, headers, body, use=use, door=door, counts=counts, urgent=urgent
            )
            if answer.length is not None and answer.length <= _WHOLE_BYTES:
                response = Response(await answer.body(), status_code=answer.status)
                response.raw_headers = _back_headers(answer.headers)
                return response
            return _Streamed(answer, use.pop_all())

    async def _open(self, trainer: Trainer, pool: Connections) -> Connection:
        try:
            return await pool.open(trainer, *await self._address(trainer))
        except BrokenOffError:
            # It may have ended since it was last looked at.
            self._seen.pop(trainer.job_id, None)
            await self._address(trainer)
            raise

    async def _address(self, trainer: Trainer) -> tuple[str, str, int | None]:
        """Where it answers, the token that its ranks hold, and the uid as which they run, where its account has one."""
        seen = await self._look(trainer.job_id)
        job = seen.job
        if job is None or job.attempt is None or job.attempt.number != trainer.attempt:
            raise TrainerGoneError(trainer, job)
        if job.endpoint is None:
            raise BrokenOffError(f"the trainer of job {job.job_id} does not answer yet")
        return job.endpoint, job.attempt.rank_token, seen.uid

    async def _look(self, job_id: str) -> _Seen:
        """The job as it was within the last second; those who ask at the same time share one look."""
        seen = self._seen.get(job_id)
        if seen is not None and time.monotonic() - seen.at < FRESH_S:
            return seen
        look = self._looks.get(job_id)
        if look is None:
            look = self._looks[job_id] = asyncio.ensure_future(self._read(job_id))
            look.add_done_callback(lambda _: self._looks.pop(job_id, None))
        return await asyncio.shield(look)

    async def _read(self, job_id: str) -> _Seen:
        at = time.monotonic()

        def question(connection: Read) -> _Seen:
            everything = StoreScope.everything()
            try:
                job = jobs.get(connection, everything, job_id, deleted=True)
                return _Seen(at=at, job=job, uid=accounts.get(connection, everything, job.account_id).uid)
            except NotFoundError:
                return _Seen(at=at, job=None)

        seen = await self._context.read(question)
        job = seen.job
        for memory in (self._owners, self._seen):
            if len(memory) >= MOST_REMEMBERED:
                memory.clear()
        self._seen[job_id] = seen
        if job is not None and job.workload_kind == KIND:
            self._owners[job_id] = job.account_id
        return seen


class _Streamed(Response):
    """A trainer's answer, passed on as it comes; `use` is closed when it is through."""

    def __init__(self, answer: Answer, use: contextlib.ExitStack) -> None:
        self._answer = answer
        self._use = use
        self.status_code = answer.status
        self.background = None
        self.raw_headers = _back_headers(answer.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - as every response
        """Send it. When the trainer breaks off in the middle, so do we: half an answer must not look whole."""
        with self._use:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async with contextlib.aclosing(self._answer.pieces()) as pieces:
                    async for piece in pieces:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
            except BrokenOffError as error:
                _log.info("job %s: %s", self._answer.connection.trainer.job_id, error)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def onward_headers(request: Request, body: AsyncIterator[bytes] | bytes) -> Headers:
    """The headers of a client's request that are a trainer's business."""
    headers = [
        (name, value) for name, value in request.scope["headers"] if name not in _STAYS and not name.startswith(OURS)
    ]
    length = request.headers.get("content-length")
    if not isinstance(body, bytes) and length is not None:
        headers.append((b"content-length", length.encode()))
    return [*headers, (b"host", b"trainer")]


def target_of(request: Request) -> bytes:
    """The path and the query of a client's request, as they were written."""
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    query: bytes = request.scope["query_string"]
    return raw.partition(b"?")[0] + (b"?" + query if query else b"")


def _back_headers(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name not in _NOT_BACK]


def _how_it_ended(trainer: Trainer, job: Job | None) -> str:
    if job is None or job.deleted_at is not None:
        return f"the trainer, job {trainer.job_id}, was deleted"
    if job.attempt is not None or job.attempt_count > trainer.attempt:
        return f"the trainer, job {job.job_id}, was started again since (attempt {job.attempt_count})"
    why = ": ".join(part for part in (job.reason, job.message) if part)
    return f"the trainer, job {job.job_id}, is {job.status}" + (f" ({why})" if why else "")
