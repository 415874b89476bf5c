"""What the front knows of the engine process: whether it is ready or pauses, what it saved, and when it is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from trainmaster.protocol.trainer_requests import is_model_id
from trainmaster.trainer_service.channel import FrontChannel
from trainmaster.trainer_service.front.futures import Future, Futures, RequestOutcome
from trainmaster.trainer_service.messages import EngineReady, EngineStopped, Message, Reply, Request, SharedBody

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
        """What to go on from when a model is lost; empty for what is no model."""
        if not is_model_id(owner):
            return ""
        own = [checkpoint for checkpoint in self._by_path.values() if checkpoint.get("model_id") == owner]
        training = [checkpoint["path"] for checkpoint in own if checkpoint.get("kind") == "training"]
        if training:
            return f"Its last saved state is {training[-1]}: make a new model and load it."
        if own:
            return f"Of it there are only weights for sampling, the last ones as {own[-1]['path']}."
        return "None of its states was saved."


class Link:
    """The connection to the engine. Belongs to one event loop."""

    def __init__(self, futures: Futures, saved: SavedCheckpoints) -> None:
        self._futures = futures
        self._saved = saved
        self._channel: FrontChannel | None = None
        self.ready = asyncio.Event()
        """Set when requests can be sent, or when the engine is gone and everything is answered at once."""
        self.ended = asyncio.Event()
        self.in_order = False
        """Whether the engine said that it ends."""
        self.gone = ""
        """Why the engine does nothing any more; empty while it does."""
        self.capabilities: Mapping[str, Any] = {"supported_models": []}
        self._lost: list[Future] = []

    def connect(self, end: socket.socket) -> None:
        self._channel = FrontChannel(end, received=self._received, closed=self._closed)

    def send(self, request: Request, shared: SharedBody | None = None) -> None:
        """The reply finishes the future with the request's id."""
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
                reason = f"the trainer had no room for this request: {error.strerror}"
                self._futures.finish(request.request_id, RequestOutcome(error=reason))

    def lose(self, future: Future) -> None:
        self._lost.append(future)
        error = f"The trainer has stopped: {self.gone}. {self._saved.advice(future.owner)}".rstrip()
        self._futures.finish(future.request_id, RequestOutcome(error=error))

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
                outcome = RequestOutcome(
                    fields=message.fields,
                    body=message.body,
                    error=message.error,
                    category=message.category,
                    info=message.info,
                )
                self._futures.finish(message.request_id, outcome)
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

    def _closed(self) -> None:
        self._end("its engine process died")

    def _end(self, why: str) -> None:
        if not self.gone:
            self.gone = why
            for future in self._futures.pending():
                self.lose(future)
            self._futures.let_go()
            self.ready.set()
            self.ended.set()
