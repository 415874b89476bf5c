"""Several servers on PostgreSQL: any of them answers and one leads, whatever becomes of them or of the database."""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from aftermath import check
from ground import Ground, MortalServer, lease_in

from patience import PATIENCE_S
from postgres_server import PostgresServer
from real_server import wait_for
from trainmaster.protocol.processes import identity_of


class PostgresCluster:
    """Servers that share a PostgreSQL database and their roots."""

    def __init__(self, ground: Ground, postgres: PostgresServer) -> None:
        self.ground = ground
        self.postgres = postgres
        self.name = postgres.new_database()
        self.database = postgres.url(self.name)
        self.secret_key = base64.b64encode(os.urandom(32)).decode()

    def servers(self, *names: str, arguments: Sequence[str] = ()) -> list[MortalServer]:
        """Servers with data directories of their own; they are not started yet."""
        shared = [
            *("--database", self.database),
            *("--runs-root", str(self.ground.path / "runs")),
            *("--artifacts-root", str(self.ground.path / "artifacts")),
        ]
        made = [self.ground.server(name, *shared, *arguments) for name in names]
        for server in made:
            server.environment["TRAINMASTER_SECRET_KEY"] = self.secret_key
        return made

    def leader(self, servers: Sequence[MortalServer]) -> MortalServer:
        """The one that leads; waits until one does."""

        def leading() -> MortalServer | None:
            lease = lease_in(self.database)
            return next((server for server in servers if lease is not None and server.url == lease.url), None)

        found: MortalServer = wait_for(leading, "one of the servers to lead")
        return found


@pytest.fixture
def cluster(ground: Ground, postgres: PostgresServer) -> Iterator[PostgresCluster]:
    cluster = PostgresCluster(ground, postgres)
    yield cluster
    ground.clean_up()
    postgres.drop_database(cluster.name)


def submit(server: MortalServer, body: Any, key: str) -> str:
    """Submit like a good client: as often as it takes, under one key."""
    headers = {"Authorization": f"Bearer {server.key}", "Idempotency-Key": key}

    def answered() -> Any:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.post(
                f"{server.url}/v1/jobs", json=body, headers=headers, timeout=PATIENCE_S, trust_env=False
            )
            assert answer.is_success or answer.status_code == 503, answer.text
            return answer.json()["data"]["job_id"] if answer.is_success else None

    return str(wait_for(answered, f"{key} to be taken in"))


def until_all_ended(server: MortalServer, job_ids: Sequence[str]) -> None:
    """Wait for the jobs' ends by a server that may not answer every time."""

    def ended() -> bool:
        answer = server.ask("GET", "/v1/jobs", params={"page_size": 100, "status": "COMPLETED"})
        return answer.is_success and {job["job_id"] for job in answer.json()["data"]["jobs"]} >= set(job_ids)

    wait_for(ended, "all jobs to have completed")


