"""Every request that a public `tinker` client can make, each as it makes it, over plain HTTP.

The clients hide what they are answered behind retries; here it is seen.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from client_model import HUB_NAME
from real_server import PATIENCE_S, RealServer

PREFIX = "/api/v1"
TOKENS = [4, 7, 10, 13, 16, 19]
LORA = {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
PROMPT = {"chunks": [{"tokens": TOKENS, "type": "encoded_text"}]}
DATUM = {
    "model_input": {"chunks": [{"tokens": TOKENS[:-1], "type": "encoded_text"}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [5]},
        "weights": {"data": [1.0] * 5, "dtype": "float32", "shape": [5]},
    },
}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy"}
ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@dataclass(kw_only=True)
class Plain:
    """A session with a model, weights that it saved and a sampler of them, for whoever wants to ask of them."""

    server: RealServer
    http: httpx.Client
    session_id: str = ""
    model_id: str = ""
    run_id: str = ""
    """The model that saved `kept`."""
    sampler_id: str = ""
    sample_id: str = ""
    """The future of a sample that is done."""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    """Of what is asked of the model."""
    others: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    """Of models, samplers, samples and names."""

    def prepare(self) -> Plain:
        """Make them; the server starts a trainer for it."""
        self.session_id = self.new_session()
        self.model_id = self.run_id = self.new_model(self.session_id)
        self.done("forward_backward", self.work(forward_backward_input=PASS))
        self.done("optim_step", self.work(adam_params=ADAM))
        self.save("kept")
        asked = self.post("create_sampling_session", self.sampling_session()).json()
        self.sampler_id = asked["sampling_session_id"]
        ack = self.post("asample", self.sample()).json()
        self.sample_id = ack["request_id"]
        self.result(ack)
        return self

    def with_another_model(self) -> Plain:
        """The same, with a model of its own."""
        return replace(self, model_id=self.new_model(self.session_id), numbers=itertools.count(1))

    # -- asking --

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        content = {} if body is None else {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {"X-API-Key": self.server.key, "Content-Type": "application/json", **options.pop("headers", {})}
        return self.http.request(method, f"{self.server.url}{PREFIX}{path}", headers=headers, **content, **options)

    def post(self, operation: str, body: Any) -> httpx.Response:
        return self.request("POST", f"/{operation}", body)

    def result(self, ack: Mapping[str, Any], kind: str = "") -> Any:
        """What the future of an acknowledged request says in the end; `kind` is what clients call the request."""
        deadline = time.monotonic() + PATIENCE_S
        headers = {"X-Tinker-Request-Type": kind}
        while time.monotonic() < deadline:
            body = {"request_id": ack["request_id"]}
            answer = self.request("POST", "/retrieve_future", body, headers=headers)
            if (found := answer.json()).get("type") != "try_again":
                assert answer.status_code == 200, answer.text
                return found
            assert answer.status_code == 408, answer.text
        raise AssertionError(f"{ack} is still pending")

    def done(self, operation: str, body: Any) -> Any:
        """What comes of something that must succeed."""
        ack = self.post(operation, body)
        assert ack.status_code == 200, ack.text
        found = self.result(ack.json(), operation.title().replace("_", ""))
        assert "error" not in found, found
        return found

    # -- bodies --

    def work(self, **fields: Any) -> dict[str, Any]:
        """The next thing that is asked of the model."""
        return {"model_id": self.model_id, "seq_id": next(self.numbers), **fields}

    def new_session(self) -> str:
        body = {"tags": [], "user_metadata": {"purpose": "a test"}, "sdk_version": "0.36.0", "type": "create_session"}
        return str(self.post("create_session", body).json()["session_id"])

    def model(self, session_id: str, **fields: Any) -> dict[str, Any]:
        number = next(self.others)
        return {"session_id": session_id, "model_seq_id": number, "base_model": HUB_NAME, "lora_config": LORA, **fields}

    def new_model(self, session_id: str) -> str:
        return str(self.done("create_model", self.model(session_id))["model_id"])

    def sampling_session(self) -> dict[str, Any]:
        number = next(self.others)
        return {"session_id": self.session_id, "sampling_session_seq_id": number, "base_model": HUB_NAME}

    def sample(self, **fields: Any) -> dict[str, Any]:
        return {
            "sampling_session_id": self.sampler_id,
            "seq_id": next(self.others),
            "num_samples": 1,
            "prompt": PROMPT,
            "sampling_params": {"max_tokens": 2, "temperature": 1.0, "seed": 1},
            **fields,
        }

    def save(self, name: str) -> str:
        """Saved weights of the model, as addresses name them."""
        self.done("save_weights", self.work(path=name))
        return f"/training_runs/{self.model_id}/checkpoints/weights/{name}"

    def name(self) -> str:
        return f"name-{next(self.others)}"


Asked = tuple[str, Any]
"""A path, and the body that goes there."""


def _at(path: str, body: Any = None) -> Callable[[Plain], Asked]:
    return lambda _: (path, body)


CALLS: Mapping[str, Callable[[Plain], Asked]] = {
    "POST /create_session": _at("/create_session", {"tags": ["a"], "user_metadata": {}, "sdk_version": "0.36.0"}),
    "POST /session_heartbeat": lambda it: ("/session_heartbeat", {"session_id": it.session_id}),
    "GET /sessions": _at("/sessions"),
    "GET /sessions/{}": lambda it: (f"/sessions/{it.session_id}", None),
    "POST /sessions/search": lambda it: ("/sessions/search", {"session_id": it.session_id, "limit": 5}),
    "PUT /sessions/{}/project": lambda it: (f"/sessions/{it.session_id}/project", {"project_id": "p"}),
    "GET /sessions/{}/trace_export": lambda it: (f"/sessions/{it.session_id}/trace_export", None),
    "POST /sessions/{}/finish": lambda it: (
        f"/sessions/{it.new_session()}/finish",
        {"reason": {"type": "success"}, "detail": None},
    ),
    "GET /healthz": _at("/healthz"),
    "GET /get_server_capabilities": _at("/get_server_capabilities"),
    "POST /client/config": _at("/client/config", {"sdk_version": "0.36.0"}),
    "POST /client/dynamic_config": _at("/client/dynamic_config", {"sdk_version": "0.36.0"}),
    "POST /telemetry": _at("/telemetry", {"events": [], "platform": "p", "sdk_version": "0.36.0", "session_id": "s"}),
    "GET /auth/apikey/me": _at("/auth/apikey/me"),
    "DELETE /auth/apikey/me": _at("/auth/apikey/me"),
    "POST /auth/token": _at("/auth/token", {}),
    "GET /audit": _at("/audit"),
    "GET /billing/usage/events": _at("/billing/usage/events?start_time=2025-01-01T00:00:00Z"),
    "GET /billing/usage/checkpoints/current": _at("/billing/usage/checkpoints/current"),
    "POST /create_model": lambda it: ("/create_model", it.model(it.session_id)),
    "POST /get_info": lambda it: ("/get_info", {"model_id": it.model_id}),
    "POST /forward": lambda it: ("/forward", it.work(forward_input=PASS)),
    "POST /forward_backward": lambda it: ("/forward_backward", it.work(forward_backward_input=PASS)),
    "POST /optim_step": lambda it: ("/optim_step", it.work(adam_params=ADAM)),
    "POST /save_weights": lambda it: ("/save_weights", it.work(path=it.name())),
    "POST /save_weights_for_sampler": lambda it: ("/save_weights_for_sampler", it.work(path=it.name())),
    "POST /save_weights_external": lambda it: ("/save_weights_external", it.work(path=it.name())),
    "POST /load_weights": lambda it: (
        "/load_weights",
        it.work(path=f"tinker://{it.run_id}/weights/kept", optimizer=True),
    ),
    "POST /unload_model": lambda it: ("/unload_model", {"model_id": it.new_model(it.session_id)}),
    "POST /create_custom_loss": lambda it: (
        "/create_custom_loss",
        {"session_id": it.session_id, "custom_loss_seq_id": 0, "name": "n", "inputs": [], "graph": {"nodes": []}},
    ),
    "POST /copy_weights": lambda it: (
        "/copy_weights",
        {"source_path": f"tinker://{it.run_id}/weights/kept", "destination_project_id": "p"},
    ),
    "POST /weights_info": lambda it: ("/weights_info", {"tinker_path": f"tinker://{it.run_id}/weights/kept"}),
    "POST /create_sampling_session": lambda it: ("/create_sampling_session", it.sampling_session()),
    "POST /join_sampling_session": lambda it: ("/join_sampling_session", {"sampling_session_id": it.sampler_id}),
    "GET /samplers/{}": lambda it: (f"/samplers/{it.sampler_id}", None),
    "POST /asample": lambda it: ("/asample", it.sample()),
    "POST /retrieve_future": lambda it: ("/retrieve_future", {"request_id": it.sample_id, "allow_metadata_only": True}),
    "POST /retrieve_futures": lambda it: (
        "/retrieve_futures",
        {
            "target": {"type": "sampling_session", "sampling_session_id": it.sampler_id, "cloned_sampler_id": 0},
            "prev_cursor": 0,
            "retrieved_request_ids": [],
        },
    ),
    "POST /cancel_future": lambda it: ("/cancel_future", {"request_id": it.sample_id}),
    "GET /training_runs": _at("/training_runs?limit=5"),
    "GET /training_runs/{}": lambda it: (f"/training_runs/{it.model_id}", None),
    "GET /training_runs/{}/checkpoints": lambda it: (f"/training_runs/{it.model_id}/checkpoints", None),
    "GET /checkpoints": _at("/checkpoints"),
    "POST /training_runs/{}/checkpoints/{}/publish": lambda it: (f"{_kept(it)}/publish", None),
    "DELETE /training_runs/{}/checkpoints/{}/publish": lambda it: (f"{_kept(it)}/publish", None),
    "PUT /training_runs/{}/checkpoints/{}/ttl": lambda it: (f"{_kept(it)}/ttl", {"ttl_seconds": 3600}),
    "GET /training_runs/{}/checkpoints/{}/archive": lambda it: (f"{_kept(it)}/archive", None),
    "GET /training_runs/{}/checkpoints/{}/external_weights_urls": lambda it: (
        f"{_kept(it)}/external_weights_urls",
        None,
    ),
    "DELETE /training_runs/{}/checkpoints/{}": lambda it: (it.save(it.name()), None),
}
"""By the name that reflection gives to a request, what is sent."""


def _kept(it: Plain) -> str:
    return f"/training_runs/{it.run_id}/checkpoints/weights/kept"
