"""`TrainerClient` against a real server: what is promised of its methods, seen from outside."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from real_server import PATIENCE_S, RealServer, wait_for
from trainmaster import TrainerClient
from trainmaster.trainer import (
    CustomTrainer,
    CustomTrainerContainer,
    LocalProcessBackendConfig,
    NotFoundError,
    ScriptTrainer,
    ServerBackendConfig,
    TrainJob,
)
from trainmaster.trainer.options import AllowWaitingForNodes, Labels, Name

ABSENT = "no-such-job"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server for the file, at a port that stays the same when it is started again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A short lease, as one of the tests kills the leader.
    environment = {"TRAINMASTER_LEASE_S": "1"}
    started = RealServer(tmp_path_factory.mktemp("trainer") / "data", "--port", str(port), environment=environment)
    try:
        yield started.start()
        assert "Traceback" not in started.log_text(), started.log_text()[-4000:]
    finally:
        started.clean_up()


@pytest.fixture
def client(server: RealServer) -> Iterator[TrainerClient]:
    with connected(server) as made:
        yield made


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that the functions below wait for."""
    return tmp_path / "gate"


def connected(server: RealServer) -> TrainerClient:
    return TrainerClient(ServerBackendConfig(url=server.url, api_key=server.key))


def add(numbers: list[int]) -> dict[str, int]:
    print("adding", *numbers)
    return {"sum": sum(numbers)}


def wait_for_gate(gate: str) -> str:
    import os
    import time

    print("before the gate", flush=True)
    while not os.path.exists(gate):
        time.sleep(0.02)
    print("behind the gate", flush=True)
    return "open"


def draw_a_bar(gate: str) -> None:
    import os
    import sys
    import time

    for state in ("10%", "100%"):
        sys.stderr.write(f"\r{state}")
        sys.stderr.flush()
        while not os.path.exists(f"{gate}-{state}"):
            time.sleep(0.02)
    sys.stderr.write("\n")


def fail() -> None:
    import sys

    print("what went before", flush=True)
    sys.exit(7)


def import_what_is_not_there() -> None:
    print("what went before")
    import no_such_module  # type: ignore[import-not-found]

    no_such_module.call()


def hide(gate: str) -> None:
    """Starts a process of its own, and sleeps beside it."""
    import os
    import subprocess
    import time

    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open(f"{gate}.part", "w") as file:
        print(os.getpid(), child.pid, file=file)
    os.rename(f"{gate}.part", gate)
    time.sleep(600)


def tell_rank() -> str:
    import os

    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
    return os.environ["WORLD_SIZE"]


def save_and_report(gate: str) -> int | None:
    """Saves when it is asked to stop, and goes on where it was."""
    import os
    import time

    from trainmaster.jobs import report, verify

    start = verify(path).step if (path := report.resume_path()) else 0
    print("from step", start, flush=True)
    step = start + 1
    report.metrics(step=step, total_steps=4, loss=1 / step)
    while start == 0 or not os.path.exists(gate):
        if stop := report.stop_requested():
            if stop.save:
                with report.checkpoint(step=step) as directory:
                    (directory / "state.txt").write_text(str(step))
            report.exit_stopped()
        time.sleep(0.02)
    return start


def leave_a_file() -> str:
    import os

    with open("file.txt", "w") as file:
        file.write("left")
    print("wrote")
    return os.path.abspath("file.txt")


def leave_early(shape: tuple[int, int]) -> None:
    import sys

    print(shape)
    sys.exit(0)


def return_what_json_cannot_hold() -> object:
    return {1, 2}


def finished(client: TrainerClient, name: str) -> TrainJob:
    return client.wait_for_job_status(name, timeout=PATIENCE_S, polling_interval=0.05)


def running(client: TrainerClient, name: str) -> TrainJob:
    return client.wait_for_job_status(name, {"Running"}, timeout=PATIENCE_S, polling_interval=0.05)


def test_function_is_trained_and_what_it_returns_comes_back(client: TrainerClient) -> None:
    name = client.train(trainer=CustomTrainer(func=add, func_args={"numbers": [1, 2, 3]}))
    job = finished(client, name)
    assert (job.status, job.state, job.runtime.name, job.num_nodes) == ("Complete", "COMPLETED", "torch-distributed", 1)
    assert [(step.name, step.status) for step in job.steps] == [("node-0", "Complete")]
    assert client.get_job_result(name) == {"sum": 6}
    assert list(client.get_job_logs(name)) == ["adding 1 2 3"]
    reasons = [event.reason for event in client.get_job_events(name)]
    assert reasons[0] == "PENDING"
    assert reasons[-1] == "SUCCEEDED"


