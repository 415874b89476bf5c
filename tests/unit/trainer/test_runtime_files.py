"""A runtime of one's own is one file beside the server; and what it says of resources holds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import PATIENCE_S
from real_server import COMMAND, RealServer, running
from trainmaster.trainer import CustomTrainer, ScriptTrainer, ServerBackendConfig, TrainerClient
from trainmaster.trainer.options import AllowWaitingForNodes

OURS = """\
kind: TrainingRuntime
metadata:
  name: {name}
  labels: {{trainer.kubeflow.org/framework: torch}}
spec:
  mlPolicy: {{numNodes: 2, torch: {{numProcPerNode: {processes}}}}}
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
                      env: [{{name: WHO, value: "$(RANK) of $(WORLD_SIZE)"}}]
                      resources: {{limits: {{cpu: "1", memory: {memory}}}}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    place = tmp_path_factory.mktemp("files")
    runtimes = place / "runtimes"
    runtimes.mkdir()
    (runtimes / "ours.yaml").write_text(OURS.format(name="ours", processes=2, memory="250Mi"))
    (runtimes / "slip.yaml").write_text("kind: [")
    (runtimes / "wrong.yaml").write_text(OURS.format(name="wrong", processes="lots", memory="250Mi"))
    (runtimes / "small.yaml").write_text(OURS.format(name="small", processes=1, memory="250m"))
    with running(place / "data", "--runtimes-dir", str(runtimes)) as started:
        yield started


@pytest.fixture
def client(server: RealServer) -> Iterator[TrainerClient]:
    with TrainerClient(ServerBackendConfig(url=server.url, api_key=server.key)) as made:
        yield made


def who() -> None:
    import os

    print(os.environ["WHO"], os.environ["OMP_NUM_THREADS"], flush=True)


def take_too_much() -> None:
    taken = bytearray(500 << 20)
    taken[::4096] = b"x" * len(taken[::4096])


def test_file_is_a_runtime_that_jobs_can_name(client: TrainerClient) -> None:
    assert {"ours", "small", "torch-distributed", "mpi"} <= {runtime.name for runtime in client.list_runtimes()}
    shown = client.get_runtime("ours").trainer
    assert (shown.framework, shown.num_nodes, shown.device, shown.device_count) == ("torch", 2, "cpu", "2")
    job = client.train(runtime="ours", trainer=CustomTrainer(func=who))
    assert client.wait_for_job_status(job, timeout=PATIENCE_S, polling_interval=1).num_nodes == 2
    said = [line for node in range(2) for line in client.get_job_logs(job, step=f"node-{node}")]
    assert sorted(said) == [f"{rank} of 4 1" for rank in range(4)]


def test_file_that_cannot_be_read_is_named_with_its_field_and_hides_no_other(
    server: RealServer, client: TrainerClient, caplog: pytest.LogCaptureFixture
) -> None:
    field = "the server's wrong.yaml: spec.mlPolicy.torch.numProcPerNode: must be a whole number from 1 on, not 'lots'"
    assert "wrong" not in {runtime.name for runtime in client.list_runtimes()}
    assert field in caplog.messages
    assert any(message.startswith("the server's slip.yaml: slip.yaml, line 1") for message in caplog.messages)
    with pytest.raises(ValueError, match=r"the runtime 'wrong' cannot be read: the server's wrong.yaml: spec.mlPolicy"):
        client.get_runtime("wrong")
    with pytest.raises(ValueError, match=r"the server's small.yaml: resources_per_node\['memory'\] is less than"):
        client.train(runtime="small", trainer=CustomTrainer(func=who))
    told = subprocess.run(
        [COMMAND, "runtimes"],
        env={**os.environ, "TRAINMASTER_URL": server.url, "TRAINMASTER_API_KEY": server.key},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0
    assert {"ours", "torch-distributed"} <= {line.split()[0] for line in told.stdout.splitlines()}
    assert field in told.stderr


def test_scripts_are_not_started_by_mpi_and_that_is_told(client: TrainerClient, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(ValueError, match="the runtime mpi starts functions with MPI, and no scripts"):
        client.train(runtime="mpi", trainer=ScriptTrainer(script=str(tmp_path / "train.py")))


def test_memory_that_a_runtime_gives_is_all_that_its_jobs_get(client: TrainerClient) -> None:
    job = client.train(runtime="ours", trainer=CustomTrainer(func=take_too_much, num_nodes=1))
    with pytest.raises(RuntimeError, match=r"(?s)OUT_OF_MEMORY.*limit is 250 MB"):
        client.wait_for_job_status(job, timeout=PATIENCE_S, polling_interval=1)


def test_more_than_the_machine_has_is_refused_or_waits_and_says_for_what(
    server: RealServer, client: TrainerClient
) -> None:
    trainer = CustomTrainer(func=who, resources_per_node={"cpu": 4096, "memory": "1Gi"})
    with pytest.raises(ValueError, match="no node could ever hold 4096 cores"):
        client.train(trainer=trainer)
    job = client.train(trainer=trainer, options=[AllowWaitingForNodes()])
    server.until(job, "QUEUED")
    shown = client.get_job(job)
    assert shown.status == "Created"
    assert "4096 cores" in str(shown.message)
    client.delete_job(job)
