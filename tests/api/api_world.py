"""A real API over a real store, served on loopback, and jobs that are driven through the real core."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from sqlalchemy import Connection

from patience import PATIENCE_S
from trainmaster.backends import capabilities_of
from trainmaster.backends.worker_package import packed_worker
from trainmaster.protocol.run_directory import RunDirectory, log_stream, metrics_stream
from trainmaster.server.app import create_app
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.clusters import Clusters
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.coordinator.data_checks import DataChecks
from trainmaster.server.coordinator.explain import Explainer
from trainmaster.server.coordinator.launch import JobSecrets, attempt_request, compiled_launch
from trainmaster.server.coordinator.retention import Collector
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.core import observations
from trainmaster.server.core.accounts import KeyScope, key_digest, key_id_of, new_key
from trainmaster.server.core.job import Change, Job, JobProgress
from trainmaster.server.core.reports import AttemptObservation, Liveness, NodeObservation
from trainmaster.server.core.resources import Gpu, Node, Share
from trainmaster.server.core.retention import RetentionPolicy
from trainmaster.server.core.states import JobStatus
from trainmaster.server.doors.tinker.sessions import collect_sessions
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.middleware import ServerApp
from trainmaster.server.settings.encryption import Sealer
from trainmaster.server.settings.settings import Settings
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots, run_directory
from trainmaster.server.store import accounts, jobs, nodes
from trainmaster.server.store.accounts import ApiKey
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

SEALER = Sealer(bytes(32))
VAULT = JobSecrets(SEALER)
EVERYTHING = Scope.everything()
COMMAND: dict[str, Any] = {
    "name": "n",
    "workload": {"kind": "command", "argv": ["sh", "-c", "echo hi"]},
    "resource_config": {"gpu_count": 0},
}
SERVICE: dict[str, Any] = {
    "name": "s",
    "workload": {"kind": "service", "argv": ["serve"]},
    "resource_config": {"gpu_count": 0},
}


def roomy_node(node_id: str) -> Node:
    """A node that no test fills."""
    return Node(
        node_id=node_id,
        backend="roomy",
        hostname=node_id,
        cpu_cores=1_000_000,
        ram_mb=2**40,
        storage_mb=2**40,
        gpus=tuple(Gpu(index=i, device=str(i), type="H100", memory_mb=80_000) for i in range(8)),
        slots=1_000_000,
        last_seen_at=time.time(),
    )


def wait_for(condition: Callable[[], Any]) -> Any:
    """What a condition gives once it gives something."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise TimeoutError(f"{condition} gave nothing in {PATIENCE_S:g} s")


