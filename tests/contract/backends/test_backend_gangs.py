"""Gangs: two nodes of two ranks each, who find each other, and fail together."""

from __future__ import annotations

from typing import Any

from backends_under_test import BackendUnderTest, long_on

from job_server import JobServer, json_lines
from real_server import wait_for

MEETS = """
import json, os, socket, sys, time

names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES"
print(json.dumps({name: os.environ.get(name) for name in names.split()}), flush=True)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(place) as listener:
        met = {0: None}
        while len(met) < size:
            connection, _ = listener.accept()
            met[int(connection.recv(16))] = connection
    print("met", *sorted(met), flush=True)
    for other in range(1, size):
        met[other].sendall(b"welcome")
else:
    while True:
        try:
            connection = socket.create_connection(place, timeout=300)
            break
        except OSError:
            time.sleep(0.02)
    connection.sendall(str(rank).encode())
    assert connection.recv(16) == b"welcome"
if "fail" in sys.argv:
    if rank == 3:
        sys.exit("rank three gives up")
    time.sleep(600)
"""

GANG: dict[str, Any] = {"resource_config": {"gpu_count": 0, "node_count": 2}}


@long_on("local-files")
def test_ranks_of_two_nodes_meet(backend: BackendUnderTest, server: JobServer) -> None:
    job_id = server.submit_source(MEETS, workload={"ranks_per_node": 2}, **GANG)
    job = server.until(job_id)
    assert job["status"] == "COMPLETED", job["error"]
    assert len(job["attempts"][0]["placement"]["nodes"]) == 2
    lines = server.lines(job_id)
    assert "met 0 1 2 3" in lines
    ranks = sorted(json_lines(lines), key=lambda rank: int(rank["RANK"]))
    (place,) = {(rank.pop("MASTER_ADDR"), rank.pop("MASTER_PORT")) for rank in ranks}
    assert int(place[1]) > 0
    shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    assert ranks == [
        {"RANK": f"{n}", "LOCAL_RANK": f"{n % 2}", "NODE_RANK": f"{n // 2}", "GROUP_RANK": f"{n // 2}", **shared}
        for n in range(4)
    ]
    found = server.data("GET", f"/v1/jobs/{job_id}/logs?rank=0&limit=1000")["lines"]
    assert {(line["rank"], line["node"]) for line in found} == {(0, 0)}
    assert len(server.lines(job_id, rank=3)) == 1
    backend.wait_until_nothing_is_left(job_id)


@long_on("local-files", "container")
def test_one_failing_rank_stops_all_and_is_named(backend: BackendUnderTest, server: JobServer) -> None:
    job_id = server.submit_source(MEETS, "fail", workload={"ranks_per_node": 2}, **GANG)
    error = server.until(job_id, "FAILED")["error"]
    assert (error["error_type"], error["rank"], error["exit_code"]) == ("EXITED_NONZERO", 3, 1)
    assert "rank 3" in error["error_message"]
    assert error["last_lines"][-1] == "rank three gives up"
    backend.wait_until_nothing_is_left(job_id)


@long_on("local-http")
def test_gang_ends_as_a_whole_when_one_of_its_nodes_is_lost(backend: BackendUnderTest, server: JobServer) -> None:
    job_id = server.submit("sh", "-c", "echo up; exec sleep 600", **GANG)
    wait_for(lambda: server.lines(job_id).count("up") == 2, "both nodes")
    backend.lose_node(job_id, node=1)
    job = server.until(job_id, "FAILED")
    assert job["error_type"] == "WORKER_LOST"
    backend.wait_until_nothing_is_left(job_id)
