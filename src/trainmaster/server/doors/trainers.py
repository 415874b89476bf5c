"""Reaching trainers: which process answers for an attempt, and passing requests on to it.

A trainer is one attempt of a job. Its owner never changes, and an open connection leads to that process and no other.
So a request over a kept connection reads nothing from the database. A new connection is only made to an address that
the database had within the last second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection as Read
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from trainmaster.protocol.attempt_files import is_url
from trainmaster.protocol.trainer_requests import DOOR_HEADER, REFUSAL_HEADER, SOURCE_HEADER, Trainer
from trainmaster.server.core.errors import JobNotFoundError, NotFoundError
from trainmaster.server.core.job import CheckpointRecord, Job
from trainmaster.server.core.workloads.trainer_service import KIND
from trainmaster.server.http import proxy
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.gateway import Activity, StreamedResponse
from trainmaster.server.storage import ARTIFACTS, URI, Roots, checkpoints_path, run_directory
from trainmaster.server.store import accounts, jobs
from trainmaster.server.store.scope import Scope

FRESH_S = 1.0
"""How old what the database said of a job may be, to open a connection by it."""
PATIENCE_S = 120.0
"""For the next piece of a request or of its response. The longest that a trainer holds a request is 20 s."""
MAX_REMEMBERED = 16_384
_JSON_HEADERS = [(b"content-type", b"application/json"), (b"accept", b"application/json")]
_SECRETS = frozenset((b"authorization", b"x-tinker-weights-access-token"))
_WHOLE_BYTES = 256 << 10
"""A response of up to this length is sent as one piece."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class TrainerGoneError(NotFoundError):
    """The trainer has ended; what it held is gone."""

    code = "TRAINER_GONE"


class Lookups(Generic[Key, Value]):
    """Values that were read within the last `fresh_s`; concurrent requests share one read."""

    def __init__(self, read: Callable[[Key], Awaitable[Value]], fresh_s: float) -> None:
        self._read = read
        self._fresh_s = fresh_s
        self._known: dict[Key, tuple[float, Value]] = {}
        self._reads: dict[Key, asyncio.Task[Value]] = {}

    async def get(self, key: Key) -> Value:
        if (known := self._known.get(key)) is not None and time.monotonic() - known[0] < self._fresh_s:
            return known[1]
        if (read := self._reads.get(key)) is None:
            read = self._reads[key] = asyncio.ensure_future(self._look(key))
            read.add_done_callback(lambda _: self._reads.pop(key, None))
        return await asyncio.shield(read)

    def known(self, key: Key) -> Value | None:
        """What was read last, however long ago."""
        known = self._known.get(key)
        return None if known is None else known[1]

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)

    async def _look(self, key: Key) -> Value:
        at = time.monotonic()
        value = await self._read(key)
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[key] = (at, value)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    job: Job | None
    uid: int | None = None
    """The user that the jobs of its account run as, where the account has one."""


