"""What steps get to read, what they leave for one another, and what they may know."""

from __future__ import annotations

import json
import os
import shlex
import site
import sys
from pathlib import Path

import pytest
from worker_attempts import Attempts, ForkServerProcess

from trainmaster.protocol.launch import LaunchStep
from trainmaster.protocol.reasons import REPORTABLE_REASONS, Reason
from trainmaster.protocol.request import ContainerOverrides

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"


def _environment(text: str) -> dict[str, str]:
    variables: dict[str, str] = json.loads(text)
    return variables


def test_worker_inputs_are_there_for_every_step(attempts: Attempts) -> None:
    read = "import os, pathlib; print(pathlib.Path(os.environ['TRAINMASTER_INPUTS_DIR'], 'plan.json').read_text())"
    steps = (
        LaunchStep(name="prepare", argv=("-c", read), python=True),
        LaunchStep(name="run", argv=("-c", read), python=True),
    )
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
    steps = (LaunchStep(name="prepare", argv=("sh", "-c", leave)), LaunchStep(name="run", argv=("sh", "-c", take)))
    attempt = attempts(steps=steps, cache_dir=attempts.root / "cache" / "someone")
    assert attempt.run()["reason"] == Reason.SUCCEEDED
    assert attempt.log() == "ready\nkept\n"
    assert (attempts.root / "cache" / "someone" / "note").read_text() == "kept\n"


def test_worker_memory_with_tokens_is_closed_to_ranks_of_the_same_user(tmp_path: Path) -> None:
    """As in a container, whose root has no right to trace others."""
    without_tracing = ("setpriv", "--bounding-set=-sys_ptrace") if os.geteuid() == 0 else ()
    look = """
import os
try:
    open(f"/proc/{os.getppid()}/mem", "rb").close()
    print("open")
except PermissionError:
    print("closed")
"""
    fork_server = ForkServerProcess(tmp_path / "forkserver", within=without_tracing)
    try:
        steps = (
            LaunchStep(name="fetch", argv=("-c", "pass"), python=True, tokens=True),
            LaunchStep(name="run", argv=("-c", look), python=True),
        )
        attempt = Attempts(fork_server, tmp_path)(steps=steps)
        attempt.start(tokens={"hub_token": "secret"})
        assert attempt.ended()["reason"] == Reason.SUCCEEDED
        assert attempt.log() == "closed\n"
    finally:
        fork_server.stop()


def test_worker_tokens_reach_the_steps_that_fetch_and_no_other(attempts: Attempts) -> None:
    show = ("-c", SHOW)
    attempt = attempts(
        steps=(
            LaunchStep(name="fetch", argv=show, python=True, tokens=True),
            LaunchStep(name="other", argv=show, python=True),
            LaunchStep(name="run", argv=show, python=True),
        )
    )
    attempt.start(tokens={"hub_token": "h-1", "scaidrive_token": "d-1", "unknown": "u-1"})
    assert attempt.ended()["reason"] == Reason.SUCCEEDED
    fetch = _environment(attempt.log(step="fetch"))
    assert (fetch["TRAINMASTER_HUB_TOKEN"], fetch["TRAINMASTER_SCAIDRIVE_TOKEN"]) == ("h-1", "d-1")
    assert "u-1" not in fetch.values()
    for step in ("other", "run"):
        assert not {"h-1", "d-1", "u-1"} & set(_environment(attempt.log(step=step)).values())


