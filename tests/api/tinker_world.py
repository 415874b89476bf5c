"""The root Tinker door over a real store, and a stand-in for the trainers behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from api_world import EVERYTHING, VAULT, PromptServer, Served, World, wait_for
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from model_config import model_config
from patience import PATIENCE_S
from trainmaster.backends import capabilities_of
from trainmaster.protocol.trainer_requests import PeekError, Trainer, peek_protobuf
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.base_models import BaseModels
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.core.job import Job
from trainmaster.server.http.context import ApiContext
from trainmaster.server.settings.settings import NamedPath
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots
from trainmaster.server.store.database import Database
from trainmaster.server.store.job_list import JobQuery, page

MODEL = "Qwen/Qwen3-8B"
ALIAS = "accounts/fireworks/models/qwen3-8b"
OTHER = "other/model"
CONTEXT_LENGTH = 4096


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A request that reached the trainer."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class HalfResponse(Response):
    """Says that it has a hundred bytes, and breaks off after one."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"100")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        raise ConnectionError


@dataclass(kw_only=True)
class StandIn:
    """A trainer that acknowledges everything, keeps what it was sent, and answers futures as it is told."""

    address: str = ""
    trainer: Trainer = field(default=Trainer("job-none", 0))
    sent: list[Sent] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    """By the end of a future's id; a dict is answered as JSON, bytes as protobuf, a list in pieces. Others get an empty
    result."""
    refuse_samples: bool = False
    busy: list[str] = field(default_factory=list)
    """Operations that are answered with 429, each once."""
    breaks_off: bool = False
    """Answers end in the middle."""
    gate: threading.Event = field(default_factory=threading.Event)
    """While it is not set, futures are pending."""

    def __post_init__(self) -> None:
        self.gate.set()

    @contextlib.contextmanager
    def serving(self) -> Iterator[StandIn]:
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, lifespan="off", log_config=None, timeout_keep_alive=int(PATIENCE_S)
        )
        server = self._server = PromptServer(config)
        thread = self._thread = threading.Thread(target=server.run)
        thread.start()
        try:
            wait_for(lambda: server.started)
            self.address = f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """End, as a trainer does that is killed."""
        self.gate.set()
        self._server.force_exit = True
        self._server.should_exit = True
        self._thread.join()

    def of(self, operation: str) -> list[Sent]:
        return [sent for sent in self.sent if sent.path == f"/api/v1/{operation}"]

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        sent = Sent(method=request.method, path=request.url.path, headers=dict(request.headers), body=body)
        self.sent.append(sent)
        if self.breaks_off:
            return HalfResponse()
        operation = sent.path.removeprefix("/api/v1/")
        if operation in self.busy:
            self.busy.remove(operation)
            return JSONResponse({"error": "busy"}, 429, {"retry-after": "1"})
        if operation == "retrieve_future":
            return await self._future(sent.json()["request_id"])
        prefix = f"{self.trainer.job_id}:{self.trainer.attempt}"
        if operation == "create_sampling_session":
            fields = sent.json()
            number = fields["sampling_session_seq_id"]
            suffix = f"@{self.trainer.job_id}.{self.trainer.attempt}"
            return JSONResponse({"sampling_session_id": f"{fields['session_id']}:sample:{number}{suffix}"})
        if operation == "asample" and self.refuse_samples:
            return JSONResponse({"error": "too many"}, 429, {"retry-after": "1"})
        if operation == "asample":
            fields = sent.json()
            request_id = f"{prefix}:{fields['sampling_session_id']}:{fields['seq_id']}"
            numbers = [f"{request_id}:{n}" for n in range(fields["num_samples"])]
            return JSONResponse({"request_id": request_id, "sample_sequence_ids": numbers})
        if operation.startswith("samplers/"):
            return JSONResponse({"sampler_id": operation.removeprefix("samplers/"), "base_model": MODEL})
        if operation.startswith("sessions/") or operation == "cancel_future":
            return JSONResponse({})
        if sent.headers.get("content-type") == "application/x-protobuf":
            head = body[:4096]
            model_id, seq_id = None, len(self.sent)
            with contextlib.suppress(PeekError):  # it may be compressed
                model_id = peek_protobuf(lambda at, count: head[at : at + count], len(head), ("model_id",))["model_id"]
        else:
            fields = sent.json()
            model_id = fields.get("model_id") or f"{fields['session_id']}:train:{fields['model_seq_id']}"
            seq_id = fields.get("seq_id", 0)
        return JSONResponse({"request_id": f"{prefix}:{model_id}:{seq_id}", "model_id": model_id})

    async def _future(self, request_id: str) -> Response:
        deadline = time.monotonic() + 1.0
        while not self.gate.is_set():
            if time.monotonic() > deadline:
                pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
                return JSONResponse(pending, status_code=408)
            await asyncio.sleep(0.01)
        result = next((value for end, value in list(self.results.items()) if request_id.endswith(end)), {})
        if isinstance(result, list):
            return StreamingResponse(iter(result))
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)


