"""What a new user meets: no server, no settings, a container engine. Everything below happens on that one machine."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from container_engine import Engine, missing, plain_image, python_image, running_engine
from container_servers import ContainerServer
from real_server import PATIENCE_S, RealServer, wait_for
from trainmaster import TrainerClient
from trainmaster.client import local
from trainmaster.trainer import ContainerBackendConfig, CustomTrainer, CustomTrainerContainer, ServerBackendConfig
from trainmaster.trainer.options import TrainerArgs

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "trainer-client.md"
TRAIN_AND_LEAVE = """\
from trainmaster.trainer import CustomTrainer, TrainerClient


def wait(gate):
    import os, time
    while not os.path.exists(gate):
        time.sleep(0.02)
    return "open"


print(TrainerClient().train(trainer=CustomTrainer(func=wait, func_args={{"gate": {gate!r}}})))
"""
RUNTIME = """\
kind: TrainingRuntime
metadata: {{name: boxed, labels: {{trainer.kubeflow.org/framework: plain}}}}
spec: {{template: {{spec: {{replicatedJobs: [{{name: node, template: {{spec: {{template: {{spec: {{containers: [
  {{name: node, image: "{image}"}}]}}}}}}}}}}]}}}}}}
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with running_engine() as started:
        yield started


@pytest.fixture(scope="module")
def machine(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The home of a user for whom no server ever ran; the engine is where DOCKER_HOST says."""
    home = tmp_path_factory.mktemp("fresh")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRAINMASTER_URL", "TRAINMASTER_API_KEY", "KUBECONFIG", "CONTAINER_HOST"):
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(home))
        patch.setenv("TRAINMASTER_HOME", str(home / "trainmaster"))
        patch.setenv("DOCKER_HOST", engine.host)
        try:
            yield home
            log = local.log_file().read_text()
            assert "Traceback" not in log, log[-4000:]
        finally:
            local.stop()
            RealServer(home / "trainmaster").clean_up()


def run(program: str, directory: Path) -> list[str]:
    """What a program prints, once it has ended."""
    file = directory / "program.py"
    file.write_text(program)
    done = subprocess.run([sys.executable, file], cwd=directory, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def with_entry_point(engine: Engine, image: str, directory: Path) -> str:
    """An image that greets, and says `world` unless it is told otherwise."""
    name = f"{image}-greets"
    (directory / "Containerfile").write_text(f'FROM {image}\nENTRYPOINT ["echo", "hello"]\nCMD ["world"]\n')
    engine.podman("build", "--quiet", "--pull=never", "--tag", name, str(directory))
    return name


def greet() -> str:
    return "hello"


def test_server_that_a_client_starts_uses_the_engine_that_the_client_names(machine: Path) -> None:
    """Though another one is there: DOCKER_HOST still says where."""
    local.stop()  # none runs, but where this is done again
    nowhere = f"unix://{machine}/nowhere.sock"
    with pytest.raises(RuntimeError, match=rf"no container engine answers; tried {nowhere} \(No such file") as caught:
        TrainerClient(ContainerBackendConfig(container_host=nowhere))
    assert "docker.sock" not in str(caught.value)
    assert local.running() is None, "a server that nobody can use stays"


def test_first_client_starts_a_server_and_its_job_outlives_it_for_others_to_see(machine: Path) -> None:
    local.stop()  # none runs, but where this is done again
    (name,) = run(TRAIN_AND_LEAVE.format(gate=str(machine / "gate")), machine)
    with TrainerClient() as second:
        assert second.backend.this_machine
        assert second.backend.why == "as nothing else was named, and there is no Kubernetes cluster"
        wait_for(lambda: second.get_job(name).status == "Running", "the job to run")
        assert name in [job.name for job in second.list_jobs()]
        (machine / "gate").touch()
        assert second.wait_for_job_status(name, polling_interval=0.1).status == "Complete"
        assert second.get_job_result(name) == "open"
    assert not (machine / "trainmaster" / "container.used").exists(), "no job needed an engine"


def test_example_of_the_page_runs_in_a_container_of_the_image_that_it_names(machine: Path, engine: Engine) -> None:
    (example,) = re.findall(r"^```python\n((?:(?!```).)*ContainerBackendConfig.*?)^```", PAGE.read_text(), re.M | re.S)
    assert example.count("localhost/train:1") == 1
    where, result = run(example.replace("localhost/train:1", python_image(engine)), machine)
    assert re.fullmatch(r"trained in [0-9a-f]{12}", where), where  # as containers are called inside
    assert result == "{'loss': 0.2}"


def test_arguments_go_to_the_entry_point_of_an_image_with_python_or_without(
    machine: Path, engine: Engine, tmp_path: Path
) -> None:
    with TrainerClient(ContainerBackendConfig(pull_policy="Never")) as client:
        jobs = {
            client.train(
                trainer=CustomTrainerContainer(image=with_entry_point(engine, image, tmp_path)), options=more
            ): (said)
            for image in (python_image(engine), plain_image(engine))
            for more, said in (([TrainerArgs(["you", "there"])], "hello you there"), ([], "hello world"))
        }
        for name, said in jobs.items():
            assert list(client.get_job_logs(name, follow=True)) == [said]


def test_function_without_an_image_is_refused_before_it_waits(machine: Path) -> None:
    with TrainerClient(ContainerBackendConfig()) as client:
        before = len(client.list_jobs())
        with pytest.raises(ValueError, match=r"workload\.image: .*CustomTrainer\(image=\.\.\.\).*container_image"):
            client.train(trainer=CustomTrainer(func=greet))
        assert len(client.list_jobs()) == before


def test_server_that_runs_has_to_use_the_engine_that_a_client_names(machine: Path, engine: Engine) -> None:
    TrainerClient(ContainerBackendConfig(container_host=engine.host, container_runtime="podman")).close()
    with pytest.raises(ValueError, match=rf"container_host is unix:///other\.sock, .*podman at {engine.host}"):
        TrainerClient(ContainerBackendConfig(container_host="unix:///other.sock"))
    with pytest.raises(ValueError, match="container_runtime is docker, and the server uses podman"):
        TrainerClient(ContainerBackendConfig(container_runtime="docker"))


@pytest.mark.long  # it needs a second server; in test_trainer_containers.py runtimes bring their image, too
def test_image_of_a_runtime_counts_where_the_servers_own_choice_is_a_backend_of_images(
    machine: Path, engine: Engine, tmp_path: Path
) -> None:
    image = python_image(engine)
    server = ContainerServer(tmp_path, engine, "localhost/there-is-none:1")
    (server.directory / "runtimes").mkdir()
    (server.directory / "runtimes" / "boxed.yaml").write_text(RUNTIME.format(image=image))
    try:
        server.start()
        with TrainerClient(ServerBackendConfig(url=server.url, api_key=server.key)) as client:
            name = client.train(runtime="boxed", trainer=CustomTrainer(func=greet))
            packages = client.get_runtime_packages("boxed")
            assert client.wait_for_job_status(name, polling_interval=0.1).status == "Complete"
        assert (server.job(name)["backend"], [each.partition("==")[0] for each in packages]) == ("container", ["pip"])
    finally:
        server.clean_up()