def test_followed_logs_wait_for_the_start_and_come_line_by_line(client: TrainerClient, gate: Path) -> None:
    name = client.train(trainer=CustomTrainer(func=wait_for_gate, func_args={"gate": str(gate)}))
    lines = client.get_job_logs(name, follow=True)
    assert next(lines) == "before the gate"
    assert client.get_job(name).status == "Running"
    gate.touch()
    assert list(lines) == ["behind the gate"]
    assert client.get_job_result(name) == "open"


def test_progress_bar_is_followed_state_by_state(client: TrainerClient, gate: Path) -> None:
    name = client.train(trainer=CustomTrainer(func=draw_a_bar, func_args={"gate": str(gate)}))
    lines = client.get_job_logs(name, follow=True)
    assert next(lines) == "10%"
    assert list(client.get_job_logs(name)) == ["10%"]
    Path(f"{gate}-10%").touch()
    assert next(lines) == "100%"
    Path(f"{gate}-100%").touch()
    assert list(lines) == []  # the line has ended as it was shown
    assert list(client.get_job_logs(name)) == ["100%"]


def test_logs_can_begin_at_the_last_lines_or_at_a_time(client: TrainerClient, gate: Path) -> None:
    name = client.train(trainer=CustomTrainer(func=wait_for_gate, func_args={"gate": str(gate)}))
    followed = client.get_job_logs(name, follow=True, tail=5, since="2020-01-01T00:00:00")
    assert next(followed) == "before the gate"
    time.sleep(0.5)  # lines are timed to a fifth of a second
    middle = datetime.now(tz=UTC)
    time.sleep(0.5)
    gate.touch()
    assert list(followed) == ["behind the gate"]
    assert list(client.get_job_logs(name, tail=1)) == ["behind the gate"]
    assert list(client.get_job_logs(name, since=middle)) == ["behind the gate"]
    assert list(client.get_job_logs(name, since=middle, tail=0)) == []
    assert list(client.get_job_logs(name, tail=0)) == []
    assert len(list(client.get_job_logs(name, tail=20_000))) == 2
    assert len(list(client.get_job_logs(name, since="2020-01-01", tail=9))) == 2
    for wrong in ({"tail": -1}, {"since": "yesterday"}, {"step": "node-1"}, {"step": "main"}):
        with pytest.raises(ValueError, match=r"tail|since|step"):
            client.get_job_logs(name, **wrong)  # type: ignore[arg-type]


def test_failed_job_raises_at_once_with_reason_code_and_last_lines(client: TrainerClient) -> None:
    name = client.train(trainer=CustomTrainer(func=fail))
    with pytest.raises(RuntimeError, match=rf"(?s){name} is Failed .*EXITED_NONZERO.*exit code 7.*what went before"):
        client.wait_for_job_status(name, timeout=PATIENCE_S, polling_interval=0.05)
    assert client.wait_for_job_status(name, {"Failed"}, timeout=5, polling_interval=1).status == "Failed"
    with pytest.raises(RuntimeError, match="exit code 7"):
        client.get_job_result(name)
    assert [client.retry_job(name) for _ in range(2)] == [f"{name}-2", f"{name}-3"]
    retried = f"{name}-2"
    with pytest.raises(RuntimeError, match=f"{retried} is Failed"):
        finished(client, retried)
    assert client.retry_job(retried) == f"{name}-4"


def test_failure_shows_the_functions_own_lines_after_what_it_printed(client: TrainerClient) -> None:
    name = client.train(trainer=CustomTrainer(func=import_what_is_not_there))
    with pytest.raises(RuntimeError) as failed:
        finished(client, name)
    said = str(failed.value)
    assert 'packages_to_install=["no_such_module"]' in said
    lines = said.partition("its last lines:\n")[2].splitlines()
    assert lines[0].strip() == "what went before"
    assert lines[-1].strip() == "ModuleNotFoundError: No module named 'no_such_module'"
    assert [line for line in lines if "File " in line] == [line for line in lines if "trainmaster_function.py" in line]


def test_job_that_no_node_can_run_says_so_at_once_and_when_it_is_waited_for(
    client: TrainerClient, caplog: pytest.LogCaptureFixture
) -> None:
    asked = CustomTrainer(func=add, func_args={"numbers": []}, resources_per_node={"cpu": 100_000})
    with pytest.raises(ValueError, match="no node could ever hold 100000 cores"):
        client.train(trainer=asked)
    name = client.train(trainer=asked, options=[AllowWaitingForNodes()])
    assert f"job {name} needs" in caplog.text
    with pytest.raises(TimeoutError, match=r"it is Created \(QUEUED\): needs .*100000"):
        client.wait_for_job_status(name, timeout=0.2, polling_interval=0.1)
    client.delete_job(name)


