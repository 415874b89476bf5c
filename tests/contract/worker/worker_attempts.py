"""Attempts that real workers run, forked by a real fork server."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from patience import PATIENCE_S
from process_signals import kill_claimant, kill_rank
from trainmaster.protocol.documents import read_lines
from trainmaster.protocol.launch import Launch, LaunchStep
from trainmaster.protocol.processes import identity_of
from trainmaster.protocol.reasons import StopCause
from trainmaster.protocol.request import AttemptRequest, Control, EngineNeeds, NodeAssignment
from trainmaster.protocol.run_directory import RunDirectory, exit_document, log_stream, metrics_stream, worker_stream

Found = TypeVar("Found")


def wait_for(look: Callable[[], Found | None], what: str = "it") -> Found:
    """What `look` finds, as soon as it finds something."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.01)
    return found


def is_running(pid: int) -> bool:
    return identity_of(pid) is not None


class ForkServerProcess:
    """A fork server, and the way to talk to it."""

    def __init__(self, directory: Path, *, within: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "trainmaster.worker", "fork-server", "--directory", os.fspath(directory)],
            env={**os.environ, "TRAINMASTER_LEFT_OVER": "1", "FROM_THE_SERVER": "yes"},
        )
        wait_for(self.greets, "the fork server's start")

    def ask(self, **request: object) -> dict[str, Any]:
        return self.ask_raw(json.dumps(request).encode() + b"\n")

    def ask_raw(self, line: bytes) -> dict[str, Any]:
        parent = os.open(self.directory, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(PATIENCE_S)
                connection.connect(f"/proc/self/fd/{parent}/socket")
                connection.sendall(line)
                answer = b""
                while data := connection.recv(65536):
                    answer += data
        finally:
            os.close(parent)
        document: dict[str, Any] = json.loads(answer)
        return document

    def greets(self) -> bool:
        with contextlib.suppress(OSError):
            return "version" in self.ask(op="hello")
        return False

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_S)


class Attempt:
    """One attempt in a run directory of its own."""

    def __init__(self, fork_server: ForkServerProcess, path: Path, request: AttemptRequest) -> None:
        self.fork_server = fork_server
        self.path = path
        self.request = request
        self.directory = RunDirectory(path)
        self.directory.create(request)
        self._seq = 0

    def start(self, node: int = 0, **secrets: dict[str, str]) -> int:
        given = {"secrets": secrets} if secrets else {}
        answer = self.fork_server.ask(op="start", run_dir=os.fspath(self.path), node=node, **given)
        pid = answer["pid"]
        assert isinstance(pid, int)
        return pid

    def run(self) -> dict[str, Any]:
        """Start all nodes and wait for them; the exit of the first."""
        for node in range(len(self.request.nodes)):
            self.start(node)
        first, *_ = [self.ended(node) for node in range(len(self.request.nodes))]
        return first

    def ended(self, node: int = 0) -> dict[str, Any]:
        return wait_for(lambda: self.directory.document(exit_document(node)), "the exit")

    def records(self, kind: str, node: int = 0) -> list[dict[str, Any]]:
        found, _ = read_lines(self.directory.read(worker_stream(node), 0))
        return [record for record in found if record["type"] == kind]

    def record(self, kind: str, node: int = 0) -> dict[str, Any]:
        return wait_for(lambda: self.records(kind, node), f"the record {kind!r}")[0]

    def metrics(self, rank: int = 0, node: int = 0) -> list[dict[str, Any]]:
        return read_lines(self.directory.read(metrics_stream(node, rank), 0))[0]

    def log(self, rank: int = 0, *, channel: str = "out", step: str = "run", node: int = 0) -> str:
        return (self.path / log_stream(node, step, rank, channel)).read_text()

    def says(self, text: str, rank: int = 0, node: int = 0) -> None:
        """Wait until a rank has printed something."""
        path = self.path / log_stream(node, "run", rank, "out")
        wait_for(lambda: path.exists() and text in path.read_text(), f"rank {rank} saying {text!r}")

    def rank_pid(self, rank: int = 0, node: int = 0) -> int:
        pids = {entry["rank"]: entry["pid"] for entry in self.record("started", node)["ranks"]}
        pid = pids[rank]
        assert isinstance(pid, int)
        return pid

    def kill_worker(self, node: int = 0) -> None:
        kill_claimant(self.record("claimed", node))

    def kill_rank(self) -> None:
        kill_rank(self.record("started")["ranks"][0])

    def control(self, **wish: Any) -> None:
        self._seq += 1
        self.directory.set_control(Control(seq=self._seq, **wish).to_json())

    def stop(self, cause: StopCause = StopCause.CANCEL, **wish: Any) -> None:
        self.control(stop=cause, **wish)

    def clean_up(self) -> None:
        """End what still runs, without asking how."""
        if self.path.exists():
            self.stop(StopCause.DELETE, grace_s=0.0)
        for node in range(len(self.request.nodes)):
            claim = self.directory.claimant(node) if self.path.exists() else None
            if claim and "pid" in claim and not self.directory.document(exit_document(node)):
                wait_for(functools.partial(self._is_over, node, claim["pid"]), "the worker's end")
        self.fork_server.ask(op="sweep", attempt_id=self.request.attempt_id)

    def _is_over(self, node: int, worker: int) -> bool:
        return not is_running(worker) or self.directory.document(exit_document(node)) is not None


