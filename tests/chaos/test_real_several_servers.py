"""Several servers on one database: one leads, each can be killed or frozen, and roles can be apart."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import sys
import threading
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
from aftermath import check
from ground import Ground, MortalServer, lease_in

from real_server import wait_for
from trainmaster.protocol.processes import identity_of


class Cluster:
    """Servers that share a database and their roots."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.path = ground.path / "shared.db"
        self.database = f"sqlite:///{self.path}"

    def server(self, name: str, *arguments: str) -> MortalServer:
        """A server with a data directory of its own."""
        shared = [
            *("--database", self.database),
            *("--runs-root", str(self.ground.path / "runs")),
            *("--artifacts-root", str(self.ground.path / "artifacts")),
        ]
        return self.ground.server(name, *shared, *arguments)

    def leads(self, server: MortalServer) -> bool:
        lease = lease_in(self.database)
        return lease is not None and lease.url == server.url

    def is_held(self) -> bool:
        """Whether somebody has the database for writing."""
        with contextlib.closing(sqlite3.connect(self.path, timeout=0, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
            connection.execute("ROLLBACK")
            return False

    def until_leads(self, server: MortalServer) -> None:
        wait_for(lambda: self.leads(server), f"{server.directory.name} to lead")


@pytest.fixture
def cluster(ground: Ground) -> Cluster:
    return Cluster(ground)


@pytest.mark.long  # test_real_postgres.py has this with three servers
def test_killed_leader_is_succeeded_and_its_jobs_run_on(cluster: Cluster, ground: Ground) -> None:
    first, second = (cluster.server(name, "--slots", "1") for name in ("first", "second"))
    first.start()
    cluster.until_leads(first)
    second.start()
    running = first.submit(*ground.counting(3, save_every=2, gate="go"))
    queued = second.submit(*ground.counting(2))
    rank = ground.until_counted(running, 1).pid
    for server in (first, second):
        server.until(running, "TRAINING")
        server.until(queued, "QUEUED")
    assert cluster.leads(first)

    first.kill()
    cluster.until_leads(second)
    assert identity_of(rank) is not None
    ground.open_gate("go")
    for job_id in (running, queued):
        assert second.until(job_id)["attempt"] == 1
    assert {entry.pid for entry in ground.ledger() if entry.job_id == running} == {rank}
    check(ground, second, {running: "COMPLETED", queued: "COMPLETED"}, database=cluster.database)


FURTHER_POINTS = [pytest.param(point, marks=pytest.mark.long) for point in ("act.before:1", "act.after:1")]


@pytest.mark.parametrize("point", ["act.before_submit:1", *FURTHER_POINTS])
def test_frozen_leader_that_thaws_starts_nothing_twice(cluster: Cluster, ground: Ground, point: str) -> None:
    first, second = (cluster.server(name) for name in ("first", "second"))
    first.start(TRAINMASTER_FAILPOINT=f"{point}:SIGSTOP")
    cluster.until_leads(first)
    submission = {"Idempotency-Key": "once"}
    is_answered(first, ground.quick_job(), submission)
    frozen = Frozen(first)
    while cluster.is_held():
        # It froze in the middle of a write: nobody could take over from it.
        frozen.thaw_and_freeze()

    second.start()
    cluster.until_leads(second)
    job_id = second.data("POST", "/v1/jobs", ground.quick_job(), headers=submission)["job_id"]
    second.until(job_id)
    gated = second.submit(*ground.counting(2, gate="go"))
    ground.until_counted(gated, 1)

    frozen.thaw()
    wait_for(lambda: "leads no more" in first.log_text() or "another server leads" in first.log_text(), "it to notice")
    late = first.submit(*ground.counting(2))
    ground.open_gate("go")
    for other in (gated, late):
        assert first.until(other)["attempt"] == 1
    assert cluster.leads(second)
    expected = dict.fromkeys((job_id, gated, late), "COMPLETED")
    assert len([entry for entry in ground.ledger() if entry.what == "start"]) == len(expected)
    check(ground, first, expected, database=cluster.database)


@pytest.mark.long  # test_real_broken_storage.py holds the database of a running one
def test_server_that_starts_while_a_frozen_one_holds_the_database_waits(cluster: Cluster, ground: Ground) -> None:
    first, second = (cluster.server(name) for name in ("first", "second"))
    first.start(TRAINMASTER_FAILPOINT="store.before_commit:20:SIGSTOP")
    submissions = [{"Idempotency-Key": "job 0"}]
    while is_answered(first, ground.quick_job(), submissions[-1]):
        submissions.append({"Idempotency-Key": f"job {len(submissions)}"})
    frozen = Frozen(first)
    assert cluster.is_held()
    starting = threading.Thread(target=second.start, daemon=True)
    starting.start()
    wait_for((second.directory / "api-key").exists, "the second server to come to the database")
    frozen.thaw()
    starting.join()
    job_ids = [
        second.data("POST", "/v1/jobs", ground.quick_job(), headers=headers)["job_id"] for headers in submissions
    ]
    for job_id in job_ids:
        assert second.until(job_id)["attempt"] == 1
    check(ground, second, dict.fromkeys(job_ids, "COMPLETED"), database=cluster.database)


def test_roles_in_processes_of_their_own_do_the_work_of_one_server(cluster: Cluster, ground: Ground) -> None:
    api, coordinator, gateway = (
        cluster.server(role, "--roles", role).start() for role in ("api", "coordinator", "gateway")
    )
    script = f"import subprocess; subprocess.run({ground.counting(2)!r}, check=True)"
    digest = sha256(script.encode()).hexdigest()
    assert api.ask("PUT", f"/v1/blobs/{digest}", content=script.encode()).is_success
    shipped = api.submit(
        workload={"kind": "script", "path": "count.py", "files": [{"path": "count.py", "sha256": digest}]}
    )
    service = api.submit(
        workload={
            "kind": "service",
            "argv": ["sh", "-c", f"exec {sys.executable} -m http.server --bind 127.0.0.1 $PORT"],
        }
    )
    api.until(shipped)
    api.until(service, "TRAINING")
    answer = gateway.ask("GET", f"/v1/jobs/{service}/proxy/")
    assert answer.status_code == 200
    assert "Directory listing" in answer.text
    assert gateway.ask("GET", "/v1/jobs").status_code == 404
    assert coordinator.ask("GET", "/v1/jobs").status_code == 404
    assert coordinator.ask("GET", "/healthz").status_code == 200
    assert cluster.leads(coordinator)
    api.data("POST", f"/v1/jobs/{service}/cancel")
    api.until(service)
    check(ground, api, {shipped: "COMPLETED", service: "CANCELLED"}, database=cluster.database)


class Frozen:
    """A server that stopped itself at a failpoint."""

    def __init__(self, server: MortalServer) -> None:
        assert server.process is not None
        self._process = server.process
        self._await()

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def thaw_and_freeze(self) -> None:
        self.thaw()
        self._process.send_signal(signal.SIGSTOP)
        self._await()

    def _await(self) -> None:
        stat = Path(f"/proc/{self._process.pid}/stat")
        wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the server to freeze")


def is_answered(server: MortalServer, body: object, headers: dict[str, str]) -> bool:
    """Submit a job like a client that does not wait long: whether it got there is found out by sending it again."""
    headers = {"Authorization": f"Bearer {server.key}", **headers}
    try:
        return httpx.post(f"{server.url}/v1/jobs", json=body, headers=headers, timeout=2).is_success
    except httpx.TimeoutException:
        return False
