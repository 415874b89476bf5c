"""kill -9 of a real server at points of its jobs' lives."""

from __future__ import annotations

import socket

import pytest
from aftermath import check
from ground import Ground, MortalServer

from real_server import wait_for

POINT = "store.before_commit:4"
MORE_POINTS = [
    "store.after_commit:9",
    "act.before_submit:5",
    "act.after:7",
    "store.before_commit:1",
    "store.before_commit:7",
    "store.before_commit:12",
    "store.after_commit:5",
    "store.after_commit:15",
    "act.before:1",
    "act.before:6",
    "act.after:3",
]
"""`test_every_crash_point.py` goes through all of them, in one process."""


@pytest.mark.parametrize("point", [POINT, *(pytest.param(point, marks=pytest.mark.long) for point in MORE_POINTS)])
def test_server_killed_loses_nothing_and_doubles_nothing(ground: Ground, point: str) -> None:
    play(ground, ground.server().start(TRAINMASTER_FAILPOINT=point))


def test_server_killed_over_http_loses_nothing_and_doubles_nothing(ground: Ground) -> None:
    # Couriers come back to the address that they know.
    server = ground.server("data", "--transport", "http", "--port", str(free_port()))
    play(ground, server.start(TRAINMASTER_FAILPOINT="act.after:6"))
    assert not list(server.directory.glob("spool/*")), "something was never delivered"


def play(ground: Ground, server: MortalServer) -> None:
    """Jobs of every sort, at one of whose moments the server dies."""
    cancelled = server.submit(*ground.counting(2, gate="never"))
    paused = server.submit(*ground.counting(5, save_every=2, gate="resumed", gate_at=3))
    short = server.submit(*ground.counting(3))
    saving = server.submit(*ground.counting(6, save_every=2))
    gang = server.submit(*ground.counting(3), resource_config={"gpu_count": 0, "node_count": 2})
    ground.until_counted(cancelled, 1)
    server.data("POST", f"/v1/jobs/{cancelled}/cancel")
    ground.until_counted(paused, 3)
    wait_for(lambda: server.job(paused)["can_save"], "it to be known that the job saves")
    server.data("POST", f"/v1/jobs/{paused}/pause")
    server.until(paused, "PAUSED")
    ground.open_gate("resumed")
    server.data("POST", f"/v1/jobs/{paused}/resume")
    expected = {cancelled: "CANCELLED"} | dict.fromkeys((paused, short, saving, gang), "COMPLETED")
    for job_id in expected:
        server.until(job_id)
    assert server.deaths == 1
    assert [checkpoint["step"] for checkpoint in server.job(saving)["checkpoints"]] == [2, 4, 6]
    assert [attempt["reason"] for attempt in server.job(paused)["attempts"]] == ["PAUSED", "SUCCEEDED"]
    check(ground, server, expected)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
