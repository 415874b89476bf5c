"""What goes wrong beneath `TrainerClient`: servers and workers that are killed, and two clients that want one name."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from process_signals import kill_claimant
from real_server import PATIENCE_S, RealServer, wait_for
from trainmaster import TrainerClient
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.trainer import CustomTrainer, LocalProcessBackendConfig, TrainJob
from trainmaster.trainer.options import (
    ActiveDeadlineSeconds,
    Annotations,
    Labels,
    MaxRetries,
    Name,
    Preemptible,
    Priority,
)
from wheel_index import ServedIndex

NO_CACHE = {"PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1", "PIP_RETRIES": "0"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server for the file, at a port that stays the same when it is started again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"TRAINMASTER_LEASE_S": "1"}
    started = RealServer(tmp_path_factory.mktemp("faults") / "data", "--port", str(port), environment=environment)
    try:
        yield started.start()
    finally:
        started.clean_up()


@pytest.fixture
def client(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerClient]:
    monkeypatch.setenv("TRAINMASTER_URL", server.url)
    monkeypatch.setenv("TRAINMASTER_API_KEY", server.key)
    with TrainerClient(LocalProcessBackendConfig()) as made:
        yield made


@pytest.fixture
def index(tmp_path: Path) -> Iterator[ServedIndex]:
    made = ServedIndex(tmp_path / "index")
    yield made
    made.close()


def use_package() -> dict[str, str]:
    import os
    import sys

    import eta  # type: ignore[import-not-found]

    return {"version": eta.VERSION, "environment": sys.prefix, "directory": os.getcwd()}


def leave_a_file_and_wait(gate: str) -> str:
    """The first attempt waits to be killed, or stopped; the second one ends."""
    import os
    import time

    with open(f"file-{os.environ['RANK']}.txt", "w") as file:
        file.write("left")
    print(os.getcwd(), flush=True)
    while not os.path.exists(gate):
        time.sleep(0.02)
    return os.getcwd()


def finished(client: TrainerClient, name: str) -> TrainJob:
    return client.wait_for_job_status(name, timeout=PATIENCE_S, polling_interval=0.05)


def test_install_and_its_job_go_on_when_the_server_is_killed(
    server: RealServer, client: TrainerClient, index: ServedIndex
) -> None:
    index.add("eta", "1.0")
    trainer = CustomTrainer(
        func=use_package, packages_to_install=["eta==1.0"], pip_index_urls=[index.url], env=NO_CACHE
    )
    index.open.clear()
    name = client.train(trainer=trainer)
    wait_for(index.asked.is_set, "the install")
    server.kill()
    server.start()
    installing = client.get_job(name).steps[0]
    assert (installing.name, installing.status) == ("environment", "Running")
    index.open.set()
    assert finished(client, name).status == "Complete"
    first = client.get_job_result(name)
    assert (first["version"], server.job(name)["attempt"]) == ("1.0", 1)
    assert "installed eta 1.0" in list(client.get_job_logs(name, step="environment"))
    # Its directory goes with it; the environment stays, and is found again.
    wait_for(lambda: not Path(first["directory"]).exists(), "the end of its directory")
    index.asked.clear()
    again = client.train(trainer=trainer)
    finished(client, again)
    assert client.get_job_result(again)["environment"] == first["environment"]
    assert not index.asked.is_set()
    assert list(client.get_job_logs(again, step="environment")) == []


def test_directory_of_a_job_goes_though_its_worker_was_killed(
    server: RealServer, client: TrainerClient, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    trainer = CustomTrainer(func=leave_a_file_and_wait, func_args={"gate": str(gate)}, num_nodes=2)
    name = client.train(trainer=trainer, options=[MaxRetries(1)])
    directory = Path(next(client.get_job_logs(name, follow=True)))
    wait_for(lambda: len(list(directory.glob("file-*.txt"))) == 2, "both nodes")
    kill_claimant(RunDirectory(directory.parent).claimant(1))
    wait_for(lambda: server.job(name)["attempt"] == 2, "another attempt")
    gate.touch()
    finished(client, name)
    second = Path(client.get_job_result(name))
    assert second != directory
    wait_for(lambda: not directory.exists() and not second.exists(), "the end of both directories")
    assert directory.parent.exists(), "what the attempt reported is kept"


def test_deadline_ends_a_job_that_keeps_all_else_it_was_given(
    server: RealServer, client: TrainerClient, tmp_path: Path
) -> None:
    trainer = CustomTrainer(func=leave_a_file_and_wait, func_args={"gate": str(tmp_path / "never")})
    given = [Labels({"team": "red"}), Annotations({"note": "first try"}), Priority(8), Preemptible(), MaxRetries(3)]
    name = client.train(trainer=trainer, options=[ActiveDeadlineSeconds(1), *given])
    with pytest.raises(RuntimeError, match=f"{name} is Failed .*TIMEOUT.*longer than 1 s"):
        finished(client, name)
    job = client.get_job(name)
    assert (job.labels["team"], job.labels["annotations/note"]) == ("red", "first try")
    shown = server.job(name)
    assert (shown["priority"], shown["max_retries"], shown["attempt"]) == (8, 3, 1)
    assert shown["scheduling_config"]["preemptible"] is True


def test_one_of_two_that_want_a_name_at_once_gets_it(client: TrainerClient) -> None:
    """With connections of their own, at the same time, and again and again."""
    outcomes: list[Any] = []
    barrier = threading.Barrier(2)

    def train(number: int) -> None:
        with TrainerClient(LocalProcessBackendConfig()) as own:
            for turn in range(5):
                barrier.wait()
                try:
                    own.train(
                        trainer=CustomTrainer(func=tell, func_args={"number": number}), options=[Name(f"t{turn}")]
                    )
                    outcomes.append((turn, number))
                except Exception as error:
                    outcomes.append((turn, error))

    threads = [threading.Thread(target=train, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for turn in range(5):
        (winner,) = [found for at, found in outcomes if at == turn and isinstance(found, int)]
        (error,) = [found for at, found in outcomes if at == turn and isinstance(found, Exception)]
        assert isinstance(error, ValueError)
        assert isinstance(error, RuntimeError)
        assert f"t{turn}" in str(error)
        assert finished(client, f"t{turn}").status == "Complete"
        assert client.get_job_result(f"t{turn}") == winner


def tell(number: int) -> int:
    return number
