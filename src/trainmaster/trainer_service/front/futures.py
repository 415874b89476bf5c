"""Futures of requests, and the link to the engine process that finishes them.

An answer can be lost, so that a result is kept for a while; one that was fetched goes earlier if memory is short.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeGuard

from trainmaster.protocol.trainer_requests import is_model_id
from trainmaster.trainer_service.channel import FrontChannel
from trainmaster.trainer_service.messages import EngineReady, EngineStopped, Message, Reply, Request, SharedBody

MAX_COUNT = 2**63 - 1
"""Copies of a sampling client count from a random multiple of 10^9 on, up to 10^18."""


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


_ENTRY_BYTES = 2048


class ResultForm(Enum):
    FIELDS = "fields"
    PASS = "pass"
    SAMPLE = "sample"


Waiters = set[asyncio.Future[None]]


@dataclass(slots=True, eq=False, kw_only=True)
class Future:
    request_id: str
    owner: str
    form: ResultForm = ResultForm.FIELDS
    digest: bytes = b""
    """Tells a repeat of the same request from another one under the same id."""
    then: Callable[[Reply], None] | None = None
    """Called with the outcome before anybody else sees it."""
    outcome: Reply | None = None
    finished_s: float = 0.0
    fetched: bool = False
    waiters: Waiters = field(default_factory=set)

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

    def open(self, future: Future) -> Future:
        """An earlier future of the same id is forgotten."""
        self.forget(future.request_id)
        self._futures[future.request_id] = future
        return future

    def get(self, request_id: str) -> Future | None:
        return self._futures.get(request_id)

    def finish(self, outcome: Reply) -> None:
        """The first outcome counts."""
        future = self._futures.get(outcome.request_id)
        if future is None or future.outcome is not None:
            return
        future.outcome = outcome
        future.finished_s = self._clock()
        self._finished[outcome.request_id] = future
        then, future.then = future.then, None
        if then is not None:
            then(outcome)
        wake(future.waiters)

    def fail(self, request_id: str, error: str, category: str = "server") -> None:
        self.finish(Reply(request_id=request_id, error=error, category=category))

    def pending(self) -> list[Future]:
        return [future for future in self._futures.values() if future.outcome is None]

    def of(self, owner: str) -> list[Future]:
        return [future for future in self._futures.values() if future.owner == owner]

    async def wait(self, future: Future, hold_s: float) -> Reply | None:
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


def wake(waiters: Waiters) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


_INFO = ("base_model", "is_lora", "lora_rank", "train_unembed", "train_mlp", "train_attn")
"""What a client asks for before it makes a model from saved weights."""


class SavedCheckpoints:
    """Checkpoints by their path, oldest first; see `messages.EngineReady.checkpoints`."""

    def __init__(self) -> None:
        self._by_path: dict[str, Mapping[str, Any]] = {}

    def add(self, checkpoints: Iterable[Mapping[str, Any]]) -> None:
        """One that was replaced becomes the newest."""
        for checkpoint in checkpoints:
            self._by_path.pop(checkpoint["path"], None)
            self._by_path[checkpoint["path"]] = checkpoint

    def names(self) -> list[str]:
        return [path for path, checkpoint in self._by_path.items() if checkpoint.get("kind") == "training"]

    def weights_info(self, path: str) -> dict[str, Any] | None:
        checkpoint = self._by_path.get(path)
        return None if checkpoint is None else {name: checkpoint.get(name) for name in _INFO}

    def base_model(self, path: str) -> str:
        return str(self._by_path.get(path, {}).get("base_model") or "")

    def advice(self, owner: str) -> str:
        """What to continue from when a model is lost; empty for what is no model."""
        if not is_model_id(owner):
            return ""
        own = [checkpoint for checkpoint in self._by_path.values() if checkpoint.get("model_id") == owner]
        training = [checkpoint["path"] for checkpoint in own if checkpoint.get("kind") == "training"]
        if training:
            return f"Its last saved state is {training[-1]}: make a new model and load it."
        if own:
            return f"Of it there are only weights for sampling, the last ones as {own[-1]['path']}."
        return "None of its states was saved."


class EngineLink:
    """The connection to the engine. Belongs to one event loop."""

    def __init__(self, futures: Futures, saved: SavedCheckpoints) -> None:
        self._futures = futures
        self._saved = saved
        self._channel: FrontChannel | None = None
        self.ready = asyncio.Event()
        """Set when requests can be sent, or when the engine is gone and everything is answered at once."""
        self.ended = asyncio.Event()
        self.in_order = False
        self.gone = ""
        """Why the engine does nothing any more; empty while it does."""
        self.capabilities: Mapping[str, Any] = {"supported_models": []}
        self._lost: list[Future] = []

    def connect(self, end: socket.socket) -> None:
        self._channel = FrontChannel(end, received=self._received, closed=lambda: self._end("its engine process died"))

    def send(self, request: Request, shared: SharedBody | None = None) -> None:
        if self.gone or self._channel is None:
            if shared is not None:
                shared.close()
            if (future := self._futures.get(request.request_id)) is not None:
                self.lose(future)
        else:
            try:
                self._channel.send(request, shared)
            except OSError as error:
                # Large fields are shared only here, and what they need was short. Its place in the order is used up.
                self._futures.fail(request.request_id, f"the trainer had no room for this request: {error.strerror}")

    def lose(self, future: Future) -> None:
        self._lost.append(future)
        error = f"The trainer has stopped: {self.gone}. {self._saved.advice(future.owner)}".rstrip()
        self._futures.fail(future.request_id, error)

    def unheard(self) -> bool:
        """Whether a client has yet to fetch the outcome of a request that failed with the engine."""
        return any(not future.fetched for future in self._lost)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _received(self, message: Message) -> None:
        match message:
            case Reply():
                if message.info and message.info.get("path"):
                    self._saved.add([message.info])
                self._futures.finish(message)
            case EngineReady():
                self.capabilities = message.capabilities
                self._saved.add(message.checkpoints)
                self.ready.set()
            case EngineStopped():
                self._saved.add(message.checkpoints)
                self.in_order = True
                self._end(message.reason)
            case Request():
                raise TypeError("the engine asks the front for nothing")

    def _end(self, why: str) -> None:
        if not self.gone:
            self.gone = why
            for future in self._futures.pending():
                self.lose(future)
            self._futures.let_go()
            self.ready.set()
            self.ended.set()
