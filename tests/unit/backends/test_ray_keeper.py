"""The keeper of a worker, as a real process between a test and a worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_S
from trainmaster.worker.processes import start_time_of

SOURCE = resources.files("trainmaster.backends.ray").joinpath("keeper.py").read_text()
OBSTINATE = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


@contextlib.contextmanager
def keeper(*command: str, detach: bool = True, **spec: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SOURCE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    full = {"command": command, "environment": dict(os.environ), "grace_s": 600, "lost_grace_s": 600, "detach": detach}
    process.stdin.write(json.dumps({**full, **spec}).encode() + b"\n")
    process.stdin.flush()
    with process:
        yield process
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def write(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.flush()


def answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    document: dict[str, Any] = json.loads(process.stdout.readline())
    return document


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def said(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stderr is not None
    return process.stderr.readline()


def is_gone(pid: int) -> bool:
    return start_time_of(pid) is None or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("detach", [True, False])
def test_worker_that_ends_gives_its_exit_code_and_last_words(detach: bool) -> None:
    with keeper("sh", "-c", "echo first; echo last >&2; exit 7", detach=detach) as process:
        assert answer(process) == {"exit": 7, "tail": "first\nlast\n"}


def test_output_of_the_worker_is_passed_on_and_only_its_end_is_kept() -> None:
    with keeper(sys.executable, "-c", "print('x' * 5000); print('end')") as process:
        assert answer(process)["tail"] == ("x" * 1995 + "\nend\n")
        assert said(process) == b"x" * 5000 + b"\n"


@pytest.mark.parametrize(("command", "code"), [("/no/such/program", 127), ("/etc/passwd", 126)])
def test_command_that_cannot_run_gives_the_code_of_a_shell(command: str, code: int) -> None:
    with keeper(command) as process:
        assert answer(process)["exit"] == code


def test_stop_ends_a_worker_that_reacts() -> None:
    handler = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    code = f"{handler}; print(1, flush=True); time.sleep(600)"
    with keeper(sys.executable, "-c", code) as process:
        said(process)
        write(process, b"stop\n")
        assert answer(process)["exit"] == 5


def test_stop_kills_a_worker_that_does_not_react_after_its_grace() -> None:
    with keeper(sys.executable, "-c", OBSTINATE, grace_s=0.1) as process:
        said(process)
        write(process, b"stop\n")
        assert answer(process)["exit"] == -signal.SIGKILL


def test_actor_that_is_gone_ends_the_worker() -> None:
    with keeper(sys.executable, "-c", OBSTINATE, lost_grace_s=0.1) as process:
        said(process)
        assert process.stdin is not None
        process.stdin.close()
        assert answer(process)["exit"] == -signal.SIGKILL


def test_actor_that_is_gone_shortens_a_stop() -> None:
    with keeper(sys.executable, "-c", OBSTINATE, lost_grace_s=0.1) as process:
        said(process)
        write(process, b"stop\n")
        assert process.stdin is not None
        process.stdin.close()
        assert answer(process)["exit"] == -signal.SIGKILL


@pytest.mark.parametrize("detach", [True, False])
def test_processes_that_the_worker_leaves_are_killed(detach: bool) -> None:
    code = (
        "import subprocess, sys; "
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True); sys.exit(3)"
    )
    with keeper(sys.executable, "-c", code, detach=detach) as process:
        pid = int(said(process))
        assert answer(process)["exit"] == 3
        eventually(lambda: is_gone(pid))


def test_keeper_that_detaches_is_no_child_of_the_actor() -> None:
    with keeper("sleep", "600") as process:
        process.wait()
        write(process, b"stop\n")
        assert answer(process)["exit"] == -signal.SIGTERM


def test_worker_of_a_keeper_that_is_killed_gets_a_signal() -> None:
    code = "import os, signal, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
    with keeper(sys.executable, "-c", code, detach=False) as process:
        pid = int(said(process))
        process.kill()
        eventually(lambda: is_gone(pid))