def test_wait_calls_back_at_every_look_and_ends_in_time(client: TrainerClient, gate: Path) -> None:
    name = client.train(trainer=CustomTrainer(func=wait_for_gate, func_args={"gate": str(gate)}))
    running(client, name)
    seen: list[TrainJob] = []
    with pytest.raises(TimeoutError, match=r"not Complete after 1 s; it is Running \(TRAINING\)"):
        client.wait_for_job_status(name, timeout=1, polling_interval=0.1, callbacks=[seen.append])
    assert {job.status for job in seen} == {"Running"}
    assert len(seen) >= 3
    with pytest.raises(RuntimeError, match="no result yet"):
        client.get_job_result(name)
    gate.touch()
    finished(client, name)
    assert client.wait_for_job_status(name, {"Running"}, timeout=PATIENCE_S).status == "Complete"  # it has run
    with pytest.raises(TimeoutError, match="is Complete, and will not be Failed"):
        client.wait_for_job_status(name, {"Failed"}, timeout=PATIENCE_S)


def test_wait_refuses_what_makes_no_sense_before_it_looks_for_the_job(client: TrainerClient) -> None:
    for arguments in ({"status": {"Done"}}, {"timeout": 0}, {"polling_interval": 0}, {"timeout": 2}):
        with pytest.raises(ValueError, match="must be"):
            client.wait_for_job_status(ABSENT, **arguments)  # type: ignore[arg-type]


def test_job_that_saves_is_suspended_and_goes_on_from_there(client: TrainerClient, gate: Path) -> None:
    name = client.train(trainer=CustomTrainer(func=save_and_report, func_args={"gate": str(gate)}))
    wait_for(lambda: client.get_job(name).metrics, "the first report")
    job = client.get_job(name)
    assert (job.progress.step, job.progress.total_steps, job.metrics["loss"]) == (1, 4, 1.0)
    wait_for(lambda: suspended(client, name), "a job that can save")
    parked = client.wait_for_job_status(name, {"Created"}, timeout=PATIENCE_S, polling_interval=0.05)
    assert parked.state == "PAUSED"
    assert [each.step for each in parked.checkpoints] == [1]
    gate.touch()
    client.resume_job(name)
    finished(client, name)
    assert client.get_job_result(name) == 1
    with pytest.raises(RuntimeError, match="resume"):
        client.resume_job(name)


def suspended(client: TrainerClient, name: str) -> bool:
    """Whether it could be suspended: once it has said that it saves."""
    try:
        client.suspend_job(name)
    except RuntimeError:
        return False
    return True


def test_job_that_cannot_save_is_suspended_only_without_saving(client: TrainerClient, gate: Path) -> None:
    name = client.train(trainer=CustomTrainer(func=wait_for_gate, func_args={"gate": str(gate)}))
    running(client, name)
    with pytest.raises(RuntimeError, match=rf"suspend_job\('{name}', save_checkpoint=False\)"):
        client.suspend_job(name)
    client.suspend_job(name, save_checkpoint=False)
    assert client.wait_for_job_status(name, {"Created"}, PATIENCE_S, 0.05).state == "PAUSED"
    client.resume_job(name)
    gate.touch()
    assert finished(client, name).status == "Complete"


def test_cancelled_job_stays_and_deleted_job_is_gone(client: TrainerClient, gate: Path) -> None:
    name = client.train(trainer=CustomTrainer(func=wait_for_gate, func_args={"gate": str(gate)}))
    running(client, name)
    client.cancel_job(name)
    assert client.wait_for_job_status(name, {"Failed"}, PATIENCE_S, 0.05).state == "CANCELLED"
    for call in (client.cancel_job, client.suspend_job):
        with pytest.raises(RuntimeError, match=rf"{name} has ended already \(CANCELLED\)"):
            call(name)
    with pytest.raises(RuntimeError, match="CANCELLED"):
        client.wait_for_job_status(name)
    client.delete_job(name)
    assert name not in [job.name for job in client.list_jobs()]
    with pytest.raises(NotFoundError):
        client.delete_job(name)


