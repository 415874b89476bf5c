"""What ranks on this machine are told of its cores."""

from __future__ import annotations

import os

from local_servers import LocalServer


def test_threads_of_ranks_follow_from_the_cores_that_the_job_books(server: LocalServer) -> None:
    show = ["sh", "-c", 'echo "threads: $OMP_NUM_THREADS"']
    cores = server.data("GET", "/v1/nodes")["nodes"][0]["cpu_cores"]["total"]
    booked = {"gpu_count": 0, "cpu_cores": cores}
    alone = server.submit_workload("command", {"argv": show}, resource_config=booked)
    chosen = {"argv": show, "environment": {"OMP_NUM_THREADS": "3"}}
    said = server.submit_workload("command", chosen, resource_config=booked)
    of_the_server = os.environ.get("OMP_NUM_THREADS")  # which its jobs inherit
    for job_id, threads in ((alone, of_the_server or cores), (said, 3)):
        server.until(job_id)
        assert server.lines(job_id) == [f"threads: {threads}"]
