"""Real servers over either transport, what they left running, and scripts for them to run.

Over HTTP the fork server, and with it every worker, lives in a mount namespace of its own wherever the machine
allows it: there the workers' spool is a file system that the server cannot see, and the server's run directories
and blobs are hidden from the workers. What arrives has come by the API. With `ELSEWHERE_VARIABLE`, so are artifacts and
the cache: checkpoints and results come by the API, too, as from another machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from job_server import JobServer, pids, shown_of
from process_signals import kill_rank
from real_server import ENDED, wait_for
from trainmaster.backends.local.fork_client import ForkServer
from trainmaster.protocol.documents import read_lines
from trainmaster.protocol.processes import signal_if
from trainmaster.protocol.run_directory import worker_stream
from trainmaster.server.failpoints import ELSEWHERE_VARIABLE

PYTHON = sys.executable


class LocalServer(JobServer):
    """A server whose workers report over one of the transports."""

    def __init__(self, directory: Path, transport: str, *arguments: str, **environment: str) -> None:
        directory.mkdir(parents=True)
        # Workers that report over HTTP know one address: it has to stay the same when the server is started again.
        fixed = ("--port", str(quiet_port()), "--transport", transport)
        super().__init__(directory, *fixed, *arguments, environment={"TRAINMASTER_BACKENDS": "local", **environment})
        self.transport = transport
        self.is_elsewhere = ELSEWHERE_VARIABLE in environment
        self.is_sealed = transport == "http" and bool(_seal())
        self._fork_server: subprocess.Popen[bytes] | None = None
        if self.is_sealed:
            self._start_sealed_fork_server()

    def _start_sealed_fork_server(self) -> None:
        names = ("spool", "runs", "blobs", *(("artifacts", "cache") if self.is_elsewhere else ()))
        hidden = [self.directory / name for name in names]
        for path in hidden:
            path.mkdir()
        mounts = "".join(f"mount -t tmpfs -o mode=700 none '{path}' && " for path in hidden)
        self._fork_server = subprocess.Popen(
            [
                *_seal(),
                "sh",
                "-c",
                f'{mounts}exec "$@"',
                "sh",
                *(PYTHON, "-m", "trainmaster.worker", "fork-server", "--directory", self.directory / "forkserver"),
            ]
        )
        wait_for(lambda: (self.directory / "forkserver" / "socket").exists(), "the sealed fork server")

    def clean_up(self) -> None:
        """End everything; nothing of it may be left."""
        super().clean_up()
        if self._fork_server is not None:
            self._fork_server.wait()
        try:
            wait_for(lambda: not processes_of(self.directory), f"the end of all that ran in {self.directory}")
        finally:
            for pid in processes_of(self.directory):
                with contextlib.suppress(ProcessLookupError):
                    signal_if(pid, functools.partial(_is_of, pid, self.directory), signal.SIGKILL)

    def end_all_jobs(self) -> None:
        """Cancel what still runs, and see to it that nothing of any job is left, neither processes nor claims."""
        listed = self.data("GET", "/v1/jobs?page_size=100")["jobs"]
        live = [job["job_id"] for job in listed if job["status"] not in (*ENDED, "PAUSED")]
        for job_id in live:
            self.ask("POST", f"/v1/jobs/{job_id}/cancel")
        for job_id in live:
            self.until(job_id, *ENDED, "PAUSED")
        assert self.process is not None
        expected = {self.process.pid, wait_for(self._fork_server_pid, "the fork server")}
        wait_for(lambda: processes_of(self.directory) <= expected, "the end of all workers and ranks")
        for node in self.data("GET", "/v1/nodes")["nodes"]:
            assert all(gpu["free"] for gpu in node["gpus"])
            assert node["slots"]["free"] == node["slots"]["total"]

    def _fork_server_pid(self) -> int | None:
        # Not by `ask`, which would start one as our own child when the server has not yet.
        with contextlib.suppress(OSError):
            return int(ForkServer(self.directory / "forkserver")._exchange({"op": "hello"})["pid"])
        return None

    def submit_python(self, script: Path, *arguments: object, workload: Any = None, **document: Any) -> str:
        """Submit a Python script by its path; its id."""
        named = {"path": str(script), "args": [str(argument) for argument in arguments], **(workload or {})}
        return self.submit_workload("script", named, **document)

    def rank_pids(self, job_id: str, attempt: int = 1, nodes: int = 1) -> dict[int, int]:
        """The process of each rank, once they all run."""
        return {rank: entry["pid"] for rank, entry in self._ranks(job_id, attempt, nodes).items()}

    def kill_rank(self, job_id: str, rank: int = 0) -> None:
        """kill -9 to a rank of a job's first attempt."""
        kill_rank(self._ranks(job_id, 1, 1)[rank])

    def _ranks(self, job_id: str, attempt: int, nodes: int) -> dict[int, Any]:
        directory = self.run_directory(job_id, attempt)

        def started() -> dict[int, Any] | None:
            records = [r for node in range(nodes) for r in read_lines(directory.read(worker_stream(node), 0))[0]]
            begun = [record for record in records if record["type"] == "started"]
            if len(begun) < nodes:
                return None
            return {rank["rank"]: rank for record in begun for rank in record["ranks"]}

        ranks: dict[int, Any] = wait_for(started, f"the ranks of {job_id}")
        return ranks


@contextlib.contextmanager
def serving(directory: Path, transport: str, *arguments: str, **environment: str) -> Iterator[LocalServer]:
    """A server that runs for the length of a block, and leaves nothing behind."""
    server = LocalServer(directory, transport, *arguments, **environment)
    try:
        server.start()
        yield server
        server.end_all_jobs()
    finally:
        server.clean_up()


def processes_of(directory: Path) -> set[int]:
    """Every process that was started for a data directory: by its arguments, its environment or where it is."""
    return {pid for pid in pids() if _is_of(pid, directory)}


def _is_of(pid: int, directory: Path) -> bool:
    mark = os.fsencode(directory)
    shown = shown_of(pid, "cmdline") + shown_of(pid, "environ")
    return mark in shown or (_cwd(pid) + b"/").startswith(mark + b"/")


def is_alive(pid: int) -> bool:
    """Whether there is such a process, be it a zombie."""
    return os.path.exists(f"/proc/{pid}")


def _cwd(pid: int) -> bytes:
    try:
        return os.fsencode(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return b""


def over(transport: str) -> pytest.MarkDecorator:
    """Mark a test that has to do with one transport alone."""
    return pytest.mark.parametrize("transport", [transport], indirect=True, scope="module")


@functools.cache
def _seal() -> tuple[str, ...]:
    """What starts a command in a mount namespace of its own; empty where that is not allowed."""
    for seal in (("unshare", "--mount"), ("unshare", "--mount", "--map-root-user")):
        with contextlib.suppress(FileNotFoundError):
            tried = [*seal, "mount", "-t", "tmpfs", "none", "/mnt"]
            if subprocess.run(tried, stderr=subprocess.DEVNULL, check=False).returncode == 0:
                return seal
    return ()


def quiet_port() -> int:
    """A free port that nobody is given by chance: below those from which the kernel chooses."""
    while True:
        port = random.randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