def test_running_job_that_is_deleted_is_stopped_with_all_that_it_started(client: TrainerClient, gate: Path) -> None:
    name = client.train(trainer=CustomTrainer(func=hide, func_args={"gate": str(gate)}), options=[Name("hidden")])
    pids = wait_for(lambda: gate.exists() and gate.read_text().split(), "its processes")
    assert all(Path("/proc", pid).exists() for pid in pids)
    client.delete_job(name)
    assert not any(Path("/proc", pid).exists() for pid in pids)
    assert name not in [job.name for job in client.list_jobs()]
    with pytest.raises(NotFoundError):
        client.get_job(name)
    again = client.train(trainer=CustomTrainer(func=add, func_args={"numbers": []}), options=[Name("hidden")])
    assert finished(client, again).status == "Complete"


def test_names_are_unique_and_legal(client: TrainerClient, gate: Path) -> None:
    trainer = CustomTrainer(func=wait_for_gate, func_args={"gate": str(gate)})
    assert client.train(trainer=trainer, options=[Name("only-one")]) == "only-one"
    first = client.get_job("only-one")
    for name, says in (("only-one", "another job has the name only-one"), ("Not_Legal", "no name")):
        for kind in (ValueError, RuntimeError):
            with pytest.raises(kind, match=says):
                client.train(trainer=trainer, options=[Name(name)])
    gate.touch()
    assert finished(client, "only-one").creation_timestamp == first.creation_timestamp


def test_what_is_not_there_is_one_error(client: TrainerClient) -> None:
    for name in (ABSENT, ""):
        for call in (
            client.get_job,
            client.get_job_logs,
            client.get_job_events,
            client.get_job_result,
            client.wait_for_job_status,
            client.suspend_job,
            client.resume_job,
            client.retry_job,
            client.cancel_job,
            client.delete_job,
        ):
            with pytest.raises(NotFoundError, match="there is no job named"):
                call(name)
    for kind in (ValueError, RuntimeError):
        with pytest.raises(kind, match="torch-distributed"):
            client.train(runtime="no-such-runtime", trainer=CustomTrainer(func=add))


def test_what_the_server_refuses_is_a_value_error(client: TrainerClient) -> None:
    with pytest.raises(ValueError, match=r"TrainerClient\(ContainerBackendConfig\(\)\)"):
        client.train(trainer=CustomTrainerContainer(image="image:1"))
    with pytest.raises(ValueError, match="labels"):
        client.train(trainer=CustomTrainer(func=fail), options=[Labels({"type": "mine"})])
    with pytest.raises(ValueError, match="packages"):
        client.train(trainer=CustomTrainer(func=fail, packages_to_install=["--upgrade"]))


def test_lists_have_every_job_of_the_account_and_can_be_of_one_runtime(
    server: RealServer, client: TrainerClient
) -> None:
    plain = client.train(runtime=client.get_runtime("python"), trainer=CustomTrainer(func=tell_rank))
    other = server.submit("true", handle="by-another-door")
    for job in (plain, other):
        finished(client, job)
    jobs = {job.name: job for job in client.list_jobs()}
    assert jobs[plain].runtime.name == "python"
    assert (jobs["by-another-door"].runtime.name, jobs["by-another-door"].status) == ("Unknown", "Complete")
    assert [job.name for job in client.list_jobs(runtime=client.get_runtime("python"))] == [plain]
    assert client.list_jobs(runtime=client.get_runtime("jax-distributed")) == []


def test_job_outlives_its_client_and_others_see_it(server: RealServer, gate: Path) -> None:
    with connected(server) as first:
        name = first.train(trainer=CustomTrainer(func=wait_for_gate, func_args={"gate": str(gate)}))
    gate.touch()
    with connected(server) as second:
        assert finished(second, name).status == "Complete"
        assert second.get_job_result(name) == "open"


