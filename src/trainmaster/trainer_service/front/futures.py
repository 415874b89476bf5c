"""Futures and the ids that clients get: what was asked, and what came of it, until nobody can want it any more.

A result can be fetched more than once, because an answer can be lost. It is kept for a while after it came; one that
was fetched is given up earlier when results take too much memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeGuard

MAX_COUNT = 2**63 - 1
"""Copies of a sampling client count from a random multiple of 10^9 on, up to 10^18."""


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value from a client can be a number in a sequence."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


_ENTRY_BYTES = 2048
"""What a future takes beside its result."""


class ResultForm(Enum):
    FIELDS = "fields"
    PASS = "pass"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    fields: Mapping[str, Any] | None = None
    body: bytes | memoryview | None = None
    error: str = ""
    category: str = "server"
    info: Mapping[str, Any] | None = None
    """For the front alone; see `messages.Reply`."""


class Future:
    __slots__ = ("digest", "fetched", "finished_s", "form", "outcome", "owner", "request_id", "then", "waiters")

    def __init__(
        self,
        request_id: str,
        owner: str,
        form: ResultForm,
        digest: bytes,
        then: Callable[[RequestOutcome], None] | None,
    ) -> None:
        self.request_id = request_id
        self.digest = digest
        """Tells a repeat of the same request from another one under the same id."""
        self.owner = owner
        """The model or the sampling session."""
        self.form = form
        self.then = then
        self.outcome: RequestOutcome | None = None
        self.finished_s = 0.0
        self.fetched = False
        self.waiters: Waiters = set()

    @property
    def size(self) -> int:
        """About, in bytes."""
        body = self.outcome.body if self.outcome else None
        return _ENTRY_BYTES + (0 if body is None else len(body))


class Futures:
    def __init__(self, *, keep_s: float, keep_bytes: int, clock: Callable[[], float]) -> None:
        """Outcomes are kept for `keep_s`; those that were fetched, as long as they take at most `keep_bytes`."""
        self._keep_s = keep_s
        self._keep_bytes = keep_bytes
        self._clock = clock
        self._futures: dict[str, Future] = {}
        self._finished: dict[str, Future] = {}  # in the order of their outcomes
        self._fetched: dict[str, Future] = {}  # in the order of their first fetch
        self._fetched_bytes = 0
        self._held: Waiters = set()
        self._holds = True

    def open(
        self,
        request_id: str,
        *,
        owner: str,
        form: ResultForm = ResultForm.FIELDS,
        digest: bytes = b"",
        then: Callable[[RequestOutcome], None] | None = None,
    ) -> Future:
        """`then` is called with the outcome before anybody else sees it."""
        self.forget(request_id)
        future = self._futures[request_id] = Future(request_id, owner, form, digest, then)
        return future

    def get(self, request_id: str) -> Future | None:
        return self._futures.get(request_id)

    def finish(self, request_id: str, outcome: RequestOutcome) -> None:
        """The first outcome counts."""
        future = self._futures.get(request_id)
        if future is None or future.outcome is not None:
            return
        future.outcome = outcome
        future.finished_s = self._clock()
        self._finished[request_id] = future
        then, future.then = future.then, None
        if then is not None:
            then(outcome)
        wake(future.waiters)

    def pending(self) -> list[Future]:
        return [future for future in self._futures.values() if future.outcome is None]

    def of(self, owner: str) -> list[Future]:
        return [future for future in self._futures.values() if future.owner == owner]

    async def wait(self, future: Future, hold_s: float) -> RequestOutcome | None:
        """None when there is no outcome after `hold_s`."""
        if future.outcome is None:
            await self.hold(future.waiters, hold_s)
        return future.outcome

    async def hold(self, waiters: Waiters, hold_s: float) -> None:
        """Wait until woken, or for `hold_s`; not at all after `let_go`."""
        if not self._holds:
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        waiters.add(waiter)
        self._held.add(waiter)
        timer = loop.call_later(hold_s, wake, {waiter})
        try:
            await waiter
        finally:
            timer.cancel()
            waiters.discard(waiter)
            self._held.discard(waiter)

    def let_go(self) -> None:
        """Wake everybody, and hold nobody any more: the engine is gone."""
        self._holds = False
        wake(self._held)

    def fetch(self, future: Future) -> None:
        """Note that the client was sent the outcome."""
        if not future.fetched and future.request_id in self._futures:
            future.fetched = True
            self._fetched[future.request_id] = future
            self._fetched_bytes += future.size
            while self._fetched_bytes > self._keep_bytes and len(self._fetched) > 1:
                self.forget(next(iter(self._fetched)))

    def forget(self, request_id: str) -> None:
        """A pending future stays."""
        future = self._futures.get(request_id)
        if future is None or future.outcome is None:
            return
        del self._futures[request_id]
        del self._finished[request_id]
        if self._fetched.pop(request_id, None) is not None:
            self._fetched_bytes -= future.size

    def forget_fetched(self, owner: str) -> None:
        """Drop what the client has got, and will not ask for again."""
        for future in self.of(owner):
            if future.fetched:
                self.forget(future.request_id)

    def sweep(self) -> None:
        limit = self._clock() - self._keep_s
        while self._finished:
            request_id, future = next(iter(self._finished.items()))
            if future.finished_s > limit:
                return
            self.forget(request_id)

    def __len__(self) -> int:
        return len(self._futures)


Waiters = set[asyncio.Future[None]]


def wake(waiters: Waiters) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
