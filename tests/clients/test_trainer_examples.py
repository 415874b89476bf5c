"""The examples of Kubeflow's reference of its client on a server that has room for them; and its status reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_examples import GPUS, LARGE_MACHINE, SIMULATED_GPUS, SLICE, WATCHING, run_example

from client_programs import ROOT
from real_server import PATIENCE_S, RealServer, wait_for
from trainmaster import TrainerClient
from trainmaster.trainer import CustomTrainer, TrainJob
from trainmaster.trainer.options import Name


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    started = RealServer(tmp_path_factory.mktemp("examples") / "data", "--simulated-gpus", SIMULATED_GPUS)
    started.command = LARGE_MACHINE
    try:
        yield started.start()
    finally:
        started.clean_up()


@pytest.fixture
def client(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerClient]:
    monkeypatch.setenv("TRAINMASTER_URL", server.url)
    monkeypatch.setenv("TRAINMASTER_API_KEY", server.key)
    with TrainerClient() as made:
        yield made


def tell_devices() -> dict[str, str]:
    """What this rank finds, and what it was given."""
    import os

    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
    return {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}


def report_to(package: str, gate: str, paths: list[str]) -> list[bool]:
    """Report twice by Kubeflow's protocol, with the library of that name; the second report comes too soon."""
    import importlib
    import os
    import sys
    import time

    sys.path += paths
    update = importlib.import_module(package).update_trainjob_status
    sent = [
        update(progress_percent=42, estimated_remaining_seconds=90, metrics={"loss": 0.25, "tokens": 1000}),
        update(progress_percent=43),
    ]
    while not os.path.exists(gate):
        time.sleep(0.02)
    return sent


def finished(client: TrainerClient, name: str) -> TrainJob:
    return client.wait_for_job_status(name, timeout=PATIENCE_S, polling_interval=0.05)


def test_logs_are_watched_in_realtime(client: TrainerClient, capsys: pytest.CaptureFixture[str]) -> None:
    client.train(trainer=CustomTrainer(func=tell_devices), options=[Name("s8d44aa4fb6d")])
    run_example(WATCHING)
    assert capsys.readouterr().out == "rank 0 of 1\n"


def test_gpus_cores_and_memory_are_given_to_a_node(client: TrainerClient, server: RealServer) -> None:
    resources_per_node = run_example(GPUS)["resources_per_node"]
    name = client.train(trainer=CustomTrainer(func=tell_devices, resources_per_node=resources_per_node))
    (node,) = finished(client, name).steps
    assert (node.device, node.device_count) == ("gpu", "4")
    # A rank for each GPU, of which each sees all, as torchrun has it.
    expected = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    assert client.get_job_result(name) == expected
    assert sorted(client.get_job_logs(name)) == [f"rank {rank} of 4" for rank in range(4)]
    asked = server.job(name)["resource_config"]
    assert (asked["cpu_cores"], asked["ram_min_mb"]) == (5, 9537)


def test_slice_of_a_gpu_is_given_to_a_node(client: TrainerClient) -> None:
    resources_per_node = run_example(SLICE)["resources_per_node"]
    name = client.train(trainer=CustomTrainer(func=tell_devices, resources_per_node=resources_per_node))
    (node,) = finished(client, name).steps
    assert (node.device, node.device_count) == ("mig-1g.5gb", "1")
    expected = {"CUDA_VISIBLE_DEVICES": "4", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert client.get_job_result(name) == expected


def test_reports_of_either_library_are_progress_of_the_job(client: TrainerClient, tmp_path: Path) -> None:
    (packages,) = (ROOT / ".venvs" / "kubeflow").glob("lib/python*/site-packages")
    libraries = {"trainmaster.trainer": [], "kubeflow.trainer": [str(packages)]}
    gate = tmp_path / "gate"
    names = [
        client.train(
            trainer=CustomTrainer(
                func=report_to,
                func_args={"package": package, "gate": str(gate), "paths": paths},
                resources_per_node={"gpu": 0},
            )
        )
        for package, paths in libraries.items()
    ]
    for name in names:
        wait_for(lambda name=name: client.get_job(name).progress.percent, f"the report of {name}")
        job = client.get_job(name)
        assert (job.status, job.progress.percent, job.progress.eta_seconds) == ("Running", 42.0, 90.0)
        assert job.metrics == {"loss": 0.25, "tokens": 1000.0}
    gate.touch()
    for name in names:
        job = finished(client, name)
        assert client.get_job_result(name) == [True, False]
        assert job.metrics == {"loss": 0.25, "tokens": 1000.0}
