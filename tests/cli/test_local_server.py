"""The local server: started by whoever needs it, shared, stopped and found again."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_server import TRAINMASTER, VARIABLES, retire_fork_server, wait_for
from click.testing import CliRunner, Result

from patience import PATIENCE_S
from real_server import running
from trainmaster.client import Client, local
from trainmaster.protocol.processes import send_signal

COMMAND = (sys.executable, "-m", "trainmaster")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The data directory of a local server; whatever runs there is gone after the test."""
    directory = tmp_path / "home"
    yield directory
    clean_up(directory)


@pytest.fixture(scope="module")
def kept_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The data directory and the URL of a local server that several tests share."""
    place = tmp_path_factory.mktemp("kept")
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text("{}")
    words = ["up", "--model-alias", f"tiny={place / 'model'}", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        for name in VARIABLES:
            patch.delenv(name, raising=False)
        patch.setenv("TRAINMASTER_HOME", str(place / "home"))
        up = CliRunner().invoke(TRAINMASTER, words)
        assert up.exit_code == 0, up.stderr
        yield place / "home", json.loads(up.stdout)["url"]
        clean_up(place / "home")


@pytest.fixture
def kept(kept_home: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the shared server, which is found as the local one."""
    home, url = kept_home
    monkeypatch.setenv("TRAINMASTER_HOME", str(home))
    return url


def clean_up(directory: Path) -> None:
    server = local.running()
    if server is not None:
        with Client() as client:
            for job in client.list():
                client.delete(job["job_id"], purge=True)
            wait_for(lambda: not any(node["jobs"] for node in client.nodes()))
        local.stop()
    retire_fork_server(directory)


def job_file(tmp_path: Path, script: str, **workload: str) -> str:
    file = tmp_path / "job.json"
    file.write_text(
        json.dumps(
            {
                "name": "local",
                "workload": {"kind": "command", "argv": ["sh", "-c", script], **workload},
                "resource_config": {"gpu_count": 0},
            }
        )
    )
    return str(file)


def submitted(tm: Callable[..., Result], tmp_path: Path, script: str, **workload: str) -> str:
    result = tm("submit", job_file(tmp_path, script, **workload), "--json")
    assert result.exit_code == 0, result.stderr
    return str(json.loads(result.stdout)["job_id"])


