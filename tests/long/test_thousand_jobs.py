"""A thousand jobs, while the server is killed again and again. Too long for CI: `make test-long`."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from pathlib import Path

import httpx
import pytest

from real_server import RealServer, running, wait_for
from trainmaster.server.store import attempts
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

JOBS = 1000
CLIENTS = 4
KILL_EVERY_S = 4.0


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thousand_jobs_run_once_each_while_the_server_is_killed(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.touch()
    with running(tmp_path / "data") as server:
        ids: list[str] = []
        clients = [threading.Thread(target=submit, args=(server, ledger, JOBS // CLIENTS, ids)) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        kills = 0
        while any(client.is_alive() for client in clients) or unfinished(server):
            time.sleep(KILL_EVERY_S)
            server.kill()
            server.start()
            kills += 1
        assert kills >= 2
        assert len(set(ids)) == JOBS
        listed = Counter(job["status"] for job in every_job(server))
        assert listed == {"COMPLETED": JOBS}
        ran = Counter(ledger.read_text().split())
        assert set(ran) == set(ids)
        assert max(ran.values()) == 1
        server.stop()
        database = Database.open(f"sqlite:///{tmp_path / 'data' / 'trainmaster.db'}")
        with database.read() as connection:
            assert attempts.all_allocations(connection, Scope.everything()) == []
        database.close()


def submit(server: RealServer, ledger: Path, count: int, ids: list[str]) -> None:
    for _ in range(count):
        body = {
            "name": "short",
            "workload": {"kind": "command", "argv": ["sh", "-c", f'echo "$TRAINMASTER_JOB_ID" >> {ledger}']},
            "resource_config": {"gpu_count": 0},
        }
        headers = {"Idempotency-Key": uuid.uuid4().hex}

        def sent(body: object = body, headers: dict[str, str] = headers) -> str | None:
            try:
                answer = server.ask("POST", "/v1/jobs", body, headers=headers)
            except httpx.TransportError:
                return None
            return str(answer.json()["data"]["job_id"]) if answer.status_code == 201 else None

        ids.append(wait_for(sent, "a submission to be accepted"))


def unfinished(server: RealServer) -> bool:
    waiting = ("PENDING", "QUEUED", "SCHEDULING", "PREPARING", "TRAINING")
    page = server.data("GET", "/v1/jobs", params={"status": waiting, "page_size": 1})
    return bool(page["total_count"])


def every_job(server: RealServer) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    token = None
    while True:
        query = {"page_size": 100, **({"page_token": token} if token else {})}
        page = server.data("GET", "/v1/jobs", params=query)
        found += page["jobs"]
        token = page["next_page_token"]
        if not token:
            return found
