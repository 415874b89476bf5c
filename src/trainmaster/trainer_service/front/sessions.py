"""Sessions of clients: they begin with a request, live by heartbeats, and end once."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_REMEMBERED = 10_000
"""How many keys of requests, and ids of ended sessions, are remembered."""


@dataclass(slots=True)
class _Session:
    seen_s: float
    expires: bool


class Sessions:
    """Who is connected."""

    def __init__(self, *, expire_s: float, clock: Callable[[], float]) -> None:
        """None yet; a session that is silent for `expire_s` has expired."""
        self._expire_s = expire_s
        self._clock = clock
        self._live: dict[str, _Session] = {}
        self._ended: dict[str, str] = {}
        self._by_key: dict[str, str] = {}

    def create(self, idempotency_key: str) -> str:
        """The id of a new session; the same one when a request with this key is repeated."""
        if idempotency_key and (known := self._by_key.get(idempotency_key)) is not None:
            return known
        session_id = f"sess-{uuid.uuid4().hex}"
        self._live[session_id] = _Session(self._clock(), expires=True)
        if idempotency_key:
            self._by_key[idempotency_key] = session_id
            if len(self._by_key) > _REMEMBERED:
                del self._by_key[next(iter(self._by_key))]
        return session_id

    def adopt(self, session_id: str) -> None:
        """Take in a session that the server keeps: it ends when the server says so."""
        if session_id not in self._ended:
            self._live.setdefault(session_id, _Session(self._clock(), expires=False))

    def touch(self, session_id: str) -> str:
        """A sign of life.

        Returns:
            Why there is no such session; empty when there is.
        """
        session = self._live.get(session_id)
        if session is None:
            return self._ended.get(session_id) or f"session {session_id!r} is not known here: it is of an earlier start"
        session.seen_s = self._clock()
        return ""

    def end(self, session_id: str, why: str) -> bool:
        """End a session; False when it is not live."""
        if self._live.pop(session_id, None) is None:
            return False
        self._ended[session_id] = f"session {session_id!r} {why}"
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        return True

    def silent(self) -> Iterator[str]:
        """Those that have expired, to be ended."""
        limit = self._clock() - self._expire_s
        yield from [
            session_id for session_id, session in self._live.items() if session.expires and session.seen_s < limit
        ]

    def __len__(self) -> int:
        return len(self._live)
