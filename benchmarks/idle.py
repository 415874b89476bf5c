"""What a server costs when nothing happens, how fast it is there, and how fast the command line answers."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Figure, Progress
from benchmarks.server import COMMAND, cpu_s, environment, new_server, resident_mb, running_server

IDLE_S = 20.0
SETTLING_S = 3.0
STARTS = 3
HELPS = 5


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Processor share, memory, and times to start."""
    return [*_idling(directory, progress), *_starting(directory, progress), _helping(progress)]


def _idling(directory: Path, progress: Progress) -> list[Figure]:
    with running_server(directory) as server:
        fork_server = server.fork_server_pid()
        time.sleep(SETTLING_S)
        progress(f"doing nothing for {IDLE_S:.0f} s")
        before_s = cpu_s(server.pid), cpu_s(fork_server)
        time.sleep(IDLE_S)
        used_s = cpu_s(server.pid) - before_s[0], cpu_s(fork_server) - before_s[1]
        return [
            Figure(
                name="idle, share of a core",
                measured=sum(used_s) / IDLE_S * 100,
                unit="%",
                target=1.0,
                note=f"server {used_s[0] / IDLE_S:.2%}, fork server {used_s[1] / IDLE_S:.2%}",
            ),
            Figure(
                name="idle, memory",
                measured=resident_mb(server.pid) + resident_mb(fork_server),
                unit="MB",
                target=120.0,
                note=f"server {resident_mb(server.pid):.0f} MB, fork server {resident_mb(fork_server):.0f} MB",
            ),
        ]


def _starting(directory: Path, progress: Progress) -> list[Figure]:
    progress("starting servers")
    first: list[float] = []
    again: list[float] = []
    for _ in range(STARTS):
        server = new_server(directory)
        for times in (first, again):
            times.append(server.start())
            server.fork_server_pid()
            server.stop()
        server.retire_fork_server()
    note = f"median of {STARTS}"
    return [
        Figure(name="start to ready, new", measured=statistics.median(first), unit="s", target=1.5, note=note),
        Figure(name="start to ready, again", measured=statistics.median(again), unit="s", target=1.5, note=note),
    ]


def _helping(progress: Progress) -> Figure:
    progress("trainmaster --help")
    times = []
    for _ in range(HELPS):
        began = time.perf_counter()
        subprocess.run([COMMAND, "--help"], env=environment(), stdout=subprocess.DEVNULL, check=True)
        times.append((time.perf_counter() - began) * 1000)
    note = f"median of {HELPS}; range {min(times):.0f} to {max(times):.0f} ms"
    return Figure(name="trainmaster --help", measured=statistics.median(times), unit="ms", target=300.0, note=note)
