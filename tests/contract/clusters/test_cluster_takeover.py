"""Servers on several machines with one database: whoever takes the lead goes on with the jobs of a cluster.

The second server is in a namespace of processes of its own, where it sees none of the first one's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

import relay
from cluster_servers import ClusterServer
from engine_under_test import EngineUnderTest
from local_servers import quiet_port
from postgres_server import running_postgres
from real_server import COMMAND, ENDED, wait_for
from saving_program import TRAINS, number_after, wait_until_it_can_save

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a namespace of processes")

ELSEWHERE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", COMMAND)


class Front:
    """One address for the servers, as of a load balancer."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._port = quiet_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self._address}:{self._port}"

    def leads_to(self, server: ClusterServer) -> None:
        self.close()
        target = server.url.removeprefix("http://")
        command = [sys.executable, relay.__file__, f"tcp:{self._address}:{self._port}", f"tcp:{target}"]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def front(engine: EngineUnderTest) -> Iterator[Front]:
    front = Front(engine.address)
    yield front
    front.close()


@pytest.fixture
def servers(engine: EngineUnderTest, front: Front, tmp_path: Path) -> Iterator[tuple[ClusterServer, ClusterServer]]:
    """Two that are not started yet."""
    with running_postgres() as postgres, contextlib.ExitStack() as stack:
        roots = ("--runs-root", str(tmp_path / "runs"), "--artifacts-root", str(tmp_path / "artifacts"))
        variables = {
            "TRAINMASTER_DATABASE_URL": postgres.url(postgres.new_database()),
            "TRAINMASTER_SECRET_KEY": b64encode(secrets.token_bytes(32)).decode(),
        }
        made = []
        for name in ("first", "second"):
            changes = {"server_url": front.url}
            clusters = {engine.kind: engine}
            made.append(ClusterServer(tmp_path / name, quiet_port(), clusters, *roots, changes=changes, **variables))
            stack.callback(made[-1].clean_up)
        first, second = made
        second.command = ELSEWHERE
        yield first, second


def test_a_server_on_another_machine_goes_on_with_the_jobs(
    servers: tuple[ClusterServer, ClusterServer], front: Front, engine: EngineUnderTest
) -> None:
    first, second = servers
    front.leads_to(first.start())
    second.start()
    runs = first.submit_source(TRAINS, "--steps", 2500)
    pauses = first.submit_source(TRAINS)
    for job_id in (runs, pauses):
        wait_until_it_can_save(first, job_id)
    first.kill()
    front.leads_to(second)
    second.control(pauses, "pause")
    saved = number_after(second, pauses, "stopped at", attempt=1)
    assert second.until(pauses, "PAUSED", *ENDED)["status"] == "PAUSED"
    second.control(pauses, "resume")
    second.wait_for_event(pauses, "resumed")
    assert number_after(second, pauses, "begins at", attempt=2) == saved
    second.control(pauses, "cancel")
    job = second.until(runs)
    assert (job["status"], [attempt["reason"] for attempt in job["attempts"]]) == ("COMPLETED", ["SUCCEEDED"])
    assert second.until(pauses)["status"] == "CANCELLED"
    wait_for(lambda: not engine.left(), "the end of all jobs on the engine")
