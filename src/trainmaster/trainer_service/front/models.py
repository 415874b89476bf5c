"""Models of clients, and what is asked of them: taken in at once, passed to the engine in order, each operation once.

Whatever is wrong with an operation is reported through its future: a client that is refused at the door has used up its
`seq_id` all the same, and everything behind it would wait for ever.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, TypeVar

from trainmaster.protocol.trainer_requests import model_id_of
from trainmaster.trainer_service.front.futures import (
    EngineLink,
    Future,
    Futures,
    ResultForm,
    SavedCheckpoints,
    is_count,
)
from trainmaster.trainer_service.front.request_bodies import BodyReader, BusyError, FrontSettings, size_of_fields
from trainmaster.trainer_service.messages import Reply, Request, SharedBody

# The order of one model's operations: they come in any order and more than once, and leave in sequence, each once.

Item = TypeVar("Item")

REMEMBERED = 16_384
"""How many operations back a repeat is compared with the first; clients repeat within minutes."""


class Arrival(Enum):
    NEW = auto()
    REPEAT = auto()
    CONFLICT = auto()
    """Another one was here under its number."""
    FULL = auto()
    """So many wait for an earlier one that no more are taken in."""


class OperationOrder(Generic[Item]):
    """A model's operations: they come in any order and repeatedly, and leave by `seq_id` from 1 on, each once."""

    def __init__(self, *, max_waiting: int, max_waiting_bytes: int) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self.next_seq_id = 1
        """The one that everything behind it waits for."""
        self.waiting_bytes = 0
        self._waiting: dict[int, tuple[Item, int]] = {}
        self._digests: dict[int, bytes] = {}

    def knows(self, seq_id: int) -> bool:
        return seq_id < self.next_seq_id or seq_id in self._waiting

    def place(self, seq_id: int, digest: bytes, item: Item, *, size: int, room: bool) -> Arrival:
        """Take an operation in, unless it is or was here; `digest` tells it from others. The one that others wait
        for is always taken in, another one of `size` bytes where there is `room` among those of other models.
        """
        if self.knows(seq_id):
            known = self._digests.get(seq_id, digest)
            return Arrival.REPEAT if known == digest else Arrival.CONFLICT
        if seq_id > self.next_seq_id and not (room and self._has_room(size)):
            return Arrival.FULL
        self._waiting[seq_id] = (item, size)
        self.waiting_bytes += size
        self._digests[seq_id] = digest
        return Arrival.NEW

    def leave(self) -> Iterator[Item]:
        while self.next_seq_id in self._waiting:
            item, size = self._waiting.pop(self.next_seq_id)
            self.waiting_bytes -= size
            self._digests.pop(self.next_seq_id - REMEMBERED, None)
            self.next_seq_id += 1
            yield item

    def abandon(self) -> list[Item]:
        """Those that wait; they will not be done."""
        waiting = [self._waiting[seq_id][0] for seq_id in sorted(self._waiting)]
        self._waiting.clear()
        self.waiting_bytes = 0
        return waiting

    def _has_room(self, size: int) -> bool:
        return len(self._waiting) < self._max_waiting and self.waiting_bytes + size <= self._max_waiting_bytes

    @property
    def waiting(self) -> int:
        return len(self._waiting)


_REMEMBERED = 10_000
_FORMS = {"forward": ResultForm.PASS, "forward_backward": ResultForm.PASS}

Ack = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class QueuedOperation:
    request: Request
    digest: bytes
    size: int
    """In bytes, of what came with it; held in the intake until it has ended."""
    shared: SharedBody | None = None
    refusal: str = ""
    """Why it will not be done when its turn comes; empty: it will."""
    done: Callable[[], object] | None = None


@dataclass(slots=True, kw_only=True)
class FrontModel:
    model_id: str
    session_id: str
    fields: Mapping[str, Any]
    order: OperationOrder[QueuedOperation]
    info: Mapping[str, Any] = field(default_factory=dict)