@dataclass(kw_only=True)
class World:
    """A store, files and commands; what the API stands on."""

    database: Database
    roots: Roots
    commands: Commands
    hints: list[str] = field(default_factory=list)

    @staticmethod
    @contextlib.contextmanager
    def open(directory: Path) -> Iterator[World]:
        database = Database.open(f"sqlite:///{directory / 'store.db'}")
        try:
            roots = Roots({name: directory / name for name in (RUNS, ARTIFACTS, BLOBS)})
            commands = Commands(
                database,
                admission=Admission(backends={"local": capabilities_of("local")}, default_backend="local"),
                vault=VAULT,
                hint=lambda subject: None,
            )
            yield World(database=database, roots=roots, commands=commands)
        finally:
            database.close()

    def context(self, **changes: Any) -> ApiContext:
        """A context with changes to its own fields and to the settings'."""
        settable = {each.name for each in fields(Settings)} - {each.name for each in fields(ApiContext)}
        given = {name: changes.pop(name) for name in settable & changes.keys()}
        settings = Settings(**{"data_dir": self.roots.path(RUNS, "").parent, **given})
        return ApiContext(
            **{
                "settings": settings,
                "data_checks": DataChecks(settings),
                "database": self.database,
                "commands": self.commands,
                "explainer": Explainer(self.database),
                "vault": VAULT,
                "clusters": Clusters(self.database, SEALER),
                "worker_package": lambda: packed_worker(self.roots.path(RUNS, "").parent / "workers"),
                "subscriptions": Subscriptions(self.database, SEALER, private_addresses=True),
                "roots": self.roots,
                "collector": Collector(self.database, self.roots, RetentionPolicy(), also=(collect_sessions,)),
                "hint": self.hints.append,
                **changes,
            }
        )

    def key(self, account_id: str, *scopes: KeyScope) -> str:
        """A new key of an account."""
        key = new_key()
        stored = ApiKey(
            key_id=key_id_of(key),
            account_id=account_id,
            name="tester",
            scopes=tuple(scopes or KeyScope),
            hash=key_digest(key),
            created_at=time.time(),
        )

        def work(connection: Any) -> None:
            accounts.ensure(connection, EVERYTHING, account_id, time.time())
            accounts.create_key(connection, EVERYTHING, stored)

        self.database.write_now(work)
        return key

    def job(self, job_id: str) -> Job:
        with self.database.read() as connection:
            return jobs.get(connection, EVERYTHING, job_id, deleted=True)

    def change(self, job_id: str, decide: Callable[[Job], Change | None]) -> Job:
        """Have the core decide something about a job, and store it."""
        change = decide(self.job(job_id))
        assert change is not None
        assert self.database.write_now(lambda connection: jobs.apply(connection, EVERYTHING, change))
        return change.job

    def queue(self, job_id: str) -> Job:
        """Admit a job that waits for it."""
        job = self.job(job_id)
        if job.status is not JobStatus.PENDING:
            return job
        return self.change(job_id, lambda job: observations.admit(job, now=time.time()))

    def place(self, job_id: str, *shares: Share) -> Job:
        """Open an attempt and lay out its run directory."""
        shares = shares or (Share(node_id="here"),)
        self._provide({share.node_id for share in shares})
        placed = self.change(
            job_id,
            lambda job: observations.place(job, now=time.time(), shares=shares, token=secrets.token_urlsafe(24)),
        )
        request = attempt_request(
            placed,
            compiled_launch(placed),
            nodes={},
            roots=self.roots,
            resume=None,
            hint_socket=None,
            server_url="http://127.0.0.1:1",
        )
        self.directory(placed).create(request)
        return placed

    def _provide(self, node_ids: set[str]) -> None:
        """Have nodes with room for everything, where there are none of these names."""

        def work(connection: Connection) -> None:
            known = {node.node_id for node in nodes.all(connection, EVERYTHING)}
            nodes.put(connection, EVERYTHING, [roomy_node(node_id) for node_id in sorted(node_ids - known)])

        self.database.write_now(work)

    def see(self, job_id: str, *records: dict[str, Any], **more: Any) -> Job:
        """Let every node of the current attempt say something."""
        progress = more.pop("progress", None)

        def observe(job: Job) -> Change | None:
            node = NodeObservation(liveness=Liveness.ALIVE, records=records, **more)
            observation = AttemptObservation(
                attempt=job.live.number, nodes=[node] * len(job.live.shares), progress=progress
            )
            return observations.observe(job, observation, now=time.time())

        return self.change(job_id, observe)

    def start(self, job_id: str, *shares: Share) -> Job:
        """Bring a job from anywhere before its start to TRAINING."""
        self.queue(job_id)
        self.place(job_id, *shares)
        return self.see(job_id, {"type": "claimed"}, {"type": "started"}, {"type": "ready"})

    def report(self, job_id: str, progress: JobProgress) -> Job:
        return self.see(job_id, progress=progress)

    def save(self, job_id: str, checkpoint_id: str, step: int, **metrics: float) -> Job:
        """Register a checkpoint."""
        record = {
            "type": "checkpoint",
            "t": time.time(),
            "checkpoint_id": checkpoint_id,
            "step": step,
            "metrics": metrics,
            "size_bytes": 10,
            "root": ARTIFACTS,
            "path": f"{job_id}/checkpoints/{checkpoint_id}",
        }
        return self.see(job_id, record)

    def end(self, job_id: str, reason: str = "SUCCEEDED", message: str = "", **more: Any) -> Job:
        """End the current attempt."""
        return self.see(job_id, exit={"reason": reason, "message": message, "ended_at": time.time(), **more})

    def directory(self, job: Job) -> RunDirectory:
        return run_directory(self.roots, job.job_id, job.attempt_count)

    def write(self, job: Job, text: bytes | str, *, at: float | None = None, **where: Any) -> None:
        """Let a rank of the current attempt write something, as the worker's index would tell of it."""
        data = text.encode() if isinstance(text, str) else text
        place = {"node": 0, "step": "main", "rank": 0, "channel": "out", **where}
        path = self.directory(job).path / log_stream(**place)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)
        if at is not None:
            with path.with_name(f"{path.name}.times").open("a") as file:
                file.write(f"{at:.3f} {path.stat().st_size}\n")

    def measure(self, job: Job, **record: Any) -> None:
        """Let rank 0 of the current attempt report metrics."""
        path = self.directory(job).path / metrics_stream(0, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({"t": time.time(), **record}) + "\n")