class Attempts:
    """Makes attempts, each of a job of its own."""

    def __init__(self, fork_server: ForkServerProcess, root: Path) -> None:
        self.fork_server = fork_server
        self.root = root
        self.made: list[Attempt] = []

    def __call__(
        self,
        *argv: str,
        steps: tuple[LaunchStep, ...] = (),
        nodes: int = 1,
        gpus: tuple[str, ...] = (),
        memory_mb: int = 0,
        cpu_cores: int = 0,
        runs: Path | None = None,
        max_runtime_s: float | None = None,
        resume_from: str | None = None,
        blob_dir: Path | None = None,
        hint_socket: Path | None = None,
        cache_dir: Path | None = None,
        environment: dict[str, str] | None = None,
        engine_needs: EngineNeeds | None = None,
        **launch: Any,
    ) -> Attempt:
        # Jobs of tests that run at the same time must not have the same marks.
        job_id = f"job-{os.getpid()}-{os.urandom(4).hex()}"
        runs = runs or self.root / "runs"
        request = AttemptRequest(
            job_id=job_id,
            attempt=1,
            token=f"token-{job_id}",
            rank_token=f"rank-token-{job_id}",
            launch=Launch(kind="test", steps=steps or (LaunchStep(name="run", argv=argv),), **launch),
            nodes=tuple(
                NodeAssignment(node_id=f"node-{node}", gpus=gpus, memory_mb=memory_mb, cpu_cores=cpu_cores)
                for node in range(nodes)
            ),
            checkpoint_dir=os.fspath(self.root / "checkpoints"),
            output_dir=os.fspath(self.root / "output"),
            owner_file=os.fspath(runs / job_id / "owner.json"),
            max_runtime_s=max_runtime_s,
            resume_from=resume_from,
            blob_dir=os.fspath(blob_dir) if blob_dir else None,
            hint_socket=os.fspath(hint_socket) if hint_socket else None,
            cache_dir=os.fspath(cache_dir) if cache_dir else None,
            environment=environment or {},
            engine_needs=engine_needs,
        )
        attempt = Attempt(self.fork_server, runs / job_id / "1", request)
        self.made.append(attempt)
        return attempt

    def python(self, code: str, **options: Any) -> Attempt:
        """An attempt that runs some Python."""
        return self(steps=(LaunchStep(name="run", argv=("-c", code), python=True),), **options)
