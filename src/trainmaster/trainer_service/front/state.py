"""The front as a whole: the sessions and requests it holds, what it does by itself, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from trainmaster.trainer_service.front.futures import EngineLink, Futures, SavedCheckpoints
from trainmaster.trainer_service.front.models import FrontModels
from trainmaster.trainer_service.front.request_bodies import BodyReader, FrontSettings
from trainmaster.trainer_service.front.samples import Samples
from trainmaster.trainer_service.messages import Request

_REMEMBERED = 10_000


@dataclass(slots=True)
class _LiveSession:
    seen_s: float
    expires: bool


class FrontSessions:
    """A session starts with a request, lives by heartbeats, and ends once."""

    def __init__(self, *, expire_s: float, clock: Callable[[], float]) -> None:
        self._expire_s = expire_s
        self._clock = clock
        self._live: dict[str, _LiveSession] = {}
        self._ended: dict[str, str] = {}
        self._by_key: dict[str, str] = {}

    def create(self, idempotency_key: str) -> str:
        if idempotency_key and (known := self._by_key.get(idempotency_key)) is not None:
            return known
        session_id = f"sess-{uuid.uuid4().hex}"
        self._live[session_id] = _LiveSession(self._clock(), expires=True)
        if idempotency_key:
            self._by_key[idempotency_key] = session_id
            if len(self._by_key) > _REMEMBERED:
                del self._by_key[next(iter(self._by_key))]
        return session_id

    def adopt(self, session_id: str) -> None:
        """Take in a session of the server, which says when it ends."""
        if session_id not in self._ended:
            self._live.setdefault(session_id, _LiveSession(self._clock(), expires=False))

    def touch(self, session_id: str) -> str:
        """Record a sign of life. Returns why there is no such session; empty when there is."""
        session = self._live.get(session_id)
        if session is None:
            return self._ended.get(session_id) or f"session {session_id!r} is not known here: it is of an earlier start"
        session.seen_s = self._clock()
        return ""

    def end(self, session_id: str, why: str) -> bool:
        if self._live.pop(session_id, None) is None:
            return False
        self._ended[session_id] = f"session {session_id!r} {why}"
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return True

    def silent(self) -> list[str]:
        limit = self._clock() - self._expire_s
        return [key for key, session in self._live.items() if session.expires and session.seen_s < limit]


_SWEEP_S = 1.0
_LINGER_S = 1.0
"""How long the front outlives the engine at least: it tells a client more than a refused connection does."""


class Front:
    """Everything between HTTP and the engine. Belongs to one event loop."""

    def __init__(self, settings: FrontSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._save_again_at = 0.0
        self.trainer = settings.trainer
        self.saved = SavedCheckpoints()
        self.futures = Futures(keep_s=settings.keep_results_s, keep_bytes=settings.keep_fetched_bytes, clock=clock)
        self.sessions = FrontSessions(expire_s=settings.session_expires_s, clock=clock)
        self.intake = BodyReader(settings)
        self.link = EngineLink(self.futures, self.saved)
        self.training = FrontModels(settings, self.link, self.futures, self.intake, self.saved)
        self.samples = Samples(settings, self.link, self.futures, self.intake)

    def end_session(self, session_id: str, why: str, *, save: bool) -> None:
        """`save` what its models would lose, before they go."""
        if self.sessions.end(session_id, why):
            gone = f"was unloaded with its session, which {why}"
            model_ids: list[str] = []
            if save:
                self.training.leave_session(session_id, gone)
            else:
                model_ids = self.training.end_session(session_id, gone)
            fields = {
                "session_id": session_id,
                "model_ids": model_ids,
                "sampling_session_ids": self.samples.end_session(session_id),
            }
            self.link.send(Request(request_id=f"{session_id}:end", op="end_session", fields=fields))

    def sweep(self) -> None:
        self.futures.sweep()
        for session_id in self.sessions.silent():
            self.end_session(session_id, "expired", save=True)
        if (now := self._clock()) >= self._save_again_at:
            self._save_again_at = now + self.settings.save_again_s
            self.training.leave_again()

    async def run(self, end: socket.socket) -> None:
        """Serve until the engine is gone and every waiting client has heard so."""
        self.link.connect(end)
        while not self.link.ended.is_set():
            self.sweep()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.link.ended.wait(), _SWEEP_S)
        ended_s = time.monotonic()
        at_least_s = min(_LINGER_S, self.settings.last_answers_s)
        while (passed_s := time.monotonic() - ended_s) < self.settings.last_answers_s:
            if passed_s > at_least_s and not self.link.unheard():
                break
            await asyncio.sleep(0.02)
        self.intake.stop()
