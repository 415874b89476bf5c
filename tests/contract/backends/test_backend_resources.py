"""Several jobs at once: each has what was booked for it, the others wait, and all of it comes back."""

from __future__ import annotations

from typing import Any

import pytest
from backends_under_test import BackendUnderTest, long_on

from job_server import JobServer
from real_server import wait_for
from trainmaster.backends.base import PlacementBy

SHOWS_AND_WAITS = ["sh", "-c", "echo gpus=$CUDA_VISIBLE_DEVICES; exec sleep 600"]


@pytest.fixture(autouse=True)
def placed_by_us(backend: BackendUnderTest) -> None:
    """Where we know the nodes."""
    if backend.capabilities.placement is not PlacementBy.US:
        pytest.skip("the engine places")


def gpus(server: JobServer) -> dict[str, Any]:
    (node,) = server.data("GET", "/v1/nodes")["nodes"]
    return {str(gpu["index"]): gpu["job_id"] for gpu in node["gpus"]}


@long_on("local-files", "container")
def test_jobs_at_once_have_gpus_of_their_own_and_give_them_back(server: JobServer) -> None:
    jobs = [server.submit(*SHOWS_AND_WAITS, resource_config={"gpu_count": 1}) for _ in range(2)]
    none = server.submit(*SHOWS_AND_WAITS)
    seen = [server.wait_for_line(job_id, "gpus=").removeprefix("gpus=") for job_id in jobs]
    assert sorted(seen) == ["0", "1"]
    assert server.wait_for_line(none, "gpus=") == "gpus="
    assert gpus(server) == dict(zip(seen, jobs, strict=True))
    for job_id in (*jobs, none):
        server.until(job_id, "TRAINING")

    waiting = server.submit("true", resource_config={"gpu_count": 1})
    job = server.until(waiting, "QUEUED")
    assert (job["queue_position"], job["placement"]) == (1, None)
    wait_for(lambda: any(job_id in (server.job(waiting)["pending_reason"] or "") for job_id in jobs), "who holds them")
    server.control(jobs[0], "cancel")
    assert server.until(waiting)["status"] == "COMPLETED"
    assert gpus(server) == {seen[0]: None, seen[1]: jobs[1]}


@long_on("local-http", "container")
def test_cores_and_memory_are_booked_while_a_job_runs(server: JobServer) -> None:
    (node,) = server.data("GET", "/v1/nodes")["nodes"]
    booked = {"gpu_count": 0, "cpu_cores": node["cpu_cores"]["total"], "ram_min_mb": 512}
    holder = server.submit("sh", "-c", "echo up; exec sleep 600", resource_config=booked)
    server.wait_for_line(holder, "up")
    (held,) = server.data("GET", "/v1/nodes")["nodes"]
    assert held["cpu_cores"]["free"] == 0
    assert held["ram_mb"]["free"] == node["ram_mb"]["free"] - 512
    waiting = server.submit("true", resource_config={"gpu_count": 0, "cpu_cores": 1})
    wait_for(lambda: "core" in (server.job(waiting)["pending_reason"] or ""), "why it waits")
    server.control(holder, "cancel")
    assert server.until(waiting)["status"] == "COMPLETED"
    wait_for(lambda: server.data("GET", "/v1/nodes")["nodes"][0]["cpu_cores"] == node["cpu_cores"], "all the cores")
