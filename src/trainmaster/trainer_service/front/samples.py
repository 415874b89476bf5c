"""Samples: sessions of immutable weights, and requests without an order among each other but with a bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmaster.trainer_service.front.futures import EngineLink, Future, Futures, ResultForm, Waiters, is_count, wake
from trainmaster.trainer_service.front.request_bodies import (
    BodyReader,
    BusyError,
    FrontSettings,
    Received,
    RequestRefusedError,
    StoppedError,
    size_of_fields,
)
from trainmaster.trainer_service.messages import Reply, Request
from trainmaster.trainer_service.schema import shown

MAX_NUM_SAMPLES = 1024
"""Of one request: each has an id in the acknowledgement."""
_CLONE = 1_000_000_000
"""A copy of a client counts in a block of its own of this length."""


@dataclass(slots=True, kw_only=True)
class SamplingSession:
    sampling_session_id: str
    session_id: str
    base_model: str
    model_path: str | None
    opened: bool = False
    feed: list[tuple[int, str]] | None = None
    """The samples that ended, each with its place in the order; None while nobody follows."""
    ended: int = 0
    followers: Waiters = field(default_factory=set)

    def append(self, request_id: str) -> None:
        if self.feed is not None:
            self.ended += 1
            self.feed.append((self.ended, request_id))


class Samples:
    def __init__(self, settings: FrontSettings, link: EngineLink, futures: Futures, intake: BodyReader) -> None:
        self._trainer = settings.trainer
        self._link = link
        self._futures = futures
        self._intake = intake
        self._max_pending = settings.max_pending_samples
        self._max_pending_bytes = settings.max_pending_sample_bytes
        self._sessions: dict[str, SamplingSession] = {}
        self.pending = 0
        self.pending_bytes = 0

    def get(self, sampling_session_id: str) -> SamplingSession | None:
        return self._sessions.get(sampling_session_id)

    def register(self, session_id: str, number: int, *, base_model: str, model_path: str | None) -> SamplingSession:
        key = self._trainer.sampling_session_id(session_id, number)
        new = SamplingSession(
            sampling_session_id=key, session_id=session_id, base_model=base_model, model_path=model_path
        )
        return self._sessions.setdefault(key, new)

    async def open(
        self, session: SamplingSession, fields: Mapping[str, Any], *, door: str, source: str, hold_s: float
    ) -> Reply | None:
        """Have the engine load a session's weights, once; if it cannot, give it up. None: under way, or long ago."""
        request_id = self._trainer.future_id(session.sampling_session_id, "open")
        if not session.opened:
            sent = {**fields, "sampling_session_id": session.sampling_session_id}
            size = size_of_fields(sent)
            self._intake.hold(size)
            session.opened = True
            owner = session.sampling_session_id
            self._futures.open(Future(request_id=request_id, owner=owner, then=lambda _: self._intake.release(size)))
            self._link.send(
                Request(request_id=request_id, op="create_sampling_session", fields=sent, door=door, source=source)
            )
        future = self._futures.get(request_id)
        if future is None:
            return None
        outcome = await self._futures.wait(future, hold_s)
        if outcome is not None and outcome.error:
            self._futures.fetch(future)
            self._sessions.pop(session.sampling_session_id, None)
        return outcome

    def accept(self, peeked: Mapping[str, Any], received: Received, *, encoding: str) -> dict[str, Any]:
        """Raises RequestRefusedError where there can be no such sample, and BusyError where too many wait."""
        sampling_session_id, seq_id = peeked.get("sampling_session_id"), peeked.get("seq_id")
        if not isinstance(sampling_session_id, str) or not is_count(seq_id):
            raise RequestRefusedError("asample needs a sampling_session_id and a seq_id")
        count = peeked.get("num_samples", 1)
        if not is_count(count) or not 1 <= count <= MAX_NUM_SAMPLES:
            raise RequestRefusedError(f"num_samples must be from 1 to {MAX_NUM_SAMPLES}, not {shown(count)}")
        session = self._sessions.get(sampling_session_id)
        if session is None:
            raise RequestRefusedError(self._why_unknown(sampling_session_id), "server")
        request_id = self._trainer.future_id(sampling_session_id, seq_id)
        ack = {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{index}" for index in range(count)]}
        if (known := self._futures.get(request_id)) is not None:
            if known.digest != received.digest:
                raise RequestRefusedError(
                    f"another sample of {sampling_session_id} had the seq_id {seq_id} before: it stands"
                )
            self._intake.drop(received)
            return ack
        size, shared = received.size, received.shared
        if self.pending >= self._max_pending or self.pending_bytes + size > max(self._max_pending_bytes, size):
            raise BusyError(f"{self.pending} samples wait already: ask again soon")
        if shared is None:
            self._intake.release(size)  # small ones are bounded here, apart from what is trained
        self.pending += 1
        self.pending_bytes += size
        self._futures.open(
            Future(
                request_id=request_id,
                owner=sampling_session_id,
                form=ResultForm.SAMPLE,
                digest=received.digest,
                then=lambda _: self._ended(session, request_id, size, shared=shared is not None),
            )
        )
        fields = {"sampling_session_id": sampling_session_id}
        self._link.send(
            Request(request_id=request_id, op="asample", fields=fields, body=received.data, encoding=encoding), shared
        )
        return ack

    def cancel(self, request_id: str) -> bool:
        future = self._futures.get(request_id)
        if future is None or future.form is not ResultForm.SAMPLE or future.outcome is not None:
            return False
        self._link.send(Request(request_id=f"{request_id}:cancel", op="cancel", fields={"request_id": request_id}))
        return True

    async def ended_since(
        self, session: SamplingSession, cursor: int, clone: int, hold_s: float
    ) -> tuple[list[Future], int]:
        """A client's samples that ended after `cursor`, and the next cursor. Raises StoppedError."""
        if session.feed is None:
            session.feed = []
            for known in self._futures.of(session.sampling_session_id):
                if known.form is ResultForm.SAMPLE and known.outcome is not None:
                    session.append(known.request_id)
        found = self._after(session, cursor, clone)
        if not found:
            await self._futures.hold(session.followers, hold_s)
            found = self._after(session, cursor, clone)
        if not found and self._link.gone:
            raise StoppedError
        ended = [future for _, request_id in found if (future := self._futures.get(request_id)) is not None]
        return ended, max([cursor, *(place for place, _ in found)])

    def end_session(self, session_id: str) -> list[str]:
        ids = [key for key, session in self._sessions.items() if session.session_id == session_id]
        for sampling_session_id in ids:
            del self._sessions[sampling_session_id]
            self._futures.forget_fetched(sampling_session_id)
        return ids

    def _after(self, session: SamplingSession, cursor: int, clone: int) -> list[tuple[int, str]]:
        feed = session.feed or []
        # What lies before the cursor of one client may still be news to its copies; futures end it for all.
        feed[:] = [(place, request_id) for place, request_id in feed if self._futures.get(request_id) is not None]
        return [
            (place, request_id)
            for place, request_id in feed
            if place > cursor and int(request_id.rpartition(":")[2]) // _CLONE == clone
        ]

    def _ended(self, session: SamplingSession, request_id: str, size: int, *, shared: bool) -> None:
        self.pending -= 1
        self.pending_bytes -= size
        if shared:
            self._intake.release(size)
        if session.feed is not None:
            session.append(request_id)
            wake(session.followers)

    def _why_unknown(self, sampling_session_id: str) -> str:
        if self._trainer.made_sampling_session(sampling_session_id):
            return f"{sampling_session_id} has ended with its session"
        return (
            f"{sampling_session_id} is not in this trainer, which has started {self._trainer.attempt} times; "
            "make a new sampling client from saved weights"
        )
