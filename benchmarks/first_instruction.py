"""From submission to the first instruction of the user's command, against starting the same command directly.

The command is a shell whose first act is to write a line to a FIFO that is open here. The clock starts before
the request is sent, or before `Popen` is called, and stops when the line arrives.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Figure, Peer, Progress, WrongResultError
from benchmarks.server import Client, Server, command_job, running_server, wait_for
from trainmaster.protocol.processes import identity_of, send_signal

WARM_STARTS = 50
COLD_STARTS = 10
WARM_TARGET_MS = 50.0
COLD_TARGET_MS = 150.0
_TIMEOUT_S = 30.0


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Milliseconds above `Popen`, with the fork server running and without."""
    warm: list[float] = []
    cold: list[float] = []
    bare: list[float] = []
    with running_server(directory) as server:
        server.fork_server_pid()
        client = Client(server)
        starter = _Starter(client, directory / "started")
        starter.submit()
        progress(f"{WARM_STARTS} starts with the fork server running, each after a bare one")
        for _ in range(WARM_STARTS):
            bare.append(starter.run_directly())
            warm.append(starter.submit())
        progress(f"{COLD_STARTS} starts after the fork server was killed")
        for _ in range(COLD_STARTS):
            _kill_fork_server(server)
            cold.append(starter.submit())
        client.close()
    popen_ms = statistics.median(bare)
    return [
        _figure("first instruction, warm, above Popen", warm, popen_ms, WARM_TARGET_MS),
        _figure("first instruction, cold, above Popen", cold, popen_ms, COLD_TARGET_MS),
    ]


class _Starter:
    """Starts the command in either way and says how many milliseconds it took."""

    def __init__(self, client: Client, fifo: Path) -> None:
        self._client = client
        os.mkfifo(fifo)
        self._argv = ["/bin/sh", "-c", f"echo > {shlex.quote(str(fifo))}"]
        self._reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)

    def submit(self) -> float:
        began = time.perf_counter()
        job_id = self._client.submit(command_job(*self._argv))
        took_ms = self._await_line(began)
        status = self._client.wait(job_id)
        if status != "COMPLETED":
            raise WrongResultError(f"job {job_id} ended as {status}")
        return took_ms

    def run_directly(self) -> float:
        began = time.perf_counter()
        process = subprocess.Popen(self._argv)
        took_ms = self._await_line(began)
        process.wait()
        return took_ms

    def _await_line(self, began: float) -> float:
        if not select.select([self._reader], [], [], _TIMEOUT_S)[0]:
            raise WrongResultError(f"the command did not start within {_TIMEOUT_S:.0f} s")
        took_ms = (time.perf_counter() - began) * 1000
        if os.read(self._reader, 64) != b"\n":
            raise WrongResultError("the command ran more than once")
        return took_ms


def _kill_fork_server(server: Server) -> None:
    pid = server.fork_server_pid()
    fork_server = identity_of(pid)
    if fork_server is not None:
        send_signal(fork_server, signal.SIGKILL)

    def gone() -> bool | None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z" or None
        return True

    wait_for(gone, "the fork server is gone")


def _figure(name: str, times_ms: list[float], popen_ms: float, target_ms: float) -> Figure:
    median = statistics.median(times_ms)
    return Figure(
        name=name,
        measured=median - popen_ms,
        unit="ms",
        target=target_ms,
        peer=Peer(name="Popen", value=popen_ms, ours=median),
        note=f"median of {len(times_ms)}: {median:.1f} ms, Popen {popen_ms:.1f} ms; range {min(times_ms):.1f} to"
        f" {max(times_ms):.1f} ms",
    )