def test_worker_step_with_tokens_runs_no_code_of_the_job(attempts: Attempts, tmp_path: Path) -> None:
    seen, home = tmp_path / "seen", tmp_path / "home"
    trap = f"import os\nwith open({str(seen)!r}, 'a') as file: print(os.environ, file=file)\n"
    own = Path(site.getusersitepackages()).relative_to(Path(site.getuserbase()))
    for place in (home / "trap", home / ".local" / own):
        place.mkdir(parents=True)
        (place / "sitecustomize.py").write_text(trap)
        (place / "usercustomize.py").write_text(trap)
    loaders = {
        "PYTHONPATH": str(home / "trap"),
        "PYTHONSTARTUP": "x",
        "PYTHONHOME": "",
        "LD_LIBRARY_PATH": str(home),
        "LD_AUDIT": "",
        "BASH_ENV": "x",
        "OPENSSL_CONF": "x",
        "PATH": str(home),
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "SSL_CERT_FILE": "x",
        "HF_MODULES_CACHE": str(home),
        "HOME": str(home),
    }
    wanted = {"HF_ENDPOINT": "https://hub.example", "AWS_REGION": "eu-1"}
    show = ("-s", "-P", "-c", SHOW)
    attempt = attempts(
        steps=(
            LaunchStep(name="fetch", argv=show, python=True, tokens=True),
            LaunchStep(name="sealed", argv=show, python=True, secrets={"TOKEN": "secret:hub_token"}),
            LaunchStep(name="run", argv=("-c", SHOW), python=True),
        ),
        secrets={name: f"secret:env.{name}" for name in (*loaders, *wanted)},
    )
    attempt.start(environment={**loaders, **wanted}, tokens={"hub_token": "h-1"})
    assert attempt.ended()["reason"] == Reason.SUCCEEDED
    for step in ("fetch", "sealed"):
        variables = _environment(attempt.log(step=step))
        assert "h-1" in variables.values()
        assert wanted.items() <= variables.items()
        assert not {(name, variables.get(name)) for name in loaders} & loaders.items()
        assert not variables["HF_MODULES_CACHE"].startswith(str(home))
    # The job's own step has all of its variables, and runs what they name.
    assert loaders.items() <= _environment(attempt.log(step="run")).items()
    assert "h-1" not in seen.read_text()


def test_worker_variables_of_the_server_reach_every_process(attempts: Attempts) -> None:
    attempt = attempts.python(SHOW, environment={"TRAINMASTER_PRIVATE_URLS": "0", "TRAINMASTER_DATA_ROOTS": "/a:/b"})
    attempt.run()
    seen = _environment(attempt.log())
    assert (seen["TRAINMASTER_PRIVATE_URLS"], seen["TRAINMASTER_DATA_ROOTS"]) == ("0", "/a:/b")
    assert "TRAINMASTER_CACHE_DIR" not in seen


@pytest.mark.parametrize("reason", sorted(REPORTABLE_REASONS))
def test_worker_failure_that_a_process_explains_has_its_reason(attempts: Attempts, reason: Reason) -> None:
    code = f"from trainmaster.jobs import report; report.fail({str(reason)!r}, 'row 3 has no text')"
    attempt = attempts(
        steps=(LaunchStep(name="prepare", argv=("-c", code), python=True), LaunchStep(name="run", argv=("true",)))
    )
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
    steps = (
        LaunchStep(name="prepare", argv=("sh", "-c", announce)),
        LaunchStep(name="run", argv=("sh", "-c", "exit 3")),
    )
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


def test_worker_step_that_takes_longer_than_it_may_is_ended_with_all_that_it_started(attempts: Attempts) -> None:
    slow = "echo asking; sleep 600 & trap '' TERM; wait; wait"
    steps = (LaunchStep(name="fetch", argv=("sh", "-c", slow), timeout_s=0.5), LaunchStep(name="run", argv=("true",)))
    attempt = attempts(steps=steps)
    ended = attempt.run()
    assert (ended["reason"], ended["step"]) == (Reason.STORAGE_UNAVAILABLE, "fetch")
    assert ended["message"] == "step fetch took longer than 0.5 s, and was ended"
    assert ended["evidence"]["last_lines"] == ["asking"]
    assert [record["step"] for record in attempt.records("step_started")] == ["fetch"]


def test_worker_time_of_a_step_is_its_own(attempts: Attempts) -> None:
    wait = ("sh", "-c", "sleep 0.4")
    steps = (
        LaunchStep(name="fetch", argv=wait, timeout_s=30.0),
        LaunchStep(name="more", argv=wait),
        LaunchStep(name="run", argv=wait),
    )
    assert attempts(steps=steps).run()["reason"] == Reason.SUCCEEDED
    # A stop that was asked for before is why it ended, also when the time is over meanwhile.
    deaf = LaunchStep(name="fetch", argv=("sh", "-c", "trap '' TERM; sleep 600; sleep 600"), timeout_s=1.0)
    attempt = attempts(steps=(deaf, LaunchStep(name="run", argv=("true",))))
    attempt.start()
    attempt.record("step_started")
    attempt.stop(grace_s=1.5)
    assert attempt.ended()["reason"] == Reason.CANCELLED


def test_worker_variables_of_a_step_are_its_own_and_win(attempts: Attempts) -> None:
    own = {"STORAGE_URI": "hf://org/rows", "FROM_THE_SERVER": "no"}
    show = ("-c", SHOW)
    steps = (
        LaunchStep(name="fetch", argv=show, python=True, environment=own),
        LaunchStep(name="run", argv=show, python=True),
    )
    attempt = attempts(steps=steps)
    assert attempt.run()["reason"] == Reason.SUCCEEDED
    assert own.items() <= _environment(attempt.log(step="fetch")).items()
    ranks = _environment(attempt.log())
    assert ("STORAGE_URI" in ranks, ranks["FROM_THE_SERVER"]) == (False, "yes")