class FrontModels:
    def __init__(
        self, settings: FrontSettings, link: EngineLink, futures: Futures, intake: BodyReader, saved: SavedCheckpoints
    ) -> None:
        self._settings = settings
        self._trainer = settings.trainer
        self._link = link
        self._futures = futures
        self._intake = intake
        self._saved = saved
        self._models: dict[str, FrontModel] = {}
        self._gone: dict[str, str] = {}
        self._leaving: set[str] = set()
        """Models that are gone for their clients, and that the engine has not saved yet."""

    def get(self, model_id: str) -> FrontModel | None:
        return self._models.get(model_id)

    def create(self, fields: Mapping[str, Any], *, door: str, source: str, refusal: str) -> Ack:
        """Once for each number of its session; `refusal` says why it must fail. Raises BusyError."""
        session_id, number = fields.get("session_id"), fields.get("model_seq_id")
        if not isinstance(session_id, str) or not is_count(number):
            return self.refuse("create_model needs a session_id and a model_seq_id")
        model_id = model_id_of(session_id, number)
        request_id = self._trainer.future_id(model_id, "create")
        ack = {"request_id": request_id, "model_id": model_id}
        if model_id in self._models or self._futures.get(request_id) is not None:
            return ack
        size = size_of_fields(fields)
        self._intake.hold(size)
        self._futures.open(
            Future(request_id=request_id, owner=model_id, then=lambda done: self._made(model_id, done, size))
        )
        if refusal:
            self._futures.fail(request_id, refusal)
            return ack
        self._gone.pop(model_id, None)
        order: OperationOrder[QueuedOperation] = OperationOrder(
            max_waiting=self._settings.max_waiting, max_waiting_bytes=self._settings.max_waiting_bytes
        )
        self._models[model_id] = FrontModel(model_id=model_id, session_id=session_id, fields=fields, order=order)
        self._link.send(
            Request(
                request_id=request_id, op="create_model", model_id=model_id, fields=fields, door=door, source=source
            )
        )
        return ack

    def accept(self, operation: QueuedOperation) -> Ack:
        """Raises BusyError where too many wait for an earlier one, or for the engine; the client sends it again."""
        request = operation.request
        ack = {"request_id": request.request_id, "model_id": request.model_id}
        model = self._models.get(request.model_id)
        if model is None or self._link.gone:
            self._drop(operation)
            if self._futures.get(request.request_id) is None:
                future = self._futures.open(Future(request_id=request.request_id, owner=request.model_id))
                if model is None:
                    self._futures.fail(request.request_id, self.why_lost(request.model_id))
                else:
                    self._link.lose(future)
            return ack
        try:
            placement = self._place(model, operation)
        except BusyError:
            self._drop(operation)
            raise
        if placement is Arrival.NEW:
            self._open(operation)
            for due in model.order.leave():
                self._release(due)
            return ack
        self._drop(operation)
        if placement is Arrival.FULL:
            raise BusyError(
                f"{model.order.waiting} operations of {model.model_id} wait for the one with the seq_id "
                f"{model.order.next_seq_id}, which has not arrived, and there is no room for more"
            )
        if placement is Arrival.CONFLICT:
            return self.refuse(
                f"another operation of {request.model_id} had the seq_id {request.seq_id} before: it stands, "
                "and this one is not done",
                owner=request.model_id,
            )
        return ack

    def unload(self, model_id: str) -> Ack:
        """Behind everything that was asked of it before."""
        request_id = self._trainer.future_id(model_id, "unload")
        ack = {"request_id": request_id, "model_id": model_id}
        if self._futures.get(request_id) is None:
            self._futures.open(
                Future(request_id=request_id, owner=model_id, then=lambda done: self._unloaded(model_id, done))
            )
            if model_id in self._models:
                self._link.send(
                    Request(request_id=request_id, op="unload_model", model_id=model_id, fields={"model_id": model_id})
                )
            else:
                self._futures.fail(request_id, self.why_lost(model_id))
        return ack

    def end_session(self, session_id: str, why: str) -> list[str]:
        model_ids = self._of_session(session_id)
        for model_id in model_ids:
            self._forget(model_id, why)
            self._futures.forget_fetched(model_id)
        return model_ids

    def leave_session(self, session_id: str, why: str) -> None:
        """Give up the models of a client that is gone; the engine saves what would be lost."""
        for model_id in self._of_session(session_id):
            self._leaving.add(model_id)
            self._forget(model_id, why)
            self._leave(model_id)

    def leave_again(self) -> None:
        for model_id in self._leaving:
            future = self._futures.get(self._leave_id(model_id))
            if future is None or future.outcome is not None:
                self._leave(model_id)

    def refuse(self, error: str, *, owner: str = "", category: str = "user") -> Ack:
        request_id = self._trainer.future_id(owner or "refused", uuid.uuid4().hex)
        self._futures.open(Future(request_id=request_id, owner=owner))
        self._futures.fail(request_id, error, category)
        return {"request_id": request_id, **({"model_id": owner} if owner else {})}

    def why_lost(self, model_id: str) -> str:
        why = self._gone.get(model_id) or (
            f"is not in this trainer, which has started {self._trainer.attempt} times; each start begins without models"
        )
        if model_id in self._leaving and not self._link.gone:
            advice = "Its state is being saved: retry in a moment to get the name of its checkpoint."
        else:
            advice = self._saved.advice(model_id)
        return f"{model_id} {why}. {advice}".rstrip()

    def why_waiting(self, model_id: str) -> str:
        model = self._models.get(model_id)
        if model is None or not model.order.waiting:
            return ""
        return f"{model_id} waits for the operation with the seq_id {model.order.next_seq_id}, which has not arrived"

    def _place(self, model: FrontModel, operation: QueuedOperation) -> Arrival:
        seq_id = operation.request.seq_id
        if not model.order.knows(seq_id):
            # Also of the one that others wait for. It gets in when it comes again: what waits takes half of the room at
            # most, and the engine ends the rest without it.
            self._intake.require_room()
        orders = [each.order for each in self._models.values()]
        room = (
            sum(order.waiting for order in orders) < self._settings.max_held // 2
            and sum(order.waiting_bytes for order in orders) + operation.size <= self._settings.max_held_bytes // 2
        )
        return model.order.place(seq_id, operation.digest, operation, size=operation.size, room=room)

    def _open(self, operation: QueuedOperation) -> None:
        request = operation.request
        size, done = operation.size, operation.done

        def then(outcome: Reply) -> None:
            self._intake.release(size)
            if done is not None and not outcome.error:
                done()

        form = _FORMS.get(request.op, ResultForm.FIELDS)
        self._futures.open(Future(request_id=request.request_id, owner=request.model_id, form=form, then=then))

    def _release(self, operation: QueuedOperation) -> None:
        if operation.refusal:
            self._futures.fail(operation.request.request_id, operation.refusal, "user")
            if operation.shared is not None:
                operation.shared.close()
        else:
            self._link.send(operation.request, operation.shared)

    def _drop(self, operation: QueuedOperation) -> None:
        self._intake.release(operation.size)
        if operation.shared is not None:
            operation.shared.close()

    def _made(self, model_id: str, outcome: Reply, size: int) -> None:
        self._intake.release(size)
        model = self._models.get(model_id)
        if outcome.error:
            self._forget(model_id, f"could not be made: {outcome.error}")
        elif model is not None:
            model.info = outcome.info or {}

    def _unloaded(self, model_id: str, outcome: Reply) -> None:
        if not outcome.error:
            self._forget(model_id, "was unloaded")

    def _of_session(self, session_id: str) -> list[str]:
        return [model.model_id for model in self._models.values() if model.session_id == session_id]

    def _leave_id(self, model_id: str) -> str:
        return self._trainer.future_id(model_id, "leave")

    def _leave(self, model_id: str) -> None:
        request_id = self._leave_id(model_id)
        self._futures.open(Future(request_id=request_id, owner=model_id, then=lambda done: self._left(model_id, done)))
        self._link.send(Request(request_id=request_id, op="leave_model", model_id=model_id))

    def _left(self, model_id: str, outcome: Reply) -> None:
        if not outcome.error:
            self._leaving.discard(model_id)

    def _forget(self, model_id: str, why: str) -> None:
        self._gone[model_id] = why
        if len(self._gone) > _REMEMBERED:
            del self._gone[next(iter(self._gone))]
        model = self._models.pop(model_id, None)
        for operation in model.order.abandon() if model is not None else ():
            self._futures.fail(operation.request.request_id, self.why_lost(model_id))
            if operation.shared is not None:
                operation.shared.close()


def digest_of_fields(op: str, fields: Mapping[str, Any]) -> bytes:
    """Tells operations of one number apart. A repeated save for sampling names another session, and is the same."""
    compared = {name: value for name, value in fields.items() if name != "sampling_session_seq_id"}
    return hashlib.blake2b(json.dumps([op, compared], sort_keys=True).encode(), digest_size=16).digest()
