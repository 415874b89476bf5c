"""Disks that are full, and a database that somebody else holds."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from aftermath import check
from ground import Ground, MortalServer

from real_server import wait_for


class SmallDisk:
    """A file system of its own, which is soon full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Take every byte that is left."""
        with open(self._filler, "ab", buffering=0) as file:
            while (free := os.statvfs(self.path)).f_bfree:
                file.write(bytes(free.f_bfree * free.f_bsize))

    def free(self) -> None:
        """Give them back."""
        self._filler.unlink()

    def grow(self) -> None:
        """Make it large, with all that it has."""
        subprocess.run(["mount", "-o", "remount,size=64m", self.path], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield SmallDisk(path)
    subprocess.run(["umount", "--lazy", path], check=True)


def test_full_disk_of_runs_fails_who_filled_it_and_nothing_else(disk: SmallDisk, ground: Ground) -> None:
    server = ground.server("data", "--runs-root", str(disk.path / "runs")).start()
    bystander = server.submit(*ground.counting(3, save_every=2, gate="go"))
    rank = ground.until_counted(bystander, 1).pid
    greedy = server.submit("sh", "-c", "cat /dev/zero > filler")
    error = server.until(greedy)["error"]
    assert error["error_type"] == "DISK_FULL"
    lost = server.submit("sh", "-c", "cat /dev/zero > filler; kill -9 $PPID; sleep 60")
    assert server.until(lost)["error"]["error_type"] == "DISK_FULL"
    disk.fill()
    assert "no space left for run directories" in server.ask("GET", "/readyz").json()["error"]["message"]
    late = server.submit(*ground.counting(2))
    wait_for(lambda: "No space left" in (server.job(late)["status_message"] or ""), "the launch to be refused")
    disk.grow()
    ground.open_gate("go")
    assert server.until(bystander)["attempt"] == 1
    server.until(late)
    assert {entry.pid for entry in ground.ledger() if entry.job_id == bystander} == {rank}
    check(ground, server, {greedy: "FAILED", lost: "FAILED", bystander: "COMPLETED", late: "COMPLETED"})


def test_full_disk_of_the_database_refuses_what_it_cannot_keep(disk: SmallDisk, ground: Ground) -> None:
    elsewhere = ["--runs-root", str(ground.path / "runs"), "--artifacts-root", str(ground.path / "artifacts")]
    server = ground.server("disk/data", *elsewhere).start()
    running = server.submit(*ground.counting(3, save_every=2, gate="go"))
    ground.until_counted(running, 1)
    disk.fill()
    accepted = [running]
    while True:
        answer = submit(server, ground, f"job {len(accepted)}")
        if answer is None:
            break
        accepted.append(answer)
    assert server.job(running)["job_id"] == running, "what is on disk can be read"
    unready = server.ask("GET", "/readyz")
    assert (unready.status_code, unready.json()["error"]["code"]) == (503, "UNHEALTHY")
    assert "no space left for the database" in unready.json()["error"]["message"]
    ground.open_gate("go")
    wait_for(lambda: [entry for entry in ground.ledger() if entry.what == "end"], "the job to end meanwhile")
    disk.free()
    assert server.ask("GET", "/readyz").status_code == 200
    again = wait_for(lambda: submit(server, ground, f"job {len(accepted)}"), "the server to accept jobs again")
    for job_id in (*accepted, again):
        server.until(job_id)
    check(ground, server, dict.fromkeys((*accepted, again), "COMPLETED"))


def test_locked_database_makes_requests_wait_and_loses_nothing(ground: Ground) -> None:
    server = ground.server().start()
    running = server.submit(*ground.counting(3, save_every=2, gate="go"))
    ground.until_counted(running, 1)
    with closing(sqlite3.connect(server.directory / "trainmaster.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert submit(server, ground, "job") is None
        assert server.job(running)["job_id"] == running, "what is on disk can be read"
        ground.open_gate("go")
        wait_for(lambda: [entry for entry in ground.ledger() if entry.what == "end"], "the job to end meanwhile")
        other.execute("ROLLBACK")
    late = wait_for(lambda: submit(server, ground, "job"), "the server to accept jobs again")
    for job_id in (running, late):
        assert server.until(job_id)["attempt"] == 1
    check(ground, server, {running: "COMPLETED", late: "COMPLETED"})


def submit(server: MortalServer, ground: Ground, key: str) -> str | None:
    """The id of a new job; None when the server says that it cannot keep one now."""
    answer = server.ask("POST", "/v1/jobs", ground.quick_job(), headers={"Idempotency-Key": key})
    document = answer.json()
    if answer.status_code == 201:
        return str(document["data"]["job_id"])
    assert answer.status_code == 503
    assert document["status"] == "error"
    assert document["error"]["code"] == "UNAVAILABLE"
    assert answer.headers["Retry-After"]
    return None
