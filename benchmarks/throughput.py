"""A thousand short jobs from four clients, until all of them have ended; each must have run exactly once.

The command is a shell that appends its job's id to a file: the least that proves that it ran. The peer are four
threads that start the same command directly and wait for it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.apart import apart
from benchmarks.report import Figure, Peer, Progress, WrongResultError
from benchmarks.server import Client, Server, children_cpu_s, command_job, cpu_s, running_server, wait_for

JOBS = 1000
CLIENTS = 4
TARGET_PER_S = 100.0
UNFINISHED = (
    "PENDING",
    "QUEUED",
    "SCHEDULING",
    "PREPARING",
    "TRAINING",
    "CHECKPOINTING",
    "EVALUATING",
    "EXPORTING",
    "PAUSED",
)
_TIMEOUT_S = 120.0
_SPAWNING_S = 2.0
"""Time for the clients' processes to be there, so that all begin together."""


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Jobs a second from the first submission until no job is unfinished."""
    progress(f"{JOBS:,} commands, started directly by {CLIENTS} threads")
    bare_per_s = _run_directly(directory / "started-directly")
    ran = directory / "ran"
    with running_server(directory) as server:
        fork_server = server.fork_server_pid()
        before_s = cpu_s(server.pid), cpu_s(fork_server), children_cpu_s(fork_server)
        progress(f"{JOBS:,} jobs from {CLIENTS} clients")
        per_client = JOBS // CLIENTS
        begin_at = time.time() + _SPAWNING_S
        submitted = apart(submit_many, [(server.data_dir, server.port, per_client, str(ran), begin_at)] * CLIENTS)
        client = Client(server)
        wait_for(lambda: client.count(*UNFINISHED) == 0 or None, "all jobs have ended", _TIMEOUT_S, 0.05)
        wall_s = time.time() - begin_at
        submitting_s = max(ended for ended, _ in submitted) - begin_at
        after_s = cpu_s(server.pid), cpu_s(fork_server), children_cpu_s(fork_server)
        completed = client.count("COMPLETED")
        client.close()
    _check([job_id for _, ids in submitted for job_id in ids], ran, completed)
    each_ms = [(after - before) / JOBS * 1000 for before, after in zip(before_s, after_s, strict=True)]
    return [
        Figure(
            name=f"{JOBS:,} short jobs from {CLIENTS} clients",
            measured=JOBS / wall_s,
            unit="/s",
            target=TARGET_PER_S,
            at_least=True,
            peer=Peer(name="Popen", value=bare_per_s, ours=JOBS / wall_s),
            note=f"each ran once; all submitted after {submitting_s:.1f} s, all ended after {wall_s:.1f} s; processor"
            f" time of a job: server {each_ms[0]:.1f} ms, fork server {each_ms[1]:.1f} ms, worker and command"
            f" {each_ms[2]:.1f} ms",
        )
    ]


def submit_many(data_dir: Path, port: int, count: int, ran: str, begin_at: float) -> tuple[float, list[str]]:
    """Submit jobs one after another over one connection: when the last was accepted, and the ids of all."""
    server = Server(data_dir)
    server.port = port
    client = Client(server)
    job = command_job(*_command(ran))
    time.sleep(max(0.0, begin_at - time.time()))
    ids = [client.submit(job) for _ in range(count)]
    ended = time.time()
    client.close()
    return ended, ids


def _command(ran: str) -> list[str]:
    return ["/bin/sh", "-c", f'echo "$TRAINMASTER_JOB_ID" >> {shlex.quote(ran)}']


def _run_directly(ran: Path) -> float:
    argv = _command(str(ran))

    def run(number: int) -> None:
        subprocess.run(argv, env={**os.environ, "TRAINMASTER_JOB_ID": str(number)}, check=True)

    began = time.perf_counter()
    with ThreadPoolExecutor(max_workers=CLIENTS) as pool:
        list(pool.map(run, range(JOBS)))
    return JOBS / (time.perf_counter() - began)


def _check(submitted: list[str], ran: Path, completed: int) -> None:
    times = Counter(ran.read_text().split())
    lost = [job_id for job_id in submitted if times[job_id] == 0]
    doubled = [job_id for job_id, count in times.items() if count > 1]
    if lost or doubled or len(set(submitted)) != JOBS or set(times) != set(submitted):
        raise WrongResultError(f"{len(lost)} jobs never ran, {len(doubled)} ran twice, of {len(submitted)}")
    if completed != JOBS:
        raise WrongResultError(f"{completed} of {JOBS} jobs ended as COMPLETED")
