"""A thousand short jobs on every engine, while the leader is killed half-way."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster_servers import ClusterServer
from engine_under_test import EngineUnderTest
from local_servers import quiet_port
from real_server import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

JOBS = 1000
CLIENTS = 2


@pytest.fixture
def server(engine: EngineUnderTest, tmp_path: Path) -> Iterator[ClusterServer]:
    changes = engine.counting(tmp_path)
    server = ClusterServer(tmp_path / "data", quiet_port(), {engine.kind: engine}, changes=changes)
    try:
        yield server.start()
    finally:
        server.clean_up()


def test_thousand_jobs_run_once_each_while_the_leader_is_killed(
    server: ClusterServer, engine: EngineUnderTest, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    ledger.touch()
    ids: list[str] = []
    cores = engine.cores // 4  # eight at a time, on two nodes; without a limit on nodes with less
    share = JOBS // CLIENTS
    clients = [threading.Thread(target=submit, args=(server, ledger, share, cores, ids)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    wait_for(lambda: len(ledger.read_text().split()) >= JOBS // 2, "half of the jobs", timeout_s=3600)
    server.kill()
    server.start()
    for client in clients:
        client.join()
    assert len(set(ids)) == JOBS
    wait_for(lambda: count(server, "COMPLETED") + count(server, "FAILED") == JOBS, "all jobs", timeout_s=3600)
    ran = Counter(ledger.read_text().split())
    assert (set(ran), max(ran.values())) == (set(ids), 1)
    assert count(server, "COMPLETED") == JOBS
    wait_for(lambda: not engine.left(), "the end of all jobs on the engine")
    engine.check_load(tmp_path, JOBS)


def submit(server: ClusterServer, ledger: Path, number: int, cores: int, ids: list[str]) -> None:
    for _ in range(number):
        body = {
            "name": "short",
            "workload": {"kind": "command", "argv": ["sh", "-c", f'echo "$TRAINMASTER_JOB_ID" >> {ledger}']},
            "resource_config": {"gpu_count": 0, **({"cpu_cores": cores} if cores else {})},
        }
        headers = {"Idempotency-Key": uuid.uuid4().hex}

        def sent(body: object = body, headers: dict[str, str] = headers) -> str | None:
            try:
                answer = server.ask("POST", "/v1/jobs", body, headers=headers)
            except httpx.TransportError:
                return None
            return str(answer.json()["data"]["job_id"]) if answer.status_code == 201 else None

        ids.append(wait_for(sent, "a submission to be accepted"))


def count(server: ClusterServer, status: str) -> int:
    page = server.data("GET", "/v1/jobs", params={"status": status, "page_size": 1})
    return int(page["total_count"])