@contextlib.contextmanager
def following(*arguments: str, stderr: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """A command that runs beside the test, and does not outlive it."""
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def status_of(job_id: str) -> str:
    with Client() as client:
        return client.get(job_id)["status"]


@pytest.mark.long  # contract/local has data roots
@pytest.mark.usefixtures("home")
def test_server_is_started_with_data_roots_and_reads_there_alone(
    tm: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    up = tm("up", "--data-root", "first", "--data-root", str(tmp_path / "second"))
    assert up.exit_code == 0, up.stderr

    server = local.find()
    assert server is not None
    assert server.data_roots == (tmp_path / "first", tmp_path / "second")
    for name, status in (("first", "COMPLETED"), ("second", "COMPLETED"), ("third", "FAILED")):
        job_id = submitted(tm, tmp_path, "true", working_directory=str(tmp_path / name))
        wait_for(lambda job_id=job_id, status=status: status_of(job_id) == status)
    assert "third lies outside the directories that this server allows" in tm("show", job_id).stdout
    again = tm("up", "--data-root", "third")
    assert "runs already" in again.stdout
    assert "runs with the settings of its start" in again.stderr


@pytest.mark.usefixtures("home")
def test_two_commands_at_once_share_one_server(tm: Callable[..., Result]) -> None:
    processes = [
        subprocess.Popen([*COMMAND, "up", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    pids = set()
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        pids.add(json.loads(out)["pid"])

    assert len(pids) == 1
    assert "runs already" in tm("up").stdout
    used = tm("nodes")
    assert (used.exit_code, used.stderr) == (0, "")
    assert "is down" in tm("down").stdout
    assert tm("down").stdout == "No local server runs.\n"


@pytest.mark.usefixtures("home")
def test_follower_loses_and_doubles_nothing_when_the_server_is_killed(
    tm: Callable[..., Result], tmp_path: Path
) -> None:
    go_on = tmp_path / "go-on"
    script = f"seq 1 300; until [ -e {go_on} ]; do sleep 0.05; done; seq 301 600"
    job_id = submitted(tm, tmp_path, script)
    with following("logs", "-f", job_id) as follower:
        assert follower.stdout is not None
        before = [follower.stdout.readline() for _ in range(300)]
        killed = local.running()
        assert killed is not None
        send_signal(killed.process, signal.SIGKILL)
        go_on.touch()
        wait_for(lambda: local.running() is None)
        assert "Starting the local server" in tm("ps").stderr, "after a crash nobody knows whether a job needs it"
        after = follower.communicate(timeout=PATIENCE_S)[0]

    assert follower.returncode == 0
    assert [int(line) for line in before] + [int(line) for line in after.split()] == list(range(1, 601))


@pytest.mark.usefixtures("kept")
def test_interrupted_follower_leaves_the_job_running(tm: Callable[..., Result], tmp_path: Path) -> None:
    job = job_file(tmp_path, "echo begun; while true; do sleep 0.05; done")
    with following("submit", job, "--follow", stderr=subprocess.PIPE) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "begun\n"
        follower.send_signal(signal.SIGINT)
        _, said = follower.communicate(timeout=PATIENCE_S)

    assert follower.returncode == 130
    assert "the job keeps running" in said
    assert "trainmaster cancel" in said
    assert "Traceback" not in said
    # A line may be seen before the server has written down that the job runs.
    wait_for(lambda: "TRAINING" in tm("ps").stdout)


@pytest.mark.usefixtures("kept")
def test_person_who_watches_sees_colours_and_a_bar_and_a_pipe_does_not(
    tm: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "report.py").write_text(
        "import time\n"
        "from trainmaster.jobs import report\n"
        "for step in range(1, 21):\n"
        "    report.progress(step=step, total_steps=20)\n"
        "    report.metrics(step=step, loss=1 / step)\n"
        "    time.sleep(0.05)\n"
        "print('a last line')\n"
    )
    file = tmp_path / "job.yaml"
    file.write_text("name: watched\nworkload: {kind: script, path: report.py}\nresource_config: {gpu_count: 0}\n")

    seen = watched([*COMMAND, "submit", str(file), "--follow"])
    piped = tm("submit", str(file), "--follow")

    assert "\x1b[" in seen
    assert "━" in seen
    assert "loss" in seen
    assert "a last line" in seen
    assert "COMPLETED" in seen
    assert piped.stdout == "a last line\n"
    assert "\x1b[" not in piped.output


def watched(command: list[str]) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = bytearray()
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 1.0)[0]:
                continue
            try:
                piece = os.read(ours, 65536)
            except OSError:  # nobody has the other end any more
                break
            if not piece:
                break
            seen += piece
    os.close(ours)
    assert process.returncode == 0, seen.decode(errors="replace")
    return seen.decode(errors="replace")


def test_server_that_does_not_start_shows_the_end_of_its_log(home: Path, tm: Callable[..., Result]) -> None:
    home.mkdir()
    (home / "trainmaster.db").write_text("this is no database, " * 1000)

    result = tm("nodes")

    assert result.exit_code == 3
    assert "server.log" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_server_of_another_user_is_not_started(home: Path, tm: Callable[..., Result]) -> None:
    home.mkdir(exist_ok=True)
    os.chown(home, 12345, -1)
    result = tm("nodes")
    assert result.exit_code == 3
    assert "belongs to another user" in result.stderr
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(("option", "word"), [("--roles", "apu"), ("--transport", "pigeon")])
def test_serve_with_an_unknown_choice_is_wrong_usage(tm: Callable[..., Result], option: str, word: str) -> None:
    result = tm("serve", option, word)

    assert result.exit_code == 2
    assert word in result.stderr


def test_command_starts_no_server_where_somebody_keeps_one_running(tm: Callable[..., Result], home: Path) -> None:
    with running(home) as server:
        server.stop()
    refused = tm("nodes")
    assert refused.exit_code != 0
    assert "trainmaster serve" in refused.stderr
    assert local.running() is None
    assert tm("up").exit_code == 0  # a person who says so gets one
    assert tm("nodes").exit_code == 0
    tm("down")
    assert tm("nodes").exit_code == 0  # and from then on it is the commands' own


@pytest.mark.usefixtures("home")
def test_ps_starts_no_server_unless_a_job_needs_one(tm: Callable[..., Result], tmp_path: Path) -> None:
    for arguments in ((), ("-a",), ("--json",)):
        fresh = tm("ps", *arguments)
        assert fresh.exit_code == 0
        assert fresh.stderr == ""
    assert local.running() is None, "a home in which no server ever ran has no jobs"

    go_on = tmp_path / "go-on"
    job_id = submitted(tm, tmp_path, f"echo before; until [ -e {go_on} ]; do sleep 0.05; done; echo after")
    wait_for(lambda: status_of(job_id) == "TRAINING")
    assert "Jobs keep running" in tm("down").stdout
    started = tm("ps")
    assert job_id in started.stdout, "a job runs, so the server is started to see to it"
    assert "Starting the local server" in started.stderr
    assert local.running() is not None

    go_on.touch()
    wait_for(lambda: status_of(job_id) == "COMPLETED")
    assert tm("logs", job_id).stdout == "before\nafter\n"
    assert json.loads(tm("show", job_id, "--json").stdout)["attempt"] == 1
    tm("down")
    after = tm("ps")
    assert (after.exit_code, after.stderr) == (0, "")
    assert "No job waits or runs" in after.stdout
    assert json.loads(tm("ps", "--json").stdout) == []
    assert local.running() is None

    assert job_id in tm("ps", "-a").stdout, "what has ended is in the server's database"


def test_up_names_models_and_env_names_the_server(tm: Callable[..., Result], kept: str) -> None:
    variables = json.loads(tm("env", "--json").stdout)

    assert variables == {
        "TINKER_BASE_URL": kept,
        "TINKER_API_KEY": (local.data_dir() / "api-key").read_text().strip(),
    }
    assert tm("env").stdout == "".join(f"export {name}={value}\n" for name, value in variables.items())
    assert "NAME=DIRECTORY" in tm("up", "-h").stdout
    assert tm("up", "--model-alias", "tiny").exit_code == 2
