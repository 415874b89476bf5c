"""Programs that lead into containers: what they are handed, what they hand back, and how they are ended."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from worker_attempts import Attempt, Attempts, is_running, wait_for

from trainmaster.protocol.launch import LaunchStep
from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.protocol.request import ContainerOverrides

FAILS = """
import json, pathlib, sys
from trainmaster.protocol.documents import put_answer
pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())
put_answer({"reason": "ENGINE_UNAVAILABLE", "message": "no engine answers"})
sys.exit(1)
"""
DEAF = """
import os, pathlib, signal, sys
from trainmaster.protocol.processes import KILL_LED
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, KILL_LED))
print("up", os.getpid(), flush=True)
while signal.sigwait((signal.SIGTERM, KILL_LED)) != KILL_LED:
    pass
pathlib.Path(sys.argv[1]).touch()
"""


def led(attempts: Attempts, code: str, given: Path, **options: Any) -> Attempt:
    """An attempt whose only rank is led into a container, of a kind; `given` is for the leader to write."""
    attempt = attempts("true", **options)
    within = ContainerOverrides(through={"run": (sys.executable, "-c", code, str(given))}).to_json()
    attempt.fork_server.ask(op="start", run_dir=str(attempt.path), node=0, within=within)
    return attempt


def test_leader_has_all_variables_of_the_rank_and_the_last_word_on_why_it_failed(
    attempts: Attempts, tmp_path: Path
) -> None:
    given, environment = tmp_path / "given", {"FROM_THE_SERVER": "yes"}
    # A word of the container's own would not do, whatever it says.
    ended = led(attempts, FAILS, given, environment=environment, retry_exit_codes=(1,)).ended()
    assert (ended["reason"], ended["message"]) == (Reason.ENGINE_UNAVAILABLE, "no engine answers")
    variables = json.loads(given.read_text())
    # Also those that happen to be the worker's own, and none that are the worker's alone.
    assert (variables["FROM_THE_SERVER"], variables["LOCAL_RANK"]) == ("yes", "0")
    assert "PATH" not in variables


def test_environment_that_a_step_left_is_not_for_ranks_in_containers(attempts: Attempts, tmp_path: Path) -> None:
    leave = 'rm -rf "$TRAINMASTER_PREPARED_DIR/environment.json"; mkfifo "$TRAINMASTER_PREPARED_DIR/environment.json"'
    attempt = attempts(
        steps=(LaunchStep(name="prepare", argv=("sh", "-c", leave)), LaunchStep(name="run", argv=("true",)))
    )
    within = ContainerOverrides(through={"run": ("true",)}).to_json()
    attempt.fork_server.ask(op="start", run_dir=str(attempt.path), node=0, within=within)
    assert attempt.ended()["reason"] == Reason.SUCCEEDED
    # Where it counts, a pipe is none, and holds nobody up.
    ours = attempts(
        steps=(LaunchStep(name="prepare", argv=("sh", "-c", leave)), LaunchStep(name="run", argv=("true",)))
    )
    assert ours.run()["reason"] == Reason.SUCCEEDED


def test_leader_that_is_to_be_killed_kills_its_container_first(attempts: Attempts, tmp_path: Path) -> None:
    attempt = led(attempts, DEAF, tmp_path / "killed")
    attempt.says("up")
    attempt.stop(StopCause.CANCEL, grace_s=0.2)
    assert attempt.ended()["reason"] == Reason.CANCELLED
    assert (tmp_path / "killed").exists()


def test_leader_kills_its_container_when_the_worker_dies(attempts: Attempts, tmp_path: Path) -> None:
    attempt = led(attempts, DEAF, tmp_path / "killed")
    attempt.says("up")
    attempt.kill_worker()
    wait_for((tmp_path / "killed").exists, "the kill of the container")
    leader = int(attempt.log().split()[1])
    wait_for(lambda: not is_running(leader), "the leader's end")