def submit_while(disturb: Callable[[int], None], servers: Sequence[MortalServer], body: Any, jobs: int) -> list[str]:
    """Submit jobs by all servers from several threads, and disturb them meanwhile; returns the jobs' ids."""
    taken = itertools.count(1)
    reached = threading.Condition()
    done = 0

    def one(number: int) -> str:
        nonlocal done
        job_id = submit(servers[number % len(servers)], body, f"job {number}")
        with reached:
            done = next(taken)
            reached.notify_all()
        return job_id

    with ThreadPoolExecutor(4) as pool:
        submitted = [pool.submit(one, number) for number in range(jobs)]
        for turn in range(3):
            with reached:
                assert reached.wait_for(lambda turn=turn: done >= (turn + 1) * jobs // 5, 60)
            disturb(turn)
        return [future.result() for future in submitted]


def test_killed_leader_is_succeeded_and_no_job_is_lost_or_doubled(cluster: PostgresCluster, ground: Ground) -> None:
    servers = cluster.servers("first", "second", "third", arguments=("--slots", "3"))
    with ThreadPoolExecutor(3) as pool:  # all at once, on a database without any table
        list(pool.map(MortalServer.start, servers))
    leader = cluster.leader(servers)
    followers = [server for server in servers if server is not leader]
    running = [server.submit(*ground.counting(3, save_every=2, gate="go")) for server in servers]
    queued = [server.submit(*ground.counting(2)) for server in servers]
    ranks = [ground.until_counted(job_id, 1).pid for job_id in running]
    for server in servers:
        for job_id in running:
            server.until(job_id, "TRAINING")
        for job_id in queued:
            server.until(job_id, "QUEUED")

    leader.kill()
    successor = cluster.leader(followers)
    assert all(identity_of(rank) is not None for rank in ranks)
    late = next(server for server in followers if server is not successor).submit(*ground.counting(1))
    ground.open_gate("go")
    for job_id in (*running, *queued, late):
        assert followers[0].until(job_id)["attempt"] == 1
    assert {entry.pid for entry in ground.ledger() if entry.job_id in running} == set(ranks)
    expected = dict.fromkeys((*running, *queued, late), "COMPLETED")
    check(ground, followers[1], expected, database=cluster.database)


@pytest.mark.long  # test_real_several_servers.py freezes leaders, too
def test_leader_that_freezes_in_a_transaction_loses_the_lock_and_the_lead(
    cluster: PostgresCluster, ground: Ground
) -> None:
    first, second = cluster.servers("first", "second")
    first.start(TRAINMASTER_FAILPOINT="store.before_commit:10:SIGSTOP")
    cluster.leader([first])
    assert first.process is not None
    stat = Path(f"/proc/{first.process.pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the first server to freeze")

    second.start()
    cluster.leader([second])
    job_id = second.submit(*ground.counting(2))
    assert second.until(job_id)["attempt"] == 1
    first.process.send_signal(signal.SIGCONT)
    late = submit(first, ground.quick_job(), "late")
    until_all_ended(second, [late])
    assert cluster.leader([first, second]) is second
    check(ground, first, {job_id: "COMPLETED", late: "COMPLETED"}, database=cluster.database)


@pytest.mark.long
def test_dropped_connections_lose_and_double_nothing(cluster: PostgresCluster, ground: Ground) -> None:
    servers = [server.start() for server in cluster.servers("first", "second")]
    cluster.leader(servers)
    dropped: list[int] = []
    job_ids = submit_while(
        lambda _: dropped.append(cluster.postgres.drop_connections(cluster.name)), servers, ground.quick_job(), 30
    )
    assert sum(dropped) >= 6
    assert len(set(job_ids)) == 30
    until_all_ended(servers[0], job_ids)
    check(ground, servers[1], dict.fromkeys(job_ids, "COMPLETED"), database=cluster.database)


def test_restarted_database_loses_and_doubles_nothing(cluster: PostgresCluster, ground: Ground) -> None:
    servers = [server.start() for server in cluster.servers("first", "second")]
    cluster.leader(servers)
    running = servers[0].submit(*ground.counting(3, save_every=1, gate="go"))
    ground.until_counted(running, 1)

    def restart(turn: int) -> None:
        cluster.postgres.stop("immediate" if turn == 1 else "fast")
        if turn == 1:
            ground.open_gate("go")  # the job ends while there is no database
            wait_for(lambda: [e for e in ground.ledger() if e.job_id == running and e.what == "end"], "its end")
        cluster.postgres.start()

    job_ids = submit_while(restart, servers, ground.quick_job(), 20)
    until_all_ended(servers[0], [running, *job_ids])
    assert servers[1].job(running)["attempt"] == 1
    check(ground, servers[1], dict.fromkeys([running, *job_ids], "COMPLETED"), database=cluster.database)


def test_roles_in_processes_of_their_own_work_over_the_database_alone(cluster: PostgresCluster, ground: Ground) -> None:
    api, coordinator = (
        cluster.servers(role, arguments=("--roles", role))[0].start() for role in ("api", "coordinator")
    )
    job_ids = [api.submit(*ground.counting(1)) for _ in range(3)]
    for job_id in job_ids:
        api.until(job_id)
    assert cluster.leader([coordinator]) is coordinator
    check(ground, api, dict.fromkeys(job_ids, "COMPLETED"), database=cluster.database)


def test_server_without_a_secret_key_refuses_to_start(cluster: PostgresCluster) -> None:
    (server,) = cluster.servers("first")
    del server.environment["TRAINMASTER_SECRET_KEY"]
    with pytest.raises(AssertionError, match="secret_key"):
        super(MortalServer, server).start()
    assert server.wait() != 0
