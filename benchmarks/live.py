"""What ten thousand jobs that have not ended cost the server: some run, the others wait for a GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.apart import apart
from benchmarks.report import Figure, Progress
from benchmarks.server import Client, Server, command_job, cpu_s, held_job, resident_mb, running_server, wait_for

JOBS = 10_000
RUNNING = 100
CLIENTS = 4
MEASURED_S = 20.0


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Memory and processor share of the server while nothing changes."""
    with running_server(directory, "--slots", str(2 * RUNNING)) as server:
        bare_mb = resident_mb(server.pid)
        client = Client(server)
        progress(f"starting {RUNNING} jobs that sleep")
        started = [client.submit(command_job("sleep", "3600")) for _ in range(RUNNING)]
        wait_for(lambda: client.count("TRAINING") == RUNNING or None, "all of them run")
        progress(f"submitting {JOBS - RUNNING:,} jobs that wait")
        apart(submit_many, [(server.data_dir, server.port, (JOBS - RUNNING) // CLIENTS)] * CLIENTS)
        wait_for(lambda: client.count("QUEUED") == JOBS - RUNNING or None, "all of them wait")
        time.sleep(5.0)
        progress(f"looking for {MEASURED_S:.0f} s")
        before_s = cpu_s(server.pid)
        time.sleep(MEASURED_S)
        used_s = cpu_s(server.pid) - before_s
        memory_mb = resident_mb(server.pid)
        for job_id in started:
            client.call("POST", f"/v1/jobs/{job_id}/cancel", {})
        wait_for(lambda: client.count("CANCELLED") == RUNNING or None, "those that ran have ended")
        client.close()
    note = f"{RUNNING} run and {JOBS - RUNNING:,} wait"
    return [
        Figure(
            name="10,000 live jobs, memory", measured=memory_mb, unit="MB", note=f"{note}; {bare_mb:.0f} MB without"
        ),
        Figure(name="10,000 live jobs, share of a core", measured=used_s / MEASURED_S * 100, unit="%", note=note),
    ]


def submit_many(data_dir: Path, port: int, count: int) -> None:
    """Submit jobs that wait for a GPU that no machine has."""
    server = Server(data_dir)
    server.port = port
    client = Client(server)
    for _ in range(count):
        client.submit(held_job())
    client.close()