def test_worker_hands_a_node_over_when_the_steps_outside_are_done(attempts: Attempts, tmp_path: Path) -> None:
    fetch = LaunchStep(name="fetch", argv=("echo", "fetched"), secrets={"TOKEN": "secret:fetching"}, image="fetch:1")
    more, run = (LaunchStep(name=name, argv=("-c", SHOW), python=True) for name in ("more", "run"))
    attempt = attempts(steps=(fetch, more, run), secrets={"WORD": "secret:env.WORD"})
    given, handed = tmp_path / "given.json", tmp_path / "handed.json"
    inside = ContainerOverrides(first_step="more").to_json()
    worker = [sys.executable, "-m", "trainmaster.worker", "run", "--run-dir", str(attempt.path), "--node", "0"]
    goes_on = shlex.join([*worker, "--secrets", f"{handed}.taken", "--within", json.dumps(inside)])
    within = ContainerOverrides(
        # What leads to a step has the job's variables to read, and none of them in its own environment.
        through={"fetch": ("sh", "-c", 'cat > "$0"; echo "${WORD-unset}"; exec "$@"', str(given))},
        onward=("/bin/sh", "-c", f'tee "{handed}" > "{handed}.taken"; exec {goes_on}'),
    )
    secrets = {"environment": {"WORD": "kept", "LD_PRELOAD": "x"}, "tokens": {"fetching": "t-1", "other": "o-1"}}
    order = {"op": "start", "run_dir": str(attempt.path), "node": 0, "secrets": secrets, "within": within.to_json()}
    pid = attempt.fork_server.ask(**order)["pid"]
    assert attempt.ended()["reason"] == Reason.SUCCEEDED
    assert (attempt.record("claimed")["pid"], len(attempt.records("claimed"))) == (pid, 1)
    assert [record["step"] for record in attempt.records("step_started")] == ["fetch", "more", "run"]
    assert attempt.log(step="fetch") == "unset\nfetched\n"
    variables = json.loads(given.read_text())
    assert (variables["WORD"], variables["LD_PRELOAD"], variables["TOKEN"]) == ("kept", "x", "t-1")
    assert "PATH" not in variables  # which is the machine's own
    assert json.loads(handed.read_text())["tokens"] == {"other": "o-1"}
    for step in ("more", "run"):
        seen = _environment(attempt.log(step=step))
        assert (seen["WORD"], "TOKEN" in seen) == ("kept", False)


def test_worker_hands_nothing_over_when_a_step_outside_fails(attempts: Attempts, tmp_path: Path) -> None:
    fetch = LaunchStep(name="fetch", argv=(), image="fetch:1")
    attempt = attempts(steps=(fetch, LaunchStep(name="run", argv=("true",))))
    within = ContainerOverrides(
        through={"fetch": ("sh", "-c", "exit 3")}, onward=("/bin/sh", "-c", f"touch {tmp_path}/reached")
    )
    attempt.fork_server.ask(op="start", run_dir=str(attempt.path), node=0, within=within.to_json())
    ended = attempt.ended()
    assert (ended["reason"], ended["step"], ended["exit_code"]) == (Reason.EXITED_NONZERO, "fetch", 3)
    nowhere = attempts(steps=(fetch, LaunchStep(name="run", argv=("true",))))
    within = ContainerOverrides(through={"fetch": ("true",)}, onward=(str(tmp_path / "none"),))
    nowhere.fork_server.ask(op="start", run_dir=str(nowhere.path), node=0, within=within.to_json())
    assert nowhere.ended()["reason"] == Reason.WORKER_LOST
    assert not (tmp_path / "reached").exists()


def test_worker_holds_what_leads_into_a_container_to_nothing(attempts: Attempts) -> None:
    holds = (sys.executable, "-c", "import time; held = bytearray(b'x' * (128 << 20)); time.sleep(1.5)")
    steps = (LaunchStep(name="fetch", argv=(), image="fetch:1"), LaunchStep(name="run", argv=("true",)))
    attempt = attempts(steps=steps, memory_mb=64)
    within = ContainerOverrides(through={"fetch": holds}).to_json()
    attempt.fork_server.ask(op="start", run_dir=str(attempt.path), node=0, within=within)
    assert attempt.ended()["reason"] == Reason.SUCCEEDED
