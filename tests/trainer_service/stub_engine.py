"""An engine that computes next to nothing, but speaks the channel: settable delays, and results that can be foretold.

The log-probability of a target t is -(t % 7 + 1) / (1 + s) after s optimizer steps, so that a result shows which steps
came before it. A sample of a prompt is its sum, counted on.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from patience import PATIENCE_S
from trainmaster.engine.types import EngineError, PassResult, SampledSequence, SampleResult, StopReason
from trainmaster.trainer_service import wire
from trainmaster.trainer_service.channel import ChannelClosedError, EngineChannel
from trainmaster.trainer_service.messages import EngineReady, EngineStopped, Message, Reply, Request

BASE_MODEL = "stub/model"
CAPABILITIES = {
    "supported_models": [
        {"model_name": BASE_MODEL, "max_context_length": 4096, "trainable": True, "sampleable": True},
    ]
}


@dataclass
class StubModel:
    fields: Mapping[str, Any]
    steps: int = 0
    gradients: int = 0


@dataclass
class StubEngine:
    """Runs in a thread of its own; what it did can be looked at."""

    channel: EngineChannel
    pass_s: float = 0.0
    step_s: float = 0.0
    sample_s: float = 0.0
    may_pass: threading.Event | None = None
    """If given, no pass is done before it is set."""
    decodes: bool = True
    """False: a pass is answered without a look at its body."""
    result_tokens: int = 4
    done: list[tuple[str, int, str]] = field(default_factory=list)
    """Each operation as it was done: model, seq_id, op."""
    requests: list[Request] = field(default_factory=list)
    """The same, and all others, as they came; without their bodies."""
    digests: dict[str, bytes] = field(default_factory=dict)
    """Of their bodies."""
    models: dict[str, StubModel] = field(default_factory=dict)
    samplers: dict[str, int] = field(default_factory=dict)
    saved: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    work: list[tuple[float, float]] = field(default_factory=list)
    """When each pass and each step began and ended."""
    waits: list[float] = field(default_factory=list)
    """How long it had nothing to do after a pass or a step, each time that the next one was not at hand."""
    _due: list[tuple[float, int, Request]] = field(default_factory=list)
    _count: itertools.count[int] = field(default_factory=itertools.count)

    def start(self, *, ready: bool = True, checkpoints: tuple[Mapping[str, Any], ...] = ()) -> StubEngine:
        if ready:
            self.channel.send(EngineReady(capabilities=CAPABILITIES, checkpoints=checkpoints))
        self._thread = threading.Thread(target=self._run, name="stub-engine", daemon=True)
        self._thread.start()
        return self

    def say(self, message: Message) -> None:
        """Something of the caller's own."""
        self.channel.send(message)

    def stop(self, reason: str) -> None:
        """End in order."""
        self.channel.send(EngineStopped(reason=reason))
        self.die()

    def die(self) -> None:
        """End without a word."""
        self.channel.close()

    def _run(self) -> None:
        try:
            while True:
                message = self._next()
                if isinstance(message, Request):
                    self.requests.append(replace(message, body=None))
                    if message.body is not None:
                        self.digests[message.request_id] = hashlib.blake2b(message.body).digest()
                    self._take(message)
                while self._due and self._due[0][0] <= time.monotonic():
                    self._answer(heapq.heappop(self._due)[2])
        except ChannelClosedError:
            return

    def _next(self) -> Message | None:
        if self._due:
            return self.channel.receive(max(0.0, self._due[0][0] - time.monotonic()))
        if (message := self.channel.receive(0)) is not None:
            return message
        began = time.monotonic()
        message = self.channel.receive()
        if self.work:
            self.waits.append(time.monotonic() - began)
        return message

    def _take(self, request: Request) -> None:
        if request.op == "asample":
            heapq.heappush(self._due, (time.monotonic() + self.sample_s, next(self._count), request))
        elif request.op == "cancel":
            self.cancelled.add(request.fields["request_id"])
            for _, _, waiting in self._due:
                if waiting.request_id in self.cancelled:
                    self.say(Reply(request_id=waiting.request_id, error="it was cancelled", category="user"))
            self._due = [entry for entry in self._due if entry[2].request_id not in self.cancelled]
            heapq.heapify(self._due)
        elif request.op == "end_session":
            for model_id in request.fields["model_ids"]:
                self.models.pop(model_id, None)
        else:
            self._answer(request)

    def _answer(self, request: Request) -> None:
        if request.model_id:
            self.done.append((request.model_id, request.seq_id, request.op))
        began = time.monotonic()
        try:
            reply = getattr(self, f"_do_{request.op}")(request)
        except EngineError as error:
            reply = Reply(request_id=request.request_id, error=str(error), category=str(error.blame))
        except Exception as error:
            # A field of another type than the stub takes for granted; an engine has words for it.
            reply = Reply(request_id=request.request_id, error=f"{type(error).__name__}: {error}", category="user")
        if request.seq_id:
            self.work.append((began, time.monotonic()))
        self.say(reply)

    def _model(self, request: Request) -> StubModel:
        if request.model_id not in self.models:
            raise EngineError(f"no model {request.model_id}")
        return self.models[request.model_id]

    def _do_create_model(self, request: Request) -> Reply:
        if request.fields.get("base_model") != BASE_MODEL:
            raise EngineError(f"there is no base model {request.fields.get('base_model')!r} here")
        self.models[request.model_id] = StubModel(fields=request.fields)
        lora = request.fields.get("lora_config") or {}
        info = {"base_model": BASE_MODEL, "tokenizer_id": "stub/tokenizer"}
        return Reply(
            request_id=request.request_id,
            fields={"model_id": request.model_id, "type": "create_model"},
            info={**info, "is_lora": bool(lora.get("rank")), "lora_rank": lora.get("rank")},
        )

    def _do_forward_backward(self, request: Request) -> Reply:
        model = self._model(request)
        if self.may_pass is not None:
            self.may_pass.wait(PATIENCE_S)
        time.sleep(self.pass_s)
        if not self.decodes:
            logprobs = np.zeros(self.result_tokens, np.float32)
            result = PassResult(outputs=({"logprobs": logprobs},), metrics={"loss:sum": float(request.seq_id)})
            return Reply(request_id=request.request_id, body=wire.encode_pass_result(result))
        assert request.body is not None
        given = wire.decode_pass(request.body, request.content_type, request.encoding)
        outputs, loss = [], 0.0
        for datum in given.data:
            targets = datum.inputs["target_tokens"]
            logprobs = (-(targets % 7 + 1) / (1 + model.steps)).astype(np.float32)
            weights = datum.inputs.get("weights", np.ones(targets.shape, np.float32))
            loss += float(-(logprobs * weights).sum())
            outputs.append({"logprobs": logprobs})
        model.gradients += int(given.backward)
        metrics = {"loss:sum": loss, "steps_before:max": float(model.steps), "gradients_before:max": model.gradients}
        result = PassResult(outputs=tuple(outputs), metrics=metrics)
        return Reply(request_id=request.request_id, body=wire.encode_pass_result(result))

    _do_forward = _do_forward_backward

    def _do_optim_step(self, request: Request) -> Reply:
        model = self._model(request)
        time.sleep(self.step_s)
        model.steps += 1
        metrics = {"steps": float(model.steps), "gradients": float(model.gradients)}
        model.gradients = 0
        if request.fields.get("adam_params", {}).get("learning_rate") == float("inf"):
            metrics["grad_norm"] = float("nan")
        return Reply(request_id=request.request_id, fields={"type": "optim_step", "metrics": metrics})

    def _do_save_weights(self, request: Request) -> Reply:
        model = self._model(request)
        path = _path(request, "weights")
        self.saved[path] = model.steps
        info = checkpoint(path, request.model_id, "training", request.door)
        return Reply(request_id=request.request_id, fields={"path": path, "type": "save_weights"}, info=info)

    def _do_save_weights_for_sampler(self, request: Request) -> Reply:
        model = self._model(request)
        if (sampling_session_id := request.fields.get("sampling_session_id")) is not None:
            self.samplers[sampling_session_id] = model.steps
            return Reply(request_id=request.request_id, fields={"sampling_session_id": sampling_session_id})
        path = _path(request, "sampler_weights")
        self.saved[path] = model.steps
        info = checkpoint(path, request.model_id, "sampler", request.door)
        return Reply(request_id=request.request_id, fields={"path": path}, info=info)

    def _do_load_weights(self, request: Request) -> Reply:
        path = request.fields["path"]
        if path not in self.saved:
            raise EngineError(f"nothing was saved as {path!r}")
        self._model(request).steps = self.saved[path]
        return Reply(request_id=request.request_id, fields={"path": path, "model_id": request.model_id})

    def _do_load_adapter(self, request: Request) -> Reply:
        self._model(request)
        path = request.fields["adapter_path"]
        fields = {"model_id": request.model_id, "adapter_path": path, "type": "load_adapter"}
        return Reply(request_id=request.request_id, fields=fields)

    def _do_unload_model(self, request: Request) -> Reply:
        self._model(request)
        del self.models[request.model_id]
        return Reply(request_id=request.request_id, fields={"model_id": request.model_id, "type": "unload_model"})

    def _do_leave_model(self, request: Request) -> Reply:
        self.models.pop(request.model_id, None)
        return Reply(request_id=request.request_id, fields={"model_id": request.model_id, "type": "unload_model"})

    def _do_create_sampling_session(self, request: Request) -> Reply:
        path = request.fields.get("model_path")
        if path is not None and path not in self.saved:
            raise EngineError(f"nothing was saved as {path!r}")
        sampling_session_id = request.fields["sampling_session_id"]
        self.samplers[sampling_session_id] = self.saved[path] if path else 0
        return Reply(request_id=request.request_id, fields={"sampling_session_id": sampling_session_id})

    def _do_asample(self, request: Request) -> Reply:
        assert request.body is not None
        given = wire.decode_sample(request.request_id, request.body, request.encoding)
        first = sum(given.prompt) + self.samplers[request.fields["sampling_session_id"]]
        length = 4 if given.max_tokens is None else given.max_tokens
        sequences = tuple(
            SampledSequence(
                tokens=((first + index + np.arange(length)) % 1000).astype(np.int32),
                logprobs=np.full(length, -0.5, np.float32),
                stop_reason=StopReason.LENGTH,
            )
            for index in range(given.num_samples)
        )
        logprobs = np.full(len(given.prompt), -1.0, np.float32)
        logprobs[:1] = np.nan
        result = SampleResult(sequences=sequences, prompt_logprobs=logprobs if given.prompt_logprobs else None)
        return Reply(request_id=request.request_id, body=wire.encode_sample_result(result))


def checkpoint(path: str, model_id: str, kind: str = "training", door: str = "fireworks") -> dict[str, Any]:
    """What an engine tells of something that was saved."""
    return {
        "path": path,
        "kind": kind,
        "model_id": model_id,
        "door": door,
        "base_model": BASE_MODEL,
        "is_lora": True,
        "lora_rank": 8,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
    }


def _path(request: Request, kind: str) -> str:
    name = request.fields["path"]
    return f"tinker://{request.model_id}/{kind}/{name}" if request.door == "tinker" else str(name)
