"""Built-in runtimes at work on a real server: what their processes find, and what is installed where they run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from real_server import RealServer, running, wait_for
from trainmaster.client import Client, RefusedError
from trainmaster.protocol.function_runner import files_of_mpi
from trainmaster.protocol.processes import identity_of
from trainmaster.trainer.runtimes import RuntimeCatalog, TrainingRuntime, runtime_packages

JAX = """\
def meet():
    import os

    import jax

    jax.config.update("jax_platforms", "cpu")
    count, mine = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
    jax.distributed.initialize(num_processes=count, process_id=mine)
    found = [jax.process_count(), jax.process_index(), len(jax.devices())]
    jax.distributed.shutdown()
    return found
"""
MLX = """\
def add_up():
    import mlx.core as mx

    group = mx.distributed.init(backend="mpi", strict=True)
    total = mx.distributed.all_sum(mx.array([group.rank() + 1]), group=group)
    return [group.rank(), group.size(), total.item(), str(mx.default_device())]
"""
MPI = """\
def meet(then):
    import os
    import time

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    print("I am", *(os.environ[name] for name in names), os.getpid(), flush=True)
    if then == "raise" and world.rank == 1:
        raise ValueError("bad rate")
    world.barrier()
    if then == "stay":
        time.sleep(600)
    return [world.rank, world.size, world.allreduce(world.rank)]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with running(tmp_path_factory.mktemp("runtimes") / "data") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[Client]:
    with Client(server.url, server.key) as client:
        yield client


def runtime(name: str) -> TrainingRuntime:
    return RuntimeCatalog().definition(name)


def submit(
    server: RealServer,
    source: str,
    environment: Mapping[str, str],
    *,
    nodes: int = 1,
    ranks: int = 1,
    arguments: Mapping[str, str] | None = None,
) -> str:
    """A function as a job of a runtime."""
    workload = {
        "kind": "function",
        "source": source,
        "name": source.split("(")[0].removeprefix("def "),
        "arguments": dict(arguments or {}),
        "environment": dict(environment),
        "ranks_per_node": ranks,
    }
    body = {"name": "test", "workload": workload, "resource_config": {"gpu_count": 0, "node_count": nodes}}
    return str(server.data("POST", "/v1/jobs", body)["job_id"])


def meet(server: RealServer, then: str, **shape: int) -> str:
    """A job whose processes meet by MPI."""
    return submit(server, MPI, runtime("mpi").environment, arguments={"then": then}, **shape)


def ranks_of(server: RealServer, job_id: str) -> list[list[int]]:
    """What the processes of MPI have said of themselves: rank, size, local rank, local size, node; and their pid."""
    said = [line.removeprefix("I am ").split() for line in server.lines(job_id) if line.startswith("I am ")]
    return sorted([int(word) for word in words] for words in said)


def result_of(client: Client, job: Any, place: Path) -> Any:
    assert job["status"] == "COMPLETED", job["error"]
    client.results.download(job["job_id"], place, patterns=["result.json"])
    return json.loads((place / "result.json").read_text())


