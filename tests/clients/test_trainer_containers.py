"""`TrainerClient` in real containers: the same function as in processes, and the fields of its configuration."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_examples import GPUS, LARGE_MACHINE, SIMULATED_GPUS, SLICE, run_example

from container_engine import missing, plain_image, python_image, running_engine
from container_servers import PACKAGES, ContainerServer
from real_server import PATIENCE_S, wait_for
from training.data_servers import FileServer, serving
from trainmaster import TrainerClient
from trainmaster.client import Client
from trainmaster.trainer import (
    ContainerBackendConfig,
    CustomTrainer,
    CustomTrainerContainer,
    LocalProcessBackendConfig,
    TrainingRuntimeSource,
    TrainJob,
)
from trainmaster.trainer.options import Limits, Volume, Volumes

RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: {name}
  labels:
    trainer.kubeflow.org/framework: plain
spec:
  template:
    spec:
      replicatedJobs:
        - name: node
          template:
            spec:
              template:
                spec:
                  containers:
                    - name: node
                      image: {image}
                      command: [sh, -c, 'echo "$GREETING, Python: $(command -v python3)"']
                      env:
                        - name: GREETING
                          value: {name}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerServer]:
    """A server with containers first and processes beside them, at a port that stays when it is started again."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with running_engine() as engine, contextlib.ExitStack() as stack:
        home = tmp_path_factory.mktemp("containers")
        started = ContainerServer(home, engine, python_image(engine), simulated_gpus=SIMULATED_GPUS)
        started.command = LARGE_MACHINE
        started.arguments = ("--port", str(port))
        started.environment = {"TRAINMASTER_LEASE_S": "1"}  # one of the tests kills the leader
        stack.callback(started.clean_up)
        started.start()
        yield started


