"""A real server in a data directory of its own, and the plainest client for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from benchmarks.report import WrongResultError
from trainmaster.protocol.sockets import reachable

T = TypeVar("T")

COMMAND = Path(sys.executable).with_name("trainmaster")
"""It may be missing where `trainmaster` is importable and not installed."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_READY_TIMEOUT_S = 60.0
_KEPT_OPEN_S = 10.0
"""A server may close a connection that is idle for longer than that."""


def environment() -> dict[str, str]:
    """The environment of what is measured: this one's, with compiled modules kept as an installation keeps them."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Server:
    """A server on a data directory; it can be started several times, one after another."""

    def __init__(self, data_dir: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.data_dir = data_dir
        self._options = options
        self._environment = environment or {}
        self.host = "127.0.0.1"
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def key(self) -> str:
        """The key of the first start."""
        return (self.data_dir / "api-key").read_text().strip()

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def start(self) -> float:
        """Start it; how long it took until it said that it is ready."""
        began = time.perf_counter()
        command = [COMMAND] if COMMAND.exists() else [sys.executable, "-m", "trainmaster"]
        arguments = ["serve", "--host", self.host, "--port", "0", "--data-dir", str(self.data_dir), *self._options]
        with open(self.data_dir.with_suffix(".log"), "ab") as log:
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment(), **self._environment},
                text=True,
            )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready "):
                took_s = time.perf_counter() - began
                self.port = int(line.rsplit(":", 1)[1])
                return took_s
        raise WrongResultError(f"the server does not start: {self._log_tail()}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """End it, by default cleanly."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.communicate(timeout=_READY_TIMEOUT_S)
            self._process = None

    def fork_server_pid(self) -> int:
        """The process that workers are forked from; waits until it is there."""
        return int(wait_for(lambda: self._ask_fork_server("hello"), "the fork server answers")["pid"])

    def retire_fork_server(self) -> None:
        """End the fork server, which would live on."""
        self._ask_fork_server("retire")

    def _ask_fork_server(self, operation: str) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
            with reachable(self.data_dir / "forkserver" / "socket") as path:
                connection.connect(path)
            connection.sendall(json.dumps({"op": operation}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(connection.makefile().readline())
            return answer
        return None

    def _log_tail(self) -> str:
        return self.data_dir.with_suffix(".log").read_text()[-2000:]


@contextlib.contextmanager
def running_server(directory: Path, *options: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """A server that runs in a fresh data directory below `directory`; no process of it is left afterwards."""
    server = new_server(directory, *options, environment=environment)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        server.retire_fork_server()


def new_server(directory: Path, *options: str, environment: Mapping[str, str] | None = None) -> Server:
    """A server with a fresh data directory below `directory`, not started yet."""
    return Server(Path(tempfile.mkdtemp(dir=directory), "data"), *options, environment=environment)


def free_port() -> int:
    """A port of the loopback address that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Client:
    """One connection that is kept open."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        self._used_at = time.monotonic()
        self._headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}

    def call(self, method: str, path: str, document: Any = None) -> Any:
        """The data of an answer; anything but success is an error."""
        body = None if document is None else json.dumps(document).encode()
        if time.monotonic() - self._used_at > _KEPT_OPEN_S:
            self._connection.close()  # The next request opens it anew.
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        self._used_at = time.monotonic()
        if response.status >= 300:
            raise WrongResultError(f"{method} {path} answers {response.status}: {answer[:500]!r}")
        return json.loads(answer)["data"]

    def submit(self, job: Mapping[str, Any]) -> str:
        """Submit a job; its id."""
        return str(self.call("POST", "/v1/jobs", job)["job_id"])

    def wait(self, job_id: str, timeout_s: float = 60.0) -> str:
        """The status in which a job ended."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "PREEMPTED"}

        def status() -> str | None:
            now = str(self.call("GET", f"/v1/jobs/{job_id}")["status"])
            return now if now in ended else None

        return wait_for(status, f"job {job_id} ends", timeout_s)

    def count(self, *statuses: str) -> int:
        """How many jobs have one of the statuses; of all jobs when none is named."""
        query = "".join(f"&status={status}" for status in statuses)
        return int(self.call("GET", f"/v1/jobs?page_size=1{query}")["total_count"])

    def job_ids(self) -> list[str]:
        """The ids of all jobs there are, page by page."""
        ids: list[str] = []
        token = ""
        while True:
            page = self.call("GET", "/v1/jobs?page_size=100" + (f"&page_token={quote(token)}" if token else ""))
            ids += [job["job_id"] for job in page["jobs"]]
            token = page["next_page_token"]
            if not token:
                return ids

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def wait_for(look: Callable[[], T | None], what: str, timeout_s: float = 60.0, every_s: float = 0.02) -> T:
    """Look again and again until there is something to see."""
    deadline = time.monotonic() + timeout_s
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise WrongResultError(f"waited {timeout_s:.0f} s in vain until {what}")
        time.sleep(every_s)
    return found


def command_job(*argv: str, name: str = "benchmark") -> dict[str, Any]:
    """A command that runs on the CPU."""
    return {"name": name, "workload": {"kind": "command", "argv": argv}, "resource_config": {"gpu_count": 0}}


def held_job(*, gpu_count: int = 1) -> dict[str, Any]:
    """A command that waits for GPUs that no machine has."""
    return {
        **command_job("true", name="held"),
        "resource_config": {"gpu_count": gpu_count, "gpu_type": "no-such-gpu"},
        "scheduling_config": {"allow_waiting_for_nodes": True},
    }


def cpu_s(pid: int) -> float:
    """The processor time that a process has used, with all its threads."""
    return sum(_times_s(pid)[:2])


def children_cpu_s(pid: int) -> float:
    """The processor time of those children that have ended, with theirs."""
    return sum(_times_s(pid)[2:])


def resident_mb(pid: int) -> float:
    """The memory that a process holds."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise WrongResultError(f"process {pid} has no memory")


def _times_s(pid: int) -> list[float]:
    """In user mode and in the kernel; the same of children that were waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return [int(field) / _TICKS_PER_S for field in fields[11:15]]
