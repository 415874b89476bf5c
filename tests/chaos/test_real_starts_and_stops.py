"""Orderly starts and stops of a server, and starts that are refused."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing

import httpx
from aftermath import check
from ground import Ground, MortalServer

from patience import PATIENCE_S
from real_server import wait_for
from trainmaster.protocol.processes import identity_of
from warm_server import ForkedCommand


def refused_start(server: MortalServer) -> str:
    """What a server says that does not start."""
    with open(server.directory.parent / "said", "w+") as said:
        command = ["serve", "--port", "0", "--data-dir", str(server.directory)]
        refused = ForkedCommand(command, env=os.environ, stderr=said)
        with refused.stdout:
            assert refused.stdout.read() == ""
        assert refused.wait() == 1
        said.seek(0)
        text = said.read()
    assert "Traceback" not in text
    return " ".join(text.split())


def test_stopped_server_leaves_jobs_running_and_takes_in_later_what_they_did(ground: Ground) -> None:
    server = ground.server().start()
    running = server.submit(*ground.counting(3, save_every=2, gate="after the restart"))
    ended = server.submit(*ground.counting(3, save_every=2, gate="before the restart"))
    pids = {job_id: ground.until_counted(job_id, 1).pid for job_id in (running, ended)}
    headers = {"Authorization": f"Bearer {server.key}"}
    addresses = [f"{server.url}/v1/jobs/{running}/{what}" for what in ("logs?follow=true", "metrics/stream")]
    with httpx.Client(headers=headers, timeout=PATIENCE_S) as client:
        followers = [client.send(client.build_request("GET", address), stream=True) for address in addresses]
        pieces = [follower.iter_raw() for follower in followers]
        for piece in pieces:
            next(piece)  # It is being followed.
        assert server.process is not None
        server.process.terminate()
        assert server.wait() == 0
        for piece in pieces:
            assert b"event: end" not in b"".join(piece)
    assert not (server.directory / "server.json").exists()
    assert all(identity_of(pid) is not None for pid in pids.values())

    ground.open_gate("before the restart")
    wait_for(lambda: identity_of(pids[ended]) is None, "the job to end while no server runs")
    server.start()
    assert server.until(ended)["attempt"] == 1
    assert identity_of(pids[running]) is not None
    ground.open_gate("after the restart")
    job = server.until(running)
    assert job["attempt"] == 1
    assert [checkpoint["step"] for checkpoint in job["checkpoints"]] == [2]
    assert [entry.pid for entry in ground.ledger() if entry.what == "end"] == [pids[ended], pids[running]]
    check(ground, server, {running: "COMPLETED", ended: "COMPLETED"})


def test_second_server_on_a_data_directory_is_refused(ground: Ground) -> None:
    server = ground.server().start()
    said = refused_start(server)
    assert f"another server runs on {server.directory}" in said
    assert "--data-dir" in said
    check(ground, server, {})


def test_server_refuses_the_database_of_a_newer_version(ground: Ground) -> None:
    server = ground.server().start()
    server.stop()
    with closing(sqlite3.connect(server.directory / "trainmaster.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    said = refused_start(server)
    assert "revision 9999" in said
    assert "newer version of Trainmaster" in said
    ground.leave()


def test_server_does_not_start_on_an_empty_database_beside_run_directories(ground: Ground) -> None:
    server = ground.server().start()
    job_id = server.submit("true")
    server.until(job_id)
    server.stop()
    database = server.directory / "trainmaster.db"
    kept = database.read_bytes()
    for path in server.directory.glob("trainmaster.db*"):
        path.unlink()
    database.touch()
    for _ in range(2):  # the first start has made the tables
        said = refused_start(server)
        assert "has no jobs" in said
        assert "Restore it from a backup" in said
    for path in server.directory.glob("trainmaster.db*"):
        path.unlink()
    database.write_bytes(kept)
    server.start()
    assert server.job(job_id)["status"] == "COMPLETED"
    ground.leave()
