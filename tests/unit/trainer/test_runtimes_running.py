"""Built-in runtimes at work on a real server: what their processes find, and what is installed where they run."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from real_server import RealServer, running
from trainmaster.sdk import Client, RefusedError
from trainmaster.trainer.runtimes import RuntimeCatalog, TrainingRuntime, runtime_packages

MPIRUN = """\
#!/bin/sh
# Stands in for Open MPI: starts so many processes with the variables of their ranks.
[ "$1" = --oversubscribe ] && [ "$2" = -n ] || exit 64
size=$3; shift 3
for rank in $(seq 0 $((size - 1))); do
  OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=$size \\
  OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_LOCAL_SIZE=$size "$@" &
done
wait
"""
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
WHO = """\
def who():
    import os

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    print("I am", *(os.environ[name] for name in names))
    return os.environ["RANK"]
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


def run(server: RealServer, source: str, environment: Mapping[str, str], *, nodes: int = 1, ranks: int = 1) -> Any:
    """A function as a job of a runtime; returns the job when it has ended."""
    workload = {
        "kind": "function",
        "source": source,
        "name": source.split("(")[0].removeprefix("def "),
        "environment": dict(environment),
        "ranks_per_node": ranks,
    }
    body = {"name": "test", "workload": workload, "resource_config": {"gpu_count": 0, "node_count": nodes}}
    return server.until(server.data("POST", "/v1/jobs", body)["job_id"])


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
    job = run(server, JAX, {**runtime("jax-distributed").environment, "OMP_NUM_THREADS": "1"}, nodes=2)
    assert result_of(client, job, tmp_path) == [2, 0, 2]


def test_mpi_starts_the_processes_of_a_node(server: RealServer, client: Client, tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text(MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    job = run(server, WHO, {**runtime("mpi").environment, "PATH": path}, ranks=3)
    assert result_of(client, job, tmp_path) == "0"
    assert sorted(server.lines(job["job_id"])) == ["I am 0 3 0 3", "I am 1 3 1 3", "I am 2 3 2 3"]


def test_mpi_that_is_not_installed_is_told(server: RealServer, tmp_path: Path) -> None:
    job = run(server, WHO, {**runtime("mpi").environment, "PATH": str(tmp_path)}, ranks=2)
    assert job["status"] == "FAILED"
    assert any("mpirun, which starts the processes of MPI" in line for line in server.lines(job["job_id"]))


def test_mpi_on_several_nodes_is_refused_in_words(server: RealServer) -> None:
    job = run(server, WHO, runtime("mpi").environment, nodes=2)
    assert job["status"] == "FAILED"
    assert any("functions that use MPI run on one node" in line for line in server.lines(job["job_id"]))