def test_packages_of_a_runtime_are_printed_and_its_job_is_gone(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    found = runtime_packages(client, runtime("torch-distributed"))
    assert any(line.startswith("torch==") for line in found)
    assert [line.partition("==")[0].lower() for line in found] == sorted(
        line.partition("==")[0].lower() for line in found
    )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("torch-distributed: ")
    assert printed[1:] == found
    assert list(client.list()) == []


def test_packages_of_a_runtime_that_cannot_start_say_why_and_leave_no_job(client: Client) -> None:
    broken = dataclasses.replace(runtime("python"), environment={"PYTHONHOME": "/nowhere"})
    with pytest.raises(RuntimeError, match=r"packages of runtime python cannot be listed: (?s:.+)Python"):
        runtime_packages(client, broken)
    assert list(client.list()) == []


def test_packages_on_a_backend_that_is_not_there_are_refused(client: Client) -> None:
    with pytest.raises(RefusedError, match="backend"):
        runtime_packages(client, runtime("python"), backend="nowhere")


def test_processes_of_jax_meet(server: RealServer, client: Client, tmp_path: Path) -> None:
    environment = {**runtime("jax-distributed").environment, "OMP_NUM_THREADS": "1"}
    job = server.until(submit(server, JAX, environment, nodes=2))
    assert result_of(client, job, tmp_path) == [2, 0, 2]


@pytest.mark.long  # the next one has two nodes
def test_mpi_starts_the_processes_of_a_node(server: RealServer, client: Client, tmp_path: Path) -> None:
    job = server.until(meet(server, "return", ranks=3))
    assert result_of(client, job, tmp_path) == [0, 3, 3]
    assert [rank[:5] for rank in ranks_of(server, job["job_id"])] == [[rank, 3, rank, 3, 0] for rank in range(3)]


def test_mpi_starts_the_processes_of_every_node_without_a_remote_shell(
    server: RealServer, client: Client, tmp_path: Path
) -> None:
    job = server.until(meet(server, "return", nodes=2, ranks=2))
    assert result_of(client, job, tmp_path) == [0, 4, 6]
    found = [rank[:5] for rank in ranks_of(server, job["job_id"])]
    assert found == [[0, 4, 0, 2, 0], [1, 4, 1, 2, 0], [2, 4, 0, 2, 1], [3, 4, 1, 2, 1]]


def test_mlx_computes_on_the_cpu_across_nodes(server: RealServer, client: Client, tmp_path: Path) -> None:
    job = server.until(submit(server, MLX, runtime("mlx-distributed").environment, nodes=2))
    assert result_of(client, job, tmp_path) == [0, 2, 3, "Device(cpu, 0)"]


def test_mpi_process_that_fails_ends_those_that_wait_for_it(server: RealServer) -> None:
    job = server.until(meet(server, "raise", nodes=2))
    assert (job["status"], job["error"]["error_type"]) == ("FAILED", "EXITED_NONZERO")
    # The code is that of whoever the launcher saw first: the one that failed, or the one that lost it.
    assert re.fullmatch(r"rank 0 exited with code \d+: ValueError: bad rate", job["error"]["error_message"])


def test_mpi_job_that_is_cancelled_leaves_no_process_on_any_node(server: RealServer) -> None:
    job_id = meet(server, "stay", nodes=2)
    found = wait_for(lambda: len(found := ranks_of(server, job_id)) == 2 and found, "both to be there")
    server.data("POST", f"/v1/jobs/{job_id}/cancel")
    server.until(job_id, "CANCELLED")
    assert [identity_of(pid) for *_, pid in found] == [None, None]


def test_mpi_of_a_package_is_found_wherever_that_is_installed() -> None:
    (program,) = files_of_mpi("mpirun")
    assert os.access(program, os.X_OK)
    assert files_of_mpi("mpirun-of-nobody") == []


def test_processes_of_xgboost_find_the_tracker_and_their_numbers(server: RealServer) -> None:
    source = """\
def show():
    import os

    names = ("DMLC_NUM_WORKER", "DMLC_TASK_ID", "DMLC_TRACKER_URI", "DMLC_TRACKER_PORT", "MASTER_ADDR", "MASTER_PORT")
    print(*(os.environ[name] for name in names))
"""
    job = server.until(submit(server, source, runtime("xgboost-distributed").environment, nodes=2))
    said = sorted(line.split() for line in server.lines(job["job_id"]))
    assert [words[:2] for words in said] == [["2", "0"], ["2", "1"]]
    assert all(words[2:4] == words[4:] for words in said)


def test_mpi_that_is_not_installed_is_told(server: RealServer) -> None:
    job = server.until(submit(server, MPI, {"MPI_LAUNCHER": "mpirun-of-nobody -n 1"}, arguments={"then": "return"}))
    assert job["status"] == "FAILED"
    assert any("mpirun-of-nobody, which starts the processes of MPI" in line for line in server.lines(job["job_id"]))