def test_two_clients_train_at_once(server: RealServer) -> None:
    results: dict[int, object] = {}

    def train(number: int) -> None:
        with connected(server) as own:
            name = own.train(trainer=CustomTrainer(func=add, func_args={"numbers": [number]}))
            finished(own, name)
            results[number] = own.get_job_result(name)

    threads = [threading.Thread(target=train, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: {"sum": 1}, 2: {"sum": 2}}


def test_nodes_are_steps_with_logs_of_their_own(client: TrainerClient) -> None:
    name = client.train(trainer=CustomTrainer(func=tell_rank, num_nodes=2, resources_per_node={"gpu": 0}))
    job = finished(client, name)
    assert (job.num_nodes, [step.name for step in job.steps]) == (2, ["node-0", "node-1"])
    assert list(client.get_job_logs(name)) == ["rank 0 of 2"]
    assert list(client.get_job_logs(name, step="node-1", follow=True)) == ["rank 1 of 2"]
    assert client.get_job_result(name) == "2"


def test_function_that_exits_has_tuples_and_no_result(client: TrainerClient) -> None:
    name = client.train(trainer=CustomTrainer(func=leave_early, func_args={"shape": (2, 3)}))
    finished(client, name)
    assert list(client.get_job_logs(name)) == ["(2, 3)"]
    with pytest.raises(RuntimeError, match=r"its function did not return, as after sys.exit\(\)"):
        client.get_job_result(name)
    assert client.wait_for_job_status(name, {"Running"}, timeout=2, polling_interval=1).status == "Complete"


def test_value_that_json_cannot_hold_does_not_fail_the_job(client: TrainerClient) -> None:
    name = client.train(trainer=CustomTrainer(func=return_what_json_cannot_hold))
    assert finished(client, name).status == "Complete"
    with pytest.raises(RuntimeError, match="JSON cannot hold"):
        client.get_job_result(name)


def test_directory_is_shipped_without_what_git_ignores(client: TrainerClient, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "parts.py").write_text("NAME = 'parts'\n")
    (tmp_path / "secret.txt").write_text("no\n")
    (tmp_path / ".gitignore").write_text("secret.txt\n")
    script = "import os, sys\nfrom lib.parts import NAME\nprint(NAME, sys.argv[1:], os.path.exists('secret.txt'))\n"
    (tmp_path / "train.py").write_text(script)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    name = client.train(trainer=ScriptTrainer(script="train.py", args=["--lr", "$HOME"], directory=str(tmp_path)))
    assert finished(client, name).status == "Complete"
    assert list(client.get_job_logs(name)) == ["parts ['--lr', '$HOME'] False"]
    assert client.get_job_result(name) is None
    alone = tmp_path / "alone.py"
    alone.write_text("print('alone')\n")
    name = client.train(trainer=ScriptTrainer(script=str(alone)))
    assert list(client.get_job_logs(name, follow=True)) == ["alone"]
    with pytest.raises(ValueError, match="absent"):
        client.train(trainer=ScriptTrainer(script=str(tmp_path / "absent.py")))


def test_local_jobs_leave_a_directory_only_when_asked(server: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINMASTER_URL", server.url)
    monkeypatch.setenv("TRAINMASTER_API_KEY", server.key)
    for cleaned in (True, False):
        with TrainerClient(LocalProcessBackendConfig(cleanup_venv=cleaned)) as client:
            assert client.backend.name == "local"
            name = client.train(trainer=CustomTrainer(func=leave_a_file, num_nodes=2, resources_per_node={"gpu": 0}))
            finished(client, name)
            left = Path(client.get_job_result(name))
            if cleaned:
                wait_for(lambda path=left: not path.parent.exists(), "the end of its directory")
            else:
                assert left.read_text() == "left"
            assert list(client.get_job_logs(name)) == ["wrote"]


def test_server_that_is_away_for_a_moment_breaks_neither_a_wait_nor_logs(
    server: RealServer, client: TrainerClient, gate: Path
) -> None:
    name = client.train(trainer=CustomTrainer(func=wait_for_gate, func_args={"gate": str(gate)}))
    lines = client.get_job_logs(name, follow=True)
    assert next(lines) == "before the gate"
    waited: list[str] = []
    waiting = threading.Thread(target=lambda: waited.append(finished(client, name).status))
    waiting.start()
    server.kill()
    time.sleep(0.5)
    server.start()
    gate.touch()
    assert list(lines) == ["behind the gate"]
    waiting.join()
    assert waited == ["Complete"]


def test_examples_of_the_page_run_as_written(server: RealServer, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "trainer-client.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    elsewhere = ("ContainerBackendConfig", "KubernetesBackendConfig")  # which need an engine
    examples = [each for each in examples if not any(name in each for name in elsewhere)]
    assert len(examples) == 2
    program = tmp_path / "examples.py"
    program.write_text("\n".join(examples))
    environment = {**os.environ, "TRAINMASTER_URL": server.url, "TRAINMASTER_API_KEY": server.key}
    ran = subprocess.run([sys.executable, program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert said[0] == f"the default backend of {server.url} (as TRAINMASTER_URL says)"
    assert said[1:6] == [f"step {step}: {0.9**step:.3f}" for step in range(1, 6)]
    assert said[6].startswith("Complete step 5 of 5")
    assert said[7].startswith("{'loss': 0.59049")
    assert said[8:] == ["['--lr', '0.1'] on rank 1"]
