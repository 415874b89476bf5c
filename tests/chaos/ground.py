"""Where real servers live and die: the directories they share, the ledger of their jobs, and all their processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Connection, create_engine

from process_signals import kill_all_marked, kill_claimant
from real_server import RealServer, wait_for
from trainmaster.backends.local.fork_client import ForkServer, ForkServerError
from trainmaster.server.store import leases
from trainmaster.server.store.leases import Lease
from trainmaster.server.store.scope import Scope

COUNTING_JOB = Path(__file__).with_name("counting_job.py")
MARK = "CHAOS_GROUND"
"""A variable that everything which our servers start inherits. They themselves are forked, and do not show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the ledger."""

    what: str
    """start, count, stop or end."""
    attempt_id: str
    rank: int
    number: int
    pid: int

    @property
    def job_id(self) -> str:
        return self.attempt_id.rpartition(".")[0]

    @property
    def attempt(self) -> int:
        return int(self.attempt_id.rpartition(".")[2])


class Ground:
    """One test's share of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = uuid.uuid4().hex
        self.servers: list[MortalServer] = []
        self.ledger_path = path / "ledger"
        self.ledger_path.touch()

    def server(self, name: str = "data", *arguments: str) -> MortalServer:
        """A server that is not started yet."""
        server = MortalServer(self.path / name, *arguments, environment={MARK: self.mark})
        self.servers.append(server)
        return server

    # -- jobs --

    def counting(
        self, numbers: int, *, save_every: int = 0, gate: str = "", gate_at: int = 1, stray: bool = False
    ) -> list[str]:
        """The command of a job that counts."""
        argv = [sys.executable, str(COUNTING_JOB), str(self.ledger_path), str(numbers)]
        if save_every:
            argv += ["--save-every", str(save_every)]
        if gate:
            argv += ["--gate", str(self.path / gate), "--gate-at", str(gate_at)]
        if stray:
            argv += ["--stray"]
        return argv

    def quick_job(self) -> dict[str, Any]:
        """The request for a job that counts to one, without Python."""
        enter = f'echo "%s $TRAINMASTER_ATTEMPT_ID $RANK %d $$" >> {self.ledger_path}'
        metrics = """echo '{"step":1,"values":{"number":1}}' >> $TRAINMASTER_METRICS_FILE"""
        script = [enter % ("start", 0), "echo line 1", metrics, enter % ("count", 1), enter % ("end", 1)]
        return {
            "name": "quick",
            "workload": {"kind": "command", "argv": ["sh", "-c", "\n".join(script)]},
            "resource_config": {"gpu_count": 0},
        }

    def open_gate(self, gate: str) -> None:
        """Let the jobs go on that wait there."""
        (self.path / gate).touch()

    def ledger(self) -> list[Entry]:
        """What the jobs did, in order."""
        entries = []
        for line in self.ledger_path.read_text().splitlines():
            what, attempt_id, rank, number, pid = line.split()
            entries.append(Entry(what=what, attempt_id=attempt_id, rank=int(rank), number=int(number), pid=int(pid)))
        return entries

    def until_counted(self, job_id: str, number: int, *, attempt: int = 1) -> Entry:
        """Wait until an attempt of a job has come to a number."""
        wanted = f"{job_id}.{attempt}"

        def counted() -> Entry | None:
            for server in self.servers:
                server.revive()
            for entry in self.ledger():
                if entry.attempt_id == wanted and entry.what == "count" and entry.number >= number:
                    return entry
            return None

        found: Entry = wait_for(counted, f"{wanted} to count to {number}")
        return found

    # -- processes --

    def processes(self) -> set[int]:
        """Every living process that descends from our servers, and they themselves."""
        mark = f"{MARK}={self.mark}".encode()
        found = {server.process.pid for server in self.servers if server.process and server.process.poll() is None}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.add(int(name))
        return found

    def expected_processes(self) -> set[int]:
        """Servers and their fork servers."""
        pids = {server.process.pid for server in self.servers if server.process is not None}
        return pids | {pid for server in self.servers if (pid := server.fork_server_pid()) is not None}

    def leave(self) -> None:
        """Stop what may run, as an operator would, and see to it that nothing else does."""
        for server in self.servers:
            if server.process is not None:
                server.process.terminate()
                assert server.wait() == 0, server.log_text()
            with contextlib.suppress(OSError, ForkServerError):
                server.fork_server._exchange({"op": "retire"})
        wait_for(lambda: not self.processes(), "the last process to be gone")

    def clean_up(self) -> None:
        """Kill what is left after a test, whatever it is."""
        while self.processes():
            for server in self.servers:
                server.kill()
            kill_all_marked(f"{MARK}={self.mark}")


