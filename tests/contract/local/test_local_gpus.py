"""GPUs: what is listed, what jobs are given of it, and who waits for what."""

from __future__ import annotations

from typing import Any

import pytest

from local_servers import LocalServer, over
from real_server import wait_for

pytestmark = over("files")  # who gets which GPU is decided by the server
SHOWS_AND_WAITS = ["sh", "-c", "echo gpus=$CUDA_VISIBLE_DEVICES; exec sleep 600"]


@pytest.fixture(scope="module")
def simulated_gpus() -> str:
    return "H100-80GB:2,A100-40GB:1;H100-80GB:2"


def submit(server: LocalServer, argv: list[str] = SHOWS_AND_WAITS, **resources: Any) -> str:
    return server.submit(*argv, resource_config=resources)


def running(server: LocalServer, **resources: Any) -> tuple[str, str, list[str]]:
    """Start a job; its id, the one node that it got, and its GPUs there."""
    job_id = submit(server, **resources)
    (node,) = server.until(job_id, "TRAINING")["placement"]["nodes"]
    return job_id, node, server.wait_for_line(job_id, "gpus=").removeprefix("gpus=").split(",")


def free_gpus(server: LocalServer) -> int:
    nodes = server.data("GET", "/v1/nodes")["nodes"]
    return sum(gpu["free"] for node in nodes for gpu in node["gpus"])


def test_simulated_nodes_are_listed(server: LocalServer) -> None:
    nodes = wait_for(lambda: server.data("GET", "/v1/nodes")["nodes"], "the inventory")
    assert [[(gpu["type"], gpu["memory_mb"], gpu["free"]) for gpu in node["gpus"]] for node in nodes] == [
        [("H100-80GB", 81920, True)] * 2 + [("A100-40GB", 40960, True)],
        [("H100-80GB", 81920, True)] * 2,
    ]
    assert all(node["state"] == "READY" and node["cpu_cores"]["free"] > 0 for node in nodes)


def test_gpus_of_running_jobs_are_disjoint_and_come_back(server: LocalServer) -> None:
    started = [running(server, gpu_count=count) for count in (1, 2, 1, 1)]
    taken = [(node, gpu) for _, node, gpus in started for gpu in gpus]
    assert len(set(taken)) == len(taken) == 5
    for job_id, node, gpus in started:
        shown = server.job(job_id)["placement"]["gpus"]
        assert [(gpu["node_id"], str(gpu["index"])) for gpu in shown] == [(node, gpu) for gpu in gpus]
    holders = {
        (node["id"], str(gpu["index"])): gpu["job_id"]
        for node in server.data("GET", "/v1/nodes")["nodes"]
        for gpu in node["gpus"]
    }
    assert holders == {(node, gpu): job_id for job_id, node, gpus in started for gpu in gpus}
    for job_id, _, _ in started:
        server.control(job_id, "cancel")
        server.until(job_id, "CANCELLED")
    assert free_gpus(server) == 5


def test_gpu_type_is_a_hard_need_and_loosely_written(server: LocalServer) -> None:
    _, _, gpus = running(server, gpu_count=1, gpu_type="a100 40gb")
    assert gpus == ["2"]
    second = submit(server, gpu_count=1, gpu_type="A100-40GB")
    waiting = server.until(second, "QUEUED")
    assert "A100-40GB" in waiting["pending_reason"]
    assert free_gpus(server) == 4


def test_job_that_needs_more_waits_and_starts_when_the_holder_is_cancelled(server: LocalServer) -> None:
    holders = [running(server, gpu_count=2)[0] for _ in range(2)]
    first, second = submit(server, gpu_count=2), submit(server, gpu_count=2)
    for position, job_id in enumerate((first, second), 1):
        job = server.until(job_id, "QUEUED")
        assert job["queue_position"] == position
        assert "2 × GPU" in job["pending_reason"]
        assert any(holder in job["pending_reason"] for holder in holders)
        assert job["placement"] is None
    server.control(holders[0], "cancel")
    server.until(first, "TRAINING")
    assert server.job(second)["queue_position"] == 1
    server.control(first, "cancel")
    job = server.until(second, "TRAINING")
    assert (job["queue_position"], job["pending_reason"]) == (None, None)


def test_job_that_no_simulated_node_fits_is_refused_unless_it_may_wait(server: LocalServer) -> None:
    document = {
        "name": "large",
        "workload": {"kind": "command", "argv": ["true"]},
        "resource_config": {"gpu_count": 8},
        "scheduling_config": {"allow_waiting_for_nodes": False},
    }
    refused = server.ask("POST", "/v1/jobs", document)
    assert refused.status_code == 400
    assert "no node has 8 × GPU; the largest has 3" in refused.json()["error"]["message"]
    document["scheduling_config"] = {"allow_waiting_for_nodes": True}
    job = server.until(server.data("POST", "/v1/jobs", document)["job_id"], "QUEUED")
    assert "no node has" in job["pending_reason"]


def test_job_without_a_count_gets_one_gpu_and_zero_gets_none(server: LocalServer) -> None:
    assert len(running(server)[2]) == 1
    assert running(server, gpu_count=0)[2] == [""]


def test_gang_gets_its_share_on_each_node(server: LocalServer) -> None:
    argv = ["sh", "-c", "echo $NODE_RANK=$CUDA_VISIBLE_DEVICES"]
    job_id = submit(server, argv, gpu_count=4, node_count=2, gpu_type="H100")
    job = server.until(job_id)
    assert job["status"] == "COMPLETED"
    assert sorted(server.lines(job_id)) == ["0=0,1", "1=0,1"]
    assert len(set(job["attempts"][0]["placement"]["nodes"])) == 2
