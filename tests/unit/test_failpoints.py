from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from patience import PATIENCE_S
from trainmaster.server import failpoints


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm(None)


def test_armed_action_is_told_each_point() -> None:
    failpoints.reach("before")
    points: list[str] = []
    failpoints.arm(points.append)
    failpoints.reach("a")
    failpoints.reach("b")
    failpoints.arm(None)
    failpoints.reach("after")
    assert points == ["a", "b"]


@pytest.mark.parametrize(("count", "printed"), [(1, b""), (2, b"1\n"), (3, b"1\n2\n")])
def test_process_is_killed_at_the_named_point_the_nth_time(count: int, printed: bytes) -> None:
    script = (
        "from trainmaster.server import failpoints; failpoints.arm_from_environment()\n"
        "for number in (1, 2, 3): failpoints.reach('other'); failpoints.reach('a:b'); print(number, flush=True)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, failpoints.ENVIRONMENT_VARIABLE: f"a:b:{count}"},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert killed.stdout == printed


def test_process_is_stopped_at_the_named_point_when_asked_to_be() -> None:
    script = "from trainmaster.server import failpoints as f; f.arm_from_environment(); f.reach('a'); print('awake')"
    stopped = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, failpoints.ENVIRONMENT_VARIABLE: "a:1:SIGSTOP"},
        stdout=subprocess.PIPE,
    )
    assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
    stopped.send_signal(signal.SIGCONT)
    assert stopped.communicate(timeout=PATIENCE_S)[0] == b"awake\n"


@pytest.mark.parametrize("setting", ["point", "point:", ":1", "point:0", "point:x", "point:1:SIGTERM"])
def test_malformed_setting_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.ENVIRONMENT_VARIABLE, setting)
    with pytest.raises(ValueError, match="must look like"):
        failpoints.arm_from_environment()
