"""Jobs that report without end: everybody else's jobs run on time, and a restart gets over what lies on the disk."""

from __future__ import annotations

import base64
import os
import sys
import time
from pathlib import Path

import pytest
from ground import Ground, MortalServer

from real_server import wait_for

FLOODING_JOB = Path(__file__).with_name("flooding_job.py")
KINDS = ("notes", "checkpoints", "everything", "worker", "metrics", "logs")
IN_TIME_S = 30.0
"""For twenty small jobs on a busy machine. Unbounded, a flood of notes alone takes the leader for minutes."""


def run_small_jobs(server: MortalServer, count: int) -> float:
    """How long some jobs of others take, from their submission to the last one's end."""
    began = time.monotonic()
    small = [server.submit("sh", "-c", "echo done") for _ in range(count)]
    for job_id in small:
        assert server.until(job_id)["status"] == "COMPLETED"
    return time.monotonic() - began


@pytest.mark.parametrize("kind_of_database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def test_floods_of_every_kind_delay_nobody(
    ground: Ground, kind_of_database: str, request: pytest.FixtureRequest
) -> None:
    arguments = ["--slots", "64"]
    if kind_of_database == "postgresql":
        postgres = request.getfixturevalue("postgres")
        arguments += ["--database", postgres.url(postgres.new_database())]
    server = ground.server("data", *arguments)
    server.environment["TRAINMASTER_SECRET_KEY"] = base64.b64encode(os.urandom(32)).decode()
    server.start()
    marks = {kind: ground.path / f"flooded-{kind}" for kind in KINDS}
    floods = {
        kind: server.submit(sys.executable, str(FLOODING_JOB), kind, str(mark), str(ground.path / "gate"))
        for kind, mark in marks.items()
    }
    wait_for(lambda: all(mark.exists() for mark in marks.values()), "the floods to be written")
    assert run_small_jobs(server, 20) < IN_TIME_S
    server.kill()
    server.start()
    assert run_small_jobs(server, 5) < IN_TIME_S
    for kind in ("notes", "checkpoints", "everything", "worker"):
        server.data("POST", f"/v1/jobs/{floods[kind]}/cancel")
    ground.open_gate("gate")
    for kind, job_id in floods.items():
        assert (kind, server.until(job_id)["attempt"]) == (kind, 1)
    assert server.job(floods["metrics"])["progress"]["step"] == 7
    for problem in ("pass failed", "commit failed", "giving up the lead"):
        assert problem not in server.log_text()
    ground.leave()
