"""The plainest client of a front, and the bodies that the public ones send."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
from running_front import RunningFront
from stub_engine import BASE_MODEL

from patience import PATIENCE_S
from trainmaster.trainer_service import schema, wire

PROTOBUF = {"content-type": wire.PROTOBUF}


class Client:
    """One session with one model, spoken to as the public clients do."""

    def __init__(self, front: RunningFront, door: str = "fireworks") -> None:
        self.front = front
        self.http = front.http
        self.door = {"X-Trainmaster-Door": door}
        self.session_id = self.post("create_session", tags=[])["session_id"]
        made = self.post("create_model", session_id=self.session_id, model_seq_id=0, base_model=BASE_MODEL)
        self.model_id = made["model_id"]
        assert self.result(made) == {"model_id": self.model_id, "type": "create_model"}

    def post(self, path: str, /, **fields: Any) -> dict[str, Any]:
        response = self.http.post(path, json=fields, headers=self.door)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def result(self, ack: dict[str, Any], accept: str = "application/json") -> dict[str, Any]:
        answer: dict[str, Any] = self.retrieve(ack, accept).json()
        return answer

    def retrieve(self, ack: dict[str, Any], accept: str = "application/json", **fields: Any) -> httpx.Response:
        return self.http.post(
            "retrieve_future", json={"request_id": ack["request_id"], **fields}, headers={"accept": accept}
        )

    def forward_backward(self, seq_id: int, **fields: Any) -> dict[str, Any]:
        return self.post("forward_backward", **{**json_pass(self.model_id, seq_id), **fields})

    def optim_step(self, seq_id: int, **fields: Any) -> dict[str, Any]:
        return self.post("optim_step", model_id=self.model_id, seq_id=seq_id, adam_params={}, **fields)

    def sampling_session(self, number: int = 0, **fields: Any) -> str:
        given = fields or {"base_model": BASE_MODEL}
        answer = self.post(
            "create_sampling_session", session_id=self.session_id, sampling_session_seq_id=number, **given
        )
        return str(answer["sampling_session_id"])

    def done(self) -> list[tuple[int, str]]:
        return [(seq_id, op) for model_id, seq_id, op in self.front.engine.done if model_id == self.model_id][1:]

    def requests(self, op: str) -> list[Any]:
        return [request for request in self.front.engine.requests if request.op == op]


def json_pass(model_id: str, seq_id: int, targets: int = 2) -> dict[str, Any]:
    datum = {
        "loss_fn_inputs": {"target_tokens": {"data": [3] * targets, "dtype": "int64", "shape": [targets]}},
        "model_input": {"chunks": [{"tokens": [1] * targets, "type": "encoded_text"}]},
    }
    given = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"forward_backward_input": given, "model_id": model_id, "seq_id": seq_id}


def protobuf_pass(model_id: str, seq_id: int, targets: int = 2, datums: int = 1) -> bytes:
    message = schema.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for _ in range(datums):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(4 * targets)
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dense, tensor.dtype = np.full(targets, 3, "<i8").tobytes(), 2
        tensor.shape.append(targets)
    return bytes(message.SerializeToString())


def sample(sampling_session_id: str, seq_id: int, **fields: Any) -> dict[str, Any]:
    return {
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3},
        "sampling_session_id": sampling_session_id,
        "seq_id": seq_id,
        "type": "sample",
        **fields,
    }


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
