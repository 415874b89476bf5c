"""Lists of jobs with two labels, on a server that has a million jobs.

The jobs are written straight into the database: what is measured is the answer, over HTTP, and not how they came.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.report import Figure, Progress, WrongResultError, percentile
from benchmarks.server import Client, held_job, new_server
from trainmaster.server.store.records import label_marks

JOBS = 1_000_000
REQUESTS = 200
SLOW_REQUESTS = 20
RARE_JOBS = 10_000
"""As many have a label that counts as rare."""


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """The 99th percentile of an answer: where one label is rare, and where none is."""
    server = new_server(directory)
    server.start()
    client = Client(server)
    template = client.submit(held_job(gpu_count=8))
    client.close()
    server.stop()
    progress(f"writing {JOBS:,} jobs with three labels each")
    _fill(server.data_dir / "trainmaster.db", template)
    os.sync()  # What is still on its way to the disk would be measured, too.
    server.start()
    try:
        client = Client(server)
        progress("listing")
        rare = _ask(client, [f"labels.shard=s{random.randrange(JOBS // RARE_JOBS)}" for _ in range(REQUESTS)])
        # Half of all jobs have the one label, the other half the other: nothing is found, and nothing rules it out.
        common = _ask(client, ["labels.half=first&labels.other-half=second"] * SLOW_REQUESTS)
        _check(client)
        client.close()
    finally:
        server.stop()
        server.retire_fork_server()
    return [
        Figure(
            name="list by two labels, one rare, p99",
            measured=percentile(rare, 99) * 1000,
            unit="ms",
            target=20.0,
            note=f"{RARE_JOBS:,} of {JOBS:,} jobs; median {percentile(rare, 50) * 1000:.1f} ms of {REQUESTS}",
        ),
        Figure(
            name="list by two labels, worst case",
            measured=max(common) * 1000,
            unit="ms",
            target=500.0,
            note=f"500,000 jobs with each label and none with both; median {percentile(common, 50) * 1000:.0f} ms",
        ),
    ]


def _ask(client: Client, queries: Sequence[str]) -> list[float]:
    """How long each answer took, in seconds."""
    times = []
    for query in queries:
        path = f"/v1/jobs?{query}" + ("&labels.half=first" if "shard" in query else "")
        began = time.perf_counter()
        client.call("GET", path)
        times.append(time.perf_counter() - began)
    return times


def _check(client: Client) -> None:
    for query, expected in (
        ("labels.shard=s7&labels.half=second", RARE_JOBS),
        ("labels.shard=s7&labels.half=first", 0),
        ("labels.half=first", 10_001),
    ):
        found = client.call("GET", f"/v1/jobs?{query}")["total_count"]
        if found != expected:
            raise WrongResultError(f"{query} finds {found} jobs, not {expected}")


def _fill(path: Path, template: str) -> None:
    """A million copies of a job, each a second younger than the last, with labels."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA synchronous = OFF")
        columns = [row[1] for row in database.execute("PRAGMA table_info(jobs)")]
        changed = {
            "job_id": "printf('job-%012d', n)",
            "root_job_id": "printf('job-%012d', n)",
            "created_at": "1.7e9 + n",
            "updated_at": "1.7e9 + n",
            "status": "'COMPLETED'",
            "labels": "labels_of(n)",
        }
        database.create_function("labels_of", 1, lambda n: str(_labels(n)).replace("'", '"'), deterministic=True)
        database.create_function("marks_of", 1, lambda n: label_marks(_labels(n)), deterministic=True)
        numbers = f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {JOBS})"
        database.execute(
            f"{numbers} INSERT INTO jobs ({', '.join(columns)}) SELECT {', '.join(changed.get(c, c) for c in columns)}"
            f" FROM numbers, (SELECT {', '.join(columns)} FROM jobs WHERE job_id = ?)",
            [template],
        )
        for key, value in (
            ("shard", f"'s' || (n % {JOBS // RARE_JOBS})"),
            ("half", "CASE WHEN n % 2 THEN 'second' ELSE 'first' END"),
            ("other-half", "CASE WHEN n % 2 THEN 'second' ELSE 'first' END"),
        ):
            database.execute(
                f"{numbers} INSERT INTO job_labels (job_id, key, account_id, value, created_at, marks)"
                f" SELECT printf('job-%012d', n), ?, 'default', {value}, 1.7e9 + n, marks_of(n) FROM numbers",
                [key],
            )
        database.commit()


def _labels(number: int) -> dict[str, str]:
    half = "second" if number % 2 else "first"
    return {"shard": f"s{number % (JOBS // RARE_JOBS)}", "half": half, "other-half": half}