class PromptServer(uvicorn.Server):
    """Ends as uvicorn's own server does, without its pauses of a tenth of a second, of which each end has two."""

    async def main_loop(self) -> None:
        ticks = 0
        while not await self.on_tick(ticks):
            ticks = (ticks + 1) % 1000
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state, give_up = self.server_state, time.monotonic() + (self.config.timeout_graceful_shutdown or PATIENCE_S)
        for server in self.servers:
            server.close()
        for connection in list(state.connections):
            connection.shutdown()
        await asyncio.sleep(0.005)
        while (state.connections or state.tasks) and not self.force_exit and time.monotonic() < give_up:
            await asyncio.sleep(0.005)
        for task in state.tasks:
            task.cancel()


@dataclass(kw_only=True)
class Served:
    """An application that is served on loopback."""

    url: str
    loop: asyncio.AbstractEventLoop
    front: ServerApp

    @staticmethod
    @contextlib.contextmanager
    def serve(context: ApiContext) -> Iterator[Served]:
        front = create_app(context)
        config = uvicorn.Config(
            front,
            host="127.0.0.1",
            port=0,
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            timeout_graceful_shutdown=5,
            # A busy test may leave a connection unused for more than the default 5 s.
            timeout_keep_alive=int(PATIENCE_S),
        )
        server = PromptServer(config)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(),))
        thread.start()
        try:
            wait_for(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield Served(url=f"http://127.0.0.1:{port}", loop=loop, front=front)
        finally:
            loop.call_soon_threadsafe(front.close)
            server.should_exit = True
            thread.join()
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left))
            loop.close()


@dataclass(frozen=True, kw_only=True)
class Api:
    """A client of one account."""

    http: httpx.Client
    world: World
    account_id: str
    key: str

    def call(self, method: str, path: str, expect: int = 200, **options: Any) -> Any:
        """The `data` or the `error` of an answer with the expected status."""
        response = self.http.request(method, path, **options)
        assert response.status_code == expect, response.text
        assert response.headers["X-Request-Id"]
        envelope = response.json()
        if expect < 400:
            assert envelope["status"] == "ok"
            return envelope["data"]
        assert envelope["status"] == "error"
        assert envelope["meta"]["request_id"] == response.headers["X-Request-Id"]
        return envelope["error"]

    def submit(self, **fields: Any) -> str:
        """A new job; returns its id."""
        return str(self.call("POST", "/v1/jobs", 201, json={**COMMAND, **fields})["job_id"])

    def show(self, job_id: str) -> Any:
        return self.call("GET", f"/v1/jobs/{job_id}")

    @contextlib.contextmanager
    def stream(self, path: str, **headers: str) -> Iterator[Iterator[ServerEvent]]:
        """The events of a stream."""
        with self.http.stream("GET", path, headers={"Accept": "text/event-stream", **headers}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield server_events(response.iter_lines())


@dataclass(frozen=True, kw_only=True)
class ServerEvent:
    id: str | None
    event: str
    data: str

    def json(self) -> Any:
        return json.loads(self.data)


def server_events(lines: Iterator[str]) -> Iterator[ServerEvent]:
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "data" in fields:
                yield ServerEvent(id=fields.get("id"), event=fields.get("event", "message"), data=fields["data"])
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value


def post_then_read(http: httpx.Client, path: str, key: str, body: bytes, content_type: str) -> bytes:
    """The response to a client that reads nothing before it has sent everything, on a connection of its own.

    A connection that the server closes with bytes unread is reset.
    """
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nConnection: close\r\n"
    head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + body)
        return b"".join(iter(functools.partial(connection.recv, 1 << 16), b""))
