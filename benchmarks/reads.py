"""Reads: lists of jobs and single jobs, asked for by many clients at once.

The jobs are copies of one that ran, written straight into the database. What an answer costs the server is told as
processor time too: unlike requests a second, it hardly depends on what else the machine does.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.load import Load, put_on, request_to
from benchmarks.report import Figure, Progress, WrongResultError
from benchmarks.server import Client, Server, command_job, held_job, new_server, wait_for

CONNECTIONS = 100
JOBS = 2000
WAITING = 300
LISTS_PER_S = 240.0
JOBS_PER_S = 430.0
"""Twice what the first version with a benchmark of reads answered on two busy cores."""
ROUND_S = 5.0
PAGE_SIZE = 20


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Answers a second: a page of a list, and single jobs in each kind of state."""
    server = new_server(directory)
    server.start()
    try:
        client = Client(server)
        ended = client.submit(command_job("true", name="read"))
        client.wait(ended)
        client.close()
        server.stop()
        _copy(server.data_dir / "trainmaster.db", ended)
        os.sync()
        server.start()
        client = Client(server)
        running = client.submit(command_job("sleep", "3600", name="running"))
        wait_for(lambda: client.count("TRAINING") or None, "a job runs")
        held = [client.submit(held_job()) for _ in range(WAITING)]
        if (found := len(client.call("GET", f"/v1/jobs?page_size={PAGE_SIZE}")["jobs"])) != PAGE_SIZE:
            raise WrongResultError(f"a page has {found} jobs, not {PAGE_SIZE}")
        progress(f"{CONNECTIONS} clients read from {JOBS:,} jobs, {WAITING} of which wait")
        some = [f"/v1/jobs/{_copied(number)}" for number in range(0, JOBS, 20)]
        figures = [
            _figure(f"lists of {PAGE_SIZE} jobs", server, [f"/v1/jobs?page_size={PAGE_SIZE}"], LISTS_PER_S),
            _figure("single jobs that ended", server, some, JOBS_PER_S),
            _figure("a job that runs", server, [f"/v1/jobs/{running}"], JOBS_PER_S),
            _figure("single jobs that wait", server, [f"/v1/jobs/{job_id}" for job_id in held], JOBS_PER_S),
        ]
        client.call("POST", f"/v1/jobs/{running}/cancel")
        client.wait(running)
        client.close()
        return figures
    finally:
        server.stop()
        server.retire_fork_server()


def _figure(name: str, server: Server, paths: list[str], target: float | None) -> Figure:
    requests = [request_to(server, "GET", path) for path in paths]
    done = put_on(server, Load(requests=requests, connections=CONNECTIONS, seconds=ROUND_S))
    return Figure(
        name=f"{name}, {CONNECTIONS} clients",
        measured=done.per_s,
        unit="/s",
        target=target,
        at_least=True,
        note=done.in_words(),
    )


def _copied(number: int) -> str:
    return f"job-{number:012d}"


def _copy(path: Path, job_id: str) -> None:
    """Many copies of a job with its attempts, each a second younger than the last."""
    numbers = f"WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < {JOBS - 1})"
    new_id = "printf('job-%012d', n)"
    changed = {
        "jobs": {"job_id": new_id, "root_job_id": new_id, "created_at": "created_at - n"},
        "attempts": {"job_id": new_id, "token": "token || n", "rank_token": "rank_token || n"},
    }
    with closing(sqlite3.connect(path)) as database:
        for table, values in changed.items():
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            database.execute(
                f"{numbers} INSERT INTO {table} ({', '.join(columns)})"
                f" SELECT {', '.join(values.get(column, column) for column in columns)}"
                f" FROM numbers, (SELECT * FROM {table} WHERE job_id = ?)",
                [job_id],
            )
        database.commit()
