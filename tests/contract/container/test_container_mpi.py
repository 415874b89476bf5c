"""Processes of MPI in several containers, without a remote shell: Open MPI's daemons are started by the job itself."""

from __future__ import annotations

import sys
import sysconfig

from container_servers import ContainerServer
from trainmaster.trainer.runtimes import RuntimeCatalog

MEET = """\
def meet():
    import socket

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    print("rank", world.rank, "of", world.size, "sum", world.allreduce(world.rank), socket.gethostname(), flush=True)
"""


def test_processes_in_two_containers_meet(container_server: ContainerServer) -> None:
    server, ours = container_server, sys.prefix
    environment = {
        **RuntimeCatalog().definition("mpi").environment,
        "PATH": f"{ours}/bin:/usr/bin:/bin",
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "MPI4PY_LIBMPI": f"{ours}/lib/libmpi.so.40",
    }
    job_id = server.submit(
        workload={
            "kind": "function",
            "source": MEET,
            "name": "meet",
            "environment": environment,
            "ranks_per_node": 2,
            "volumes": [{"source": ours, "target": ours, "read_only": True}],
        },
        resource_config={"gpu_count": 0, "node_count": 2},
    )
    job = server.until(job_id)
    assert job["status"] == "COMPLETED", job["error"]
    said = sorted(line.split() for line in server.lines(job_id) if line.startswith("rank "))
    assert [words[:6] for words in said] == [["rank", str(rank), "of", "4", "sum", "6"] for rank in range(4)]
    hosts = [words[6] for words in said]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