class Trainers:
    """Belongs to one event loop."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._activity = Activity(context)
        self._connections = proxy.Connections()
        self._urgent = proxy.Connections()
        """For heartbeats alone: a burst that takes all open connections must not delay them."""
        self._jobs = Lookups(self._read, FRESH_S)

    def close(self) -> None:
        self._connections.close()
        self._urgent.close()

    async def require(self, account_id: str, job_id: str) -> None:
        """Raises NotFoundError unless the job is a trainer of the account: the doors serve no other services."""
        # Neither the owner nor the kind of a job changes: what was read of it once is good enough.
        if (seen := self._jobs.known(job_id)) is None or seen.job is None:
            seen = await self._jobs.get(job_id)
        if (job := seen.job) is None or job.workload_kind != KIND or job.account_id != account_id:
            raise JobNotFoundError(f"there is no job {job_id}")

    def touch(self, job_id: str) -> None:
        with self._activity.use(job_id):
            pass

    async def ask(
        self,
        trainer: Trainer,
        method: str,
        target: bytes,
        headers: proxy.Headers,
        body: proxy.RequestBody = b"",
        *,
        door: str,
        use: contextlib.ExitStack | None = None,
        counts: bool = True,
        urgent: bool = False,
    ) -> proxy.ServiceResponse:
        """Send a request to a trainer; `target` is a path with its query.

        A request that `counts` as use of the trainer does so until `use` ends, or until the response begins. An
        `urgent` one goes past all others. Raises TrainerGoneError where that attempt does not run any more, and
        BrokenOffError where it does not answer now.
        """
        with contextlib.ExitStack() as within:
            if counts:
                (use or within).enter_context(self._activity.use(trainer.job_id))
            own = [(b"host", b"trainer"), (DOOR_HEADER.encode(), door.encode())]
            request = (method, target, [*headers, *own], body)
            pool = self._urgent if urgent else self._connections
            if (kept := pool.kept(trainer)) is not None:
                try:
                    return await pool.exchange(kept, *request, patience_s=PATIENCE_S)
                except proxy.BrokenOffError:
                    # The trainer may have closed it just now. Trainers carry out a repeated request once.
                    if not isinstance(body, bytes):
                        raise
            return await pool.exchange(await self._open(trainer, pool), *request, patience_s=PATIENCE_S)

    async def post(
        self, trainer: Trainer, operation: str, document: Mapping[str, Any], *, door: str, counts: bool = True
    ) -> dict[str, Any]:
        """The JSON object that a trainer answers; empty where it answers another value. Raises like `ask`."""
        target, body = f"/api/v1/{operation}".encode(), json.dumps(document).encode()
        response = await self.ask(trainer, "POST", target, _JSON_HEADERS, body, door=door, counts=counts)
        content = await response.body()
        if response.status >= 500 or response.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise proxy.BrokenOffError(f"the trainer answered {operation} with {response.status}")
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            raise proxy.BrokenOffError(f"the trainer's answer to {operation} is no JSON") from None
        return answer if isinstance(answer, dict) else {}

    async def pass_on(
        self,
        request: Request,
        trainer: Trainer,
        body: proxy.RequestBody,
        *,
        door: str,
        extra: Mapping[str, str] | None = None,
        grammar: re.Pattern[bytes] | None = None,
        counts: bool = True,
        urgent: bool = False,
    ) -> Response:
        """A trainer's response to a client, with `extra` headers. Raises like `ask`; `grammar`: see `target_of`."""
        headers = [each for each in proxy.forwarded_headers(request, body) if each[0] not in _SECRETS]
        if extra and SOURCE_HEADER in extra:
            extra = await run_in_threadpool(with_source_as_seen, self._context.roots, trainer, extra)
        headers += [(name.encode(), value.encode()) for name, value in (extra or {}).items()]
        target = proxy.target_of(request, grammar)
        with contextlib.ExitStack() as use:
            answer = await self.ask(
                trainer, request.method, target, headers, body, use=use, door=door, counts=counts, urgent=urgent
            )
            if answer.length is not None and answer.length <= _WHOLE_BYTES:
                response = Response(await answer.body(), status_code=answer.status)
                response.raw_headers = answer.headers
                return response
            return StreamedResponse(answer, use.pop_all(), trainer.job_id)

    async def _open(self, trainer: Trainer, pool: proxy.Connections) -> proxy.ServiceConnection:
        try:
            return await pool.open(trainer, *await self._address(trainer))
        except proxy.BrokenOffError:
            # It may have ended since the last read.
            self._jobs.forget(trainer.job_id)
            await self._address(trainer)
            raise

    async def _address(self, trainer: Trainer) -> tuple[str, str, int | None]:
        """Where it answers, the token of its ranks, and the user that they run as, where its account has one."""
        seen = await self._jobs.get(trainer.job_id)
        if (job := seen.job) is None or job.attempt is None or job.attempt.number != trainer.attempt:
            raise TrainerGoneError(how_it_ended(f"job {trainer.job_id}", job, trainer.attempt))
        if job.endpoint is None:
            raise proxy.BrokenOffError(f"the trainer of job {job.job_id} does not answer yet")
        return job.endpoint, job.attempt.rank_token, seen.uid

    async def _read(self, job_id: str) -> _Seen:
        def question(connection: Read) -> _Seen:
            everything = Scope.everything()
            try:
                job = jobs.get(connection, everything, job_id, deleted=True)
                return _Seen(job=job, uid=accounts.get(connection, everything, job.account_id).uid)
            except NotFoundError:
                return _Seen(job=None)

        return await self._context.read(question)


def how_it_ended(name: str, job: Job | None, attempt: int = 0) -> str:
    """What became of an attempt of a trainer; 0: of the one before the current one."""
    if job is None or job.deleted_at is not None:
        return f"the trainer, {name}, was deleted"
    if job.attempt is not None or job.attempt_count > attempt > 0:
        return f"the trainer, {name}, was started again since (attempt {job.attempt_count})"
    return f"the trainer, {name}, is {status_of(job)}"


def status_of(job: Job) -> str:
    """A job's status, with its reason and message where it has them."""
    why = ": ".join(part for part in (job.reason, job.message) if part)
    return f"{job.status} ({why})" if why else str(job.status)


def with_source_as_seen(roots: Roots, trainer: Trainer, headers: Mapping[str, str]) -> Mapping[str, str]:
    """Headers that name a checkpoint by its place on this machine, as the trainer's machine finds it, or a refusal: one
    that shares no files with the server reads the checkpoints of its own job alone."""
    source = headers[SOURCE_HEADER]
    with contextlib.suppress(FileNotFoundError):
        seen = run_directory(roots, trainer.job_id, trainer.attempt).request().checkpoint_dir
        if is_url(seen) and not is_url(source):
            home = f"{roots.path(ARTIFACTS, checkpoints_path(trainer.job_id))}/"
            if source.startswith(home):
                return {**headers, SOURCE_HEADER: f"{seen}/{source.removeprefix(home)}"}
            message = "the checkpoint is of another job, and this trainer shares no files with the server"
            others = {name: value for name, value in headers.items() if name != SOURCE_HEADER}
            return {**others, REFUSAL_HEADER: quote(message)}
    return headers


def location_of(context: ApiContext, checkpoint: CheckpointRecord) -> str:
    return checkpoint.path if checkpoint.root == URI else str(context.roots.path(checkpoint.root, checkpoint.path))