@pytest.fixture
def at_server(server: ContainerServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ContainerServer:
    """The server that clients find by themselves, with nothing kept of what they fetched before."""
    monkeypatch.setenv("TRAINMASTER_URL", server.url)
    monkeypatch.setenv("TRAINMASTER_API_KEY", server.key)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return server


@pytest.fixture
def client(at_server: ContainerServer) -> Iterator[TrainerClient]:
    with in_containers() as made:
        yield made


def in_containers(**fields: Any) -> TrainerClient:
    return TrainerClient(ContainerBackendConfig(pull_policy="Never", **fields))


def fit_together(steps: int) -> dict[str, Any]:
    """A line through eight points, of which each node has its share."""
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = torch.linspace(-1, 1, 8).unsqueeze(1)[rank::world]
    torch.manual_seed(rank)  # DDP has every rank begin with the weights of the first
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    began = [weight.item() for weight in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(inputs), 3 * inputs + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        losses.append(round(mean.item(), 5))
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    everybodys = [torch.zeros_like(weights) for _ in range(world)]
    dist.all_gather(everybodys, weights)
    dist.destroy_process_group()
    print("at", os.environ["MASTER_ADDR"], "with", os.environ.get("FROM_IMAGE", "no"), "image", flush=True)
    return {
        "world": world,
        "began": began,
        "losses": losses,
        "weights": [[round(value, 4) for value in each.tolist()] for each in everybodys],
    }


def fit_alone(slope: float, offset: float, steps: int) -> tuple[list[float], list[float]]:
    """The losses and the weights of one that has all eight points."""
    inputs = [-1 + 2 * index / 7 for index in range(8)]
    losses = []
    for _ in range(steps):
        errors = [slope * each + offset - (3 * each + 1) for each in inputs]
        losses.append(sum(error**2 for error in errors) / 8)
        slope -= 0.3 * sum(2 * error * each for error, each in zip(errors, inputs, strict=True)) / 8
        offset -= 0.3 * sum(2 * error for error in errors) / 8
    return losses, [slope, offset]


def wait_for_gate(gate: str) -> str:
    import os
    import time

    print("before the gate", flush=True)
    while not os.path.exists(gate):
        time.sleep(0.05)
    print("behind the gate", flush=True)
    return "open"


def greet() -> str:
    return "hello"


def look_for_image() -> str:
    import os

    return os.environ.get("FROM_IMAGE", "no")


def measure_shared_memory() -> int:
    import os

    return os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize >> 20


def finished(client: TrainerClient, name: str) -> TrainJob:
    return client.wait_for_job_status(name, timeout=2 * PATIENCE_S, polling_interval=0.2)


# Containers of a job meet in tests/contract/container/test_container_survival.py, two nodes of a function in
# test_notebook.py.
@pytest.mark.long
def test_two_nodes_learn_in_containers_what_one_learns_alone(client: TrainerClient, at_server: ContainerServer) -> None:
    trainer = CustomTrainer(
        func=fit_together,
        func_args={"steps": 40},
        num_nodes=2,
        resources_per_node={"cpu": 1},
        env={"PYTHONPATH": "/packages", "OMP_NUM_THREADS": "1"},
    )
    packages = Volumes([Volume(source=str(PACKAGES), target="/packages", read_only=True)])
    name = client.train(trainer=trainer, options=[packages])
    job = finished(client, name)
    assert (job.status, job.num_nodes) == ("Complete", 2)
    assert [(step.name, step.status) for step in job.steps] == [("node-0", "Complete"), ("node-1", "Complete")]
    learned = client.get_job_result(name)
    assert learned["world"] == 2
    assert learned["weights"][0] == learned["weights"][1], "the ranks do not agree"
    losses, weights = fit_alone(*learned["began"], 40)
    assert learned["losses"] == pytest.approx(losses, abs=2e-5)
    assert learned["weights"][0] == pytest.approx(weights, abs=2e-4)
    assert weights == pytest.approx([3, 1], abs=0.05)
    for step in ("node-0", "node-1"):
        assert list(client.get_job_logs(name, step=step)) == ["at node-0 with yes image"]
    at_server.wait_until_cleared(at_server.job(name)["job_id"])


def test_function_runs_in_a_container_or_as_a_process_of_the_same_server(client: TrainerClient) -> None:
    trainer = CustomTrainer(func=look_for_image, resources_per_node={"cpu": 1})
    with TrainerClient(LocalProcessBackendConfig()) as processes:
        jobs = {each.train(trainer=trainer): each for each in (client, processes)}
        for name, each in jobs.items():
            assert finished(each, name).status == "Complete"
        assert [each.get_job_result(name) for name, each in jobs.items()] == ["yes", "no"]


def test_job_and_what_waits_for_it_outlive_the_server_and_a_kept_container_its_job(
    client: TrainerClient, at_server: ContainerServer
) -> None:
    server = at_server
    gates = Path(tempfile.mkdtemp(dir=server.home))  # which lies in a data root
    with in_containers(auto_remove=False, container_runtime="podman") as keeping:
        trainer = CustomTrainer(func=measure_shared_memory, resources_per_node={"cpu": 1})
        kept = keeping.train(trainer=trainer, options=[Limits(shm_mb=48)])
        seen = Volumes([Volume(source=str(gates), target="/gates", read_only=True)])
        trainer = CustomTrainer(func=wait_for_gate, func_args={"gate": "/gates/open"}, resources_per_node={"cpu": 1})
        waiting = client.train(trainer=trainer, options=[seen])
        finished(keeping, kept)
    lines = client.get_job_logs(waiting, follow=True)
    assert next(lines) == "before the gate"

    def reasons() -> list[str]:
        return [event.reason for event in client.get_job_events(waiting)]

    wait_for(lambda: reasons()[-1] == "TRAINING", "the server to see that it trains")
    assert reasons()[0] == "PENDING"
    ended: list[str] = []
    waits = threading.Thread(target=lambda: ended.append(finished(client, waiting).status))
    waits.start()
    # What was to be removed would be by now, as the engine is looked at every half second.
    time.sleep(1.5)
    kept_id = server.job(kept)["job_id"]
    assert len(server.containers(kept_id)) == 1
    assert client.get_job_result(kept) == 48
    with Client(server.url, server.key) as plain:
        plain.delete(kept, purge=True)
    server.kill()
    server.start()
    (gates / "open").touch()
    assert list(lines) == ["behind the gate"]
    waits.join()
    assert ended == ["Complete"]
    job = server.job(waiting)
    assert (job["attempt"], client.get_job_result(waiting)) == (1, "open")
    server.wait_until_cleared(job["job_id"])
    server.wait_until_cleared(kept_id)


@pytest.mark.parametrize(
    ("text", "device"), [(GPUS, ("gpu", "4")), pytest.param(SLICE, ("mig-1g.5gb", "1"), marks=pytest.mark.long)]
)
def test_image_has_the_resources_of_the_examples(
    client: TrainerClient, at_server: ContainerServer, text: str, device: tuple[str, str]
) -> None:
    resources_per_node = run_example(text)["resources_per_node"]
    name = client.train(trainer=CustomTrainerContainer(image=at_server.image, resources_per_node=resources_per_node))
    (node,) = finished(client, name).steps
    assert (node.device, node.device_count) == device
    assert list(client.get_job_logs(name)) == ["hello from the image"]


def test_engine_and_image_are_those_that_were_asked_for_or_none(client: TrainerClient) -> None:
    with pytest.raises(ValueError, match="container_runtime is docker, and the server uses podman"):
        in_containers(container_runtime="docker")
    name = client.train(trainer=CustomTrainer(func=greet, image="localhost/there-is-none:1"))
    with pytest.raises(RuntimeError, match=r"localhost/there-is-none:1.*pull policy is Never"):
        finished(client, name)


def test_runtimes_of_every_source_bring_their_image_and_their_command(
    at_server: ContainerServer, tmp_path: Path
) -> None:
    image = plain_image(at_server.engine)
    directory = tmp_path / "runtimes"
    directory.mkdir()
    for place, name in ((tmp_path, "from-a-file"), (directory, "from-a-directory")):
        (place / f"{name}.yaml").write_text(RUNTIME.format(name=name, image=image))
    page = "\n---\n".join(RUNTIME.format(name=name, image=image) for name in ("from-the-web", "from-a-file"))
    with serving(FileServer(files={"/runtimes.yaml": page.encode()})) as web:
        sources = [f"{tmp_path}/from-a-file.yaml", directory.as_uri(), f"{web.url}/runtimes.yaml"]
        with in_containers(runtime_source=TrainingRuntimeSource(sources=sources)) as client:
            names = ("from-a-file", "from-a-directory", "from-the-web")
            listed = {runtime.name: runtime for runtime in client.list_runtimes()}
            assert (tuple(listed)[:3], "torch-distributed" in listed) == (names, True)
            assert {listed[name].trainer.image for name in names} == {image}
            jobs = {name: client.train(runtime=name) for name in names}
            for name, job in jobs.items():
                assert list(client.get_job_logs(job, follow=True)) == [f"{name}, Python: "]
                assert finished(client, job).runtime.name == name
            runtime = client.get_runtime("from-the-web")
            assert [job.name for job in client.list_jobs(runtime=runtime)] == [jobs["from-the-web"]]
        assert [path for path, _ in web.requests] == ["/runtimes.yaml"], "it is asked once a day"
