"""A whole server but for its threads and sockets, which can be killed at any point and started again."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripted_backend import Script, ScriptedBackend, ScriptedWorld, succeed
from trainmaster.server import failpoints
from trainmaster.server.coordinator.actions import AttemptActions
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.cluster_view import NodeReports
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.coordinator.launch import JobSecrets, Launches
from trainmaster.server.coordinator.loop import Coordinator, LoopPace
from trainmaster.server.core.job import CheckpointRecord, Job, JobEvent
from trainmaster.server.core.resources import Gpu, Node
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.settings.encryption import Sealer
from trainmaster.server.settings.settings import Settings
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots, run_directory
from trainmaster.server.store import attempts, checkpoints, events, jobs, leases
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

ACCOUNT = Scope(account_id="default")
EVERYTHING = Scope.everything()


@functools.cache
def _fresh_database() -> bytes:
    """An empty database, made once: hundreds of servers start on a copy of it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tm.db"
        Database.open(f"sqlite:///{path}").close()
        return path.read_bytes()


class Crash(BaseException):
    """The server was killed here."""


class Inline(Executor):
    """Runs work at once, so that a crash strikes where it was meant to."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Reign:
    """Leads for as long as its server lives."""

    def __init__(self, epoch: int) -> None:
        self.epoch: int | None = epoch

    def lost(self) -> None:
        self.epoch = None

    def progressed(self) -> None:
        pass


HERE = replace(ScriptedBackend.capabilities, runs_here=True)
"""Admission looks at the files that jobs name."""


class FixedBackends(dict[str, ScriptedBackend]):
    """None is ever added or removed."""

    def refresh(self) -> None: ...

    def take_news(self) -> bool:
        return False


class Cluster:
    """One database, one set of run directories, workers that live on, and a server that may die."""

    def __init__(self, directory: Path, script: Script = succeed, *, gpus: int = 2) -> None:
        self.directory = directory
        self.now = 1_000_000.0
        self.boots = 0
        self.roots = Roots({RUNS: directory / "runs", ARTIFACTS: directory / "artifacts", BLOBS: directory / "blobs"})
        self.world = ScriptedWorld(
            run_directory=lambda request: run_directory(self.roots, request.job_id, request.attempt), script=script
        )
        units = tuple(Gpu(index=n, device=str(n), type="H100", memory_mb=81920) for n in range(gpus))
        node = Node(
            node_id="n", backend="scripted", hostname="h", cpu_cores=8, ram_mb=1 << 16, storage_mb=1 << 20, gpus=units
        )
        self.backend = ScriptedBackend(self.world, [node])
        self.vault = JobSecrets(Sealer(bytes(32)))
        self.most_alive: dict[str, int] = {}
        (directory / "tm.db").write_bytes(_fresh_database())
        self.boot()

    def boot(self) -> None:
        """Start a server on what the last one left."""
        self.boots += 1
        self.database = Database.open(f"sqlite:///{self.directory / 'tm.db'}")
        lease = self.database.write_now(
            lambda connection: leases.acquire(connection, EVERYTHING, f"boot-{self.boots}", "", self.now, 0.0)
        )
        assert lease is not None
        acting = AttemptActions(
            backends={"scripted": self.backend},
            roots=self.roots,
            launches=Launches(
                self.database, self.roots, self.vault, Settings(data_dir=self.directory, shared_uid=True)
            ),
            hint=lambda subject: None,
            pool=Inline(),
        )
        self.coordinator = Coordinator(
            self.database,
            reports=NodeReports(self.database, FixedBackends(scripted=self.backend)),
            leadership=Reign(lease.epoch),  # type: ignore[arg-type]
            actions=acting,
            admission=Admission(backends={"scripted": HERE}),
            clock=lambda: self.now,
            pace=LoopPace(poll_s=0.0, inventory_s=0.0, behind_s=0.0),
        )
        self.commands = Commands(
            self.database,
            admission=Admission(backends={"scripted": HERE}, default_backend="scripted"),
            vault=self.vault,
            hint=lambda subject: None,
            clock=lambda: self.now,
        )

    def die(self) -> None:
        """What is left of a server that was killed: nothing."""
        failpoints.arm(None)
        self.database.close()
        self.now += 10.0

    def tick(self) -> None:
        """One pass of the server, one act of every worker, one second."""
        self.coordinator.run_pass()
        self.now += 1.0
        self.world.advance(self.now)
        for job_id in {attempt.rpartition(".")[0] for attempt in self.world.alive()}:
            alive = {attempt for attempt in self.world.alive() if attempt.startswith(job_id)}
            self.most_alive[job_id] = max(self.most_alive.get(job_id, 0), len(alive))

    def until(self, condition: Callable[[], bool], ticks: int = 200) -> None:
        for _ in range(ticks):
            if condition():
                return
            self.tick()
        raise AssertionError(f"not reached after {ticks} ticks: {[job.status for job in self.all_jobs()]}")

    def submit(self, **document: Any) -> Job:
        request = parse_submit(
            {
                "name": "j",
                "workload": {"kind": "command", "argv": ["x"]},
                "resource_config": {"gpu_count": 1},
                **document,
            }
        )
        return self.commands.submit(ACCOUNT, request, created_by="t").result().job

    def job(self, job_id: str) -> Job:
        with self.database.read() as connection:
            return jobs.get(connection, ACCOUNT, job_id, deleted=True)

    def all_jobs(self) -> list[Job]:
        with self.database.read() as connection:
            _, changed = events.changed_jobs(connection, EVERYTHING, 0)
            return jobs.load(connection, EVERYTHING, list(changed))

    def events(self, job_id: str) -> list[JobEvent]:
        found: list[JobEvent] = []
        with self.database.read() as connection:
            while more := events.page(connection, ACCOUNT, job_id, after_seq=len(found), limit=1000):
                found += more
        return found

    def checkpoints(self, job_id: str) -> list[CheckpointRecord]:
        with self.database.read() as connection:
            return checkpoints.of_job(connection, ACCOUNT, job_id)

    def allocated(self) -> int:
        with self.database.read() as connection:
            return len(attempts.all_allocations(connection, EVERYTHING))
