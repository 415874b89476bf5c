"""What steps get to read, what they leave for one another, and what they may know."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from worker_attempts import Attempts

from trainmaster.protocol.launch import Step
from trainmaster.protocol.reasons import Reason

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def _environment(text: str) -> dict[str, str]:
    variables: dict[str, str] = json.loads(text)
    return variables


def test_worker_inputs_are_there_for_every_step(attempts: Attempts) -> None:
    read = "import os, pathlib; print(pathlib.Path(os.environ['TRAINMASTER_INPUTS_DIR'], 'plan.json').read_text())"
    steps = (Step(name="prepare", argv=("-c", read), python=True), Step(name="run", argv=("-c", read), python=True))
    attempt = attempts(steps=steps, inputs={"plan.json": '{"größe": 1}'}, ranks_per_node=2)
    assert attempt.run()["reason"] == Reason.SUCCEEDED
    logs = [attempt.log(step="prepare"), attempt.log(rank=0), attempt.log(rank=1)]
    assert logs == ['{"größe": 1}\n'] * 3


def test_worker_input_that_is_no_plain_name_is_bad_input(attempts: Attempts, tmp_path: Path) -> None:
    attempt = attempts("true", inputs={"../outside": "x"})
    ended = attempt.run()
    assert (ended["reason"], attempt.records("started")) == (Reason.BAD_INPUT, [])
    assert not list(attempt.path.rglob("outside"))


def test_worker_what_a_step_prepares_is_there_for_the_ranks(attempts: Attempts) -> None:
    leave = 'echo ready > "$TRAINMASTER_PREPARED_DIR/note"; echo kept > "$TRAINMASTER_CACHE_DIR/note"'
    take = 'cat "$TRAINMASTER_PREPARED_DIR/note" "$TRAINMASTER_CACHE_DIR/note"'
    steps = (Step(name="prepare", argv=("sh", "-c", leave)), Step(name="run", argv=("sh", "-c", take)))
    attempt = attempts(steps=steps, cache_dir=attempts.root / "cache" / "someone")
    assert attempt.run()["reason"] == Reason.SUCCEEDED
    assert attempt.log() == "ready\nkept\n"
    assert (attempts.root / "cache" / "someone" / "note").read_text() == "kept\n"


def test_worker_tokens_reach_the_steps_that_fetch_and_no_other(attempts: Attempts) -> None:
    show = ("-c", SHOW)
    attempt = attempts(
        steps=(
            Step(name="fetch", argv=show, python=True, tokens=True),
            Step(name="other", argv=show, python=True),
            Step(name="run", argv=show, python=True),
        )
    )
    attempt.start(tokens={"hub_token": "h-1", "scaidrive_token": "d-1", "unknown": "u-1"})
    assert attempt.ended()["reason"] == Reason.SUCCEEDED
    fetch = _environment(attempt.log(step="fetch"))
    assert (fetch["TRAINMASTER_HUB_TOKEN"], fetch["TRAINMASTER_SCAIDRIVE_TOKEN"]) == ("h-1", "d-1")
    assert "u-1" not in fetch.values()
    for step in ("other", "run"):
        assert not {"h-1", "d-1", "u-1"} & set(_environment(attempt.log(step=step)).values())


def test_worker_variables_of_the_server_reach_every_process(attempts: Attempts) -> None:
    attempt = attempts.python(SHOW, environment={"TRAINMASTER_PRIVATE_URLS": "0", "TRAINMASTER_DATA_ROOTS": "/a:/b"})
    attempt.run()
    seen = _environment(attempt.log())
    assert (seen["TRAINMASTER_PRIVATE_URLS"], seen["TRAINMASTER_DATA_ROOTS"]) == ("0", "/a:/b")
    assert "TRAINMASTER_CACHE_DIR" not in seen


@pytest.mark.parametrize("reason", [Reason.BAD_INPUT, Reason.CREDENTIALS_REFUSED, Reason.STORAGE_UNAVAILABLE])
def test_worker_failure_that_a_process_explains_has_its_reason(attempts: Attempts, reason: Reason) -> None:
    code = f"from trainmaster.jobs import report; report.fail({str(reason)!r}, 'row 3 has no text')"
    attempt = attempts(steps=(Step(name="prepare", argv=("-c", code), python=True), Step(name="run", argv=("true",))))
    ended = attempt.run()
    assert (ended["reason"], ended["message"], ended["step"]) == (reason, "row 3 has no text", "prepare")


def test_worker_failure_that_one_rank_explains_is_that_of_the_others(attempts: Attempts) -> None:
    code = """
import json, os, pathlib, sys, time
said = pathlib.Path("said")
if os.environ["RANK"] == "0":
    with open(os.environ["TRAINMASTER_EVENTS_FILE"], "a") as events:
        events.write(json.dumps({"type": "failed", "reason": "BAD_INPUT", "message": "no rows"}) + "\\n")
    said.touch()
    time.sleep(600)
while not said.exists():
    time.sleep(0.01)
sys.exit("the connection was closed by a peer")
"""
    ended = attempts.python(code, ranks_per_node=2).run()
    assert (ended["reason"], ended["message"]) == (Reason.BAD_INPUT, "no rows")


def test_worker_failure_that_a_step_announced_and_overcame_does_not_explain_a_later_one(attempts: Attempts) -> None:
    line = json.dumps({"t": 0, "type": "failed", "reason": "BAD_INPUT", "message": "no"})
    announce = f"echo '{line}' >> \"$TRAINMASTER_EVENTS_FILE\""
    steps = (Step(name="prepare", argv=("sh", "-c", announce)), Step(name="run", argv=("sh", "-c", "exit 3")))
    assert attempts(steps=steps).run()["reason"] == Reason.EXITED_NONZERO


def test_worker_reason_that_a_process_may_not_give_is_ignored(attempts: Attempts) -> None:
    line = json.dumps({"t": 0, "type": "failed", "reason": "PREEMPTED", "message": "again, please"})
    attempt = attempts("sh", "-c", f"echo '{line}' >> \"$TRAINMASTER_EVENTS_FILE\"; exit 3")
    ended = attempt.run()
    assert (ended["reason"], ended["exit_code"]) == (Reason.EXITED_NONZERO, 3)
    assert "again" not in ended["message"]


def test_worker_failure_that_was_announced_and_did_not_come_is_no_failure(attempts: Attempts) -> None:
    line = json.dumps({"t": 0, "type": "failed", "reason": "BAD_INPUT", "message": "no"})
    attempt = attempts("sh", "-c", f"echo '{line}' >> \"$TRAINMASTER_EVENTS_FILE\"")
    assert attempt.run()["reason"] == Reason.SUCCEEDED
    assert os.path.exists(attempt.path / "nodes" / "0" / "prepared")