@dataclass(kw_only=True)
class TinkerWorld(World):
    """A world whose server knows three names of two models."""

    models: BaseModels

    @staticmethod
    @contextlib.contextmanager
    def open(directory: Path) -> Iterator[TinkerWorld]:
        paths = {}
        for name in ("qwen", "other"):
            paths[name] = directory / name
            paths[name].mkdir()
            (paths[name] / "config.json").write_text(json.dumps(model_config(max_position_embeddings=CONTEXT_LENGTH)))
        aliases = [NamedPath(MODEL, paths["qwen"]), NamedPath(ALIAS, paths["qwen"]), NamedPath(OTHER, paths["other"])]
        models = BaseModels(aliases, artifacts=directory / ARTIFACTS)
        database = Database.open(f"sqlite:///{directory / 'store.db'}")
        try:
            commands = Commands(
                database,
                admission=Admission(
                    backends={"local": capabilities_of("local")}, default_backend="local", models=models
                ),
                vault=VAULT,
                hint=lambda subject: None,
            )
            roots = Roots({name: directory / name for name in (RUNS, ARTIFACTS, BLOBS)})
            yield TinkerWorld(database=database, roots=roots, commands=commands, models=models)
        finally:
            database.close()

    def context(self, **changes: Any) -> ApiContext:
        return super().context(**{"models": self.models, **changes})


@dataclass(frozen=True, kw_only=True)
class Client:
    """A Tinker client of one account, as plain as it gets."""

    http: httpx.Client
    world: TinkerWorld
    account_id: str
    key: str

    @staticmethod
    @contextlib.contextmanager
    def of(served: Served, world: TinkerWorld, account_id: str = "") -> Iterator[Client]:
        """One of an account; of a new one, when it has no name."""
        account_id = account_id or f"account-{secrets.token_hex(4)}"
        key = world.key(account_id)
        with httpx.Client(
            base_url=f"{served.url}/api/v1/", headers={"X-API-Key": key}, verify=False, timeout=PATIENCE_S
        ) as http:
            yield Client(http=http, world=world, account_id=account_id, key=key)

    def post(self, operation: str, document: Any = None, *, expect: int = 200, **headers: str) -> Any:
        return self.call("POST", operation, document, expect=expect, **headers)

    def get(self, path: str, *, expect: int = 200, **params: Any) -> Any:
        response = self.http.get(path, params=params)
        assert response.status_code == expect, response.text
        return response.json()

    def call(self, method: str, path: str, document: Any = None, *, expect: int = 200, **headers: str) -> Any:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        response = self.http.request(method, path, json={} if document is None else document, headers=sent)
        assert response.status_code == expect, response.text
        return response.json()

    def session(self, **fields: Any) -> str:
        document = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", **fields}
        return str(self.post("create_session", document)["session_id"])

    def ask_for_model(self, session_id: str, number: int = 0, base_model: str = MODEL, **fields: Any) -> Any:
        document = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": base_model,
            "lora_config": {"rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True},
            "type": "create_model",
            **fields,
        }
        return self.post("create_model", document)

    def result(self, ack: Any) -> Any:
        """What a future says when it is not pending any more."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            body = {"request_id": ack["request_id"], "allow_metadata_only": True}
            response = self.http.post("retrieve_future", json=body)
            if response.status_code != 408:
                assert response.status_code == 200, response.text
                return response.json()
            assert response.json()["type"] == "try_again", response.text
        raise TimeoutError(f"{ack} is still pending")

    def jobs(self) -> list[Job]:
        """The account's jobs, the oldest first."""
        with self.world.database.read() as connection:
            found = page(connection, EVERYTHING, JobQuery(order_by="created_at", page_size=100)).jobs
        return [job for job in found if job.account_id == self.account_id]

    def trainer_job(self) -> Job:
        """The one job that was made for the account's models, once it is there."""
        (job,) = wait_for(self.jobs)
        return job

    def start_trainer(self, trainer: StandIn, job_id: str | None = None) -> Job:
        """Have the account's trainer run, at the address of a stand-in."""
        job_id = job_id or self.trainer_job().job_id
        job = self.world.start(job_id)
        trainer.trainer = Trainer(job_id, job.live.number)
        return self.world.see(job_id, endpoint=trainer.address)

    def model(self, trainer: StandIn, number: int = 0, **fields: Any) -> str:
        """A model that is made, with the account's trainer running."""
        ack = self.ask_for_model(self.session(), number, **fields)
        job = self.trainer_job()
        if job.endpoint is None:
            self.start_trainer(trainer, job.job_id)
        return str(self.result(ack)["model_id"])

    def save(self, model_id: str, name: str, kind: str = "training", **attributes: Any) -> str:
        """Let the account's trainer report a checkpoint; returns its path on the disk."""
        job = self.trainer_job()
        place = f"{job.job_id}/checkpoints/{kind}/{name}"
        record = {
            "type": "checkpoint",
            "t": time.time(),
            "checkpoint_id": f"{kind}-{name}-{model_id}",
            "step": 1,
            "size_bytes": 10,
            "root": ARTIFACTS,
            "path": place,
            "kind": kind,
            "name": name,
            "attributes": {
                "door": "tinker",
                "model_id": model_id,
                "session_id": model_id.partition(":")[0],
                "base_model": MODEL,
                "is_lora": True,
                "lora_rank": 8,
                "train_mlp": True,
                "train_attn": True,
                "train_unembed": False,
                **attributes,
            },
        }
        self.world.see(job.job_id, record)
        return str(self.world.roots.path(ARTIFACTS, place))