@contextlib.contextmanager
def reading(url: str) -> Iterator[Connection]:
    """A connection to a database beside its servers."""
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def lease_in(url: str) -> Lease | None:
    """Who leads the servers of a database, or did until its time was over."""
    with reading(url) as connection:
        return leases.current(connection, Scope.everything())


class MortalServer(RealServer):
    """A server that may be killed under its client's hands: the client starts it again and repeats its request."""

    deaths = 0

    def start(self, **environment: str) -> MortalServer:
        """Start it; again, when it was killed before it was ready."""
        try:
            super().start(**environment)
        except AssertionError:
            self._take_death()
            super().start()
        return self

    def ask(self, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """One request, carried out once however often it has to be sent."""
        if method != "GET":
            options["headers"] = {"Idempotency-Key": uuid.uuid4().hex, **options.get("headers", {})}
        while True:
            try:
                return super().ask(method, path, body, **options)
            except httpx.TransportError:
                self._take_death()
                self.start()

    def revive(self) -> None:
        """Start it again if it was killed."""
        if self.process is not None and self.process.poll() is not None:
            self._take_death()
            self.start()

    def all_jobs(self) -> list[Any]:
        """Every job that the server lists."""
        found: list[Any] = []
        token: dict[str, Any] = {}
        while True:
            page = self.data("GET", "/v1/jobs", params={"page_size": 100, "order_by": "created_at", **token})
            found += page["jobs"]
            if not page["next_page_token"]:
                return found
            token = {"page_token": page["next_page_token"]}

    def claim_path(self, job_id: str, *, attempt: int = 1, node: int = 0) -> Path:
        """Where the worker of a node wrote who it is."""
        return self.directory / "runs" / job_id / str(attempt) / "claims" / f"{node}.json"

    def kill_worker(self, job_id: str, *, attempt: int = 1, node: int = 0) -> None:
        """kill -9 to the worker of a node."""
        kill_claimant(json.loads(self.claim_path(job_id, attempt=attempt, node=node).read_text()))

    def log_lines(self, job_id: str) -> list[Any]:
        """All lines of a job's log, with where they come from."""
        found: list[Any] = []
        cursor: dict[str, Any] = {}
        while True:
            page = self.data("GET", f"/v1/jobs/{job_id}/logs", params={"attempt": "all", **cursor})
            found += page["lines"]
            if not page["lines"]:
                return found
            cursor = {"cursor": page["next_cursor"]}

    def reports(self, job_id: str) -> list[Any]:
        """All metrics that a job reported, of a job that has ended."""
        stream = self.ask("GET", f"/v1/jobs/{job_id}/metrics/stream").text
        events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in stream.split("\n\n") if event]
        return [json.loads(event["data"]) for event in events if event.get("event") == "metrics"]

    @property
    def fork_server(self) -> ForkServer:
        return ForkServer(self.directory / "forkserver")

    def fork_server_pid(self) -> int | None:
        """Of the one that listens now."""
        with contextlib.suppress(OSError, ForkServerError):
            return int(self.fork_server._exchange({"op": "hello"})["pid"])
        return None

    def _take_death(self) -> None:
        code = self.wait()
        assert code == -signal.SIGKILL, f"the server ended with {code}: {self.log_text()}"
        self.deaths += 1
