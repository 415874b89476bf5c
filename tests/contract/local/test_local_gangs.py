"""Gangs: two workers on this host, their ranks' environment, and how they fail together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from local_servers import LocalServer, is_alive, json_lines

MEETS = """
import json, os, socket, sys

names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT CUDA_VISIBLE_DEVICES"
print(json.dumps({name: os.environ.get(name) for name in names.split()}), flush=True)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(place) as listener:
        met = [0]
        while len(met) < size:
            connection, _ = listener.accept()
            with connection:
                met.append(int(connection.recv(16)))
                connection.sendall(b"welcome")
    print("met", *sorted(met))
else:
    while True:
        try:
            with socket.create_connection(place, timeout=60) as connection:
                connection.sendall(str(rank).encode())
                assert connection.recv(16) == b"welcome"
            break
        except ConnectionRefusedError:
            pass
"""

ONE_FAILS = """
import os, pathlib, sys, time

here, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
(here / rank).touch()
if rank == "3":
    while len(list(here.iterdir())) < 4:
        time.sleep(0.01)
    sys.exit("rank three gives up")
time.sleep(600)
"""

GANG: dict[str, Any] = {"resource_config": {"gpu_count": 0, "node_count": 2}, "workload": {"ranks_per_node": 2}}


def test_ranks_of_two_nodes_meet(server: LocalServer, scripts: Path) -> None:
    (scripts / "meets.py").write_text(MEETS)
    job_id = server.submit_python(scripts / "meets.py", **GANG)
    job = server.until(job_id)
    assert job["status"] == "COMPLETED"
    assert len(job["attempts"][0]["placement"]["nodes"]) == 2
    lines = server.lines(job_id)
    assert "met 0 1 2 3" in lines
    ranks = sorted(json_lines(lines), key=lambda rank: int(rank["RANK"]))
    (port,) = {rank.pop("MASTER_PORT") for rank in ranks}
    assert int(port) > 0
    shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    assert ranks == [
        {"RANK": f"{n}", "LOCAL_RANK": f"{n % 2}", "NODE_RANK": f"{n // 2}", "GROUP_RANK": f"{n // 2}", **shared}
        for n in range(4)
    ]
    found = server.data("GET", f"/v1/jobs/{job_id}/logs?rank=0&limit=1000")["lines"]
    assert {(line["rank"], line["node"]) for line in found} == {(0, 0)}
    assert len(server.lines(job_id, rank=3)) == 1


def test_one_failing_rank_stops_all_and_is_named(server: LocalServer, scripts: Path) -> None:
    (scripts / "fails.py").write_text(ONE_FAILS)
    (scripts / "here").mkdir()
    job_id = server.submit_python(scripts / "fails.py", scripts / "here", **GANG)
    pids = server.rank_pids(job_id, nodes=2)
    assert sorted(pids) == [0, 1, 2, 3]
    job = server.until(job_id, "FAILED")
    error = job["error"]
    assert (error["error_type"], error["rank"], error["exit_code"]) == ("EXITED_NONZERO", 3, 1)
    assert "rank 3" in error["error_message"]
    assert error["last_lines"] == ["rank three gives up"]
    assert not any(is_alive(pid) for pid in pids.values())


def test_cancelled_gang_is_gone_on_all_nodes(server: LocalServer) -> None:
    job_id = server.submit_workload(
        "command", {"argv": ["sleep", "600"], "ranks_per_node": 2}, resource_config=GANG["resource_config"]
    )
    pids = server.rank_pids(job_id, nodes=2)
    server.control(job_id, "cancel")
    assert server.until(job_id, "CANCELLED")["placement"] is None
    assert not any(is_alive(pid) for pid in pids.values())
