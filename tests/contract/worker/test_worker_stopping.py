"""How a worker stops its ranks: it asks, it waits, it kills, and nothing is left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from worker_attempts import Attempts, wait_for

from trainmaster.protocol.launch import LaunchStep
from trainmaster.protocol.reasons import EXIT_STOPPED, REASON_OF_STOP, Reason, StopCause
from trainmaster.protocol.request import EngineNeeds

REPORT = (
    "import json, os, signal, sys, time\n"
    "def report(**event):\n"
    "    with open(os.environ['TRAINMASTER_EVENTS_FILE'], 'a') as file:\n"
    "        file.write(json.dumps(event) + '\\n')\n"
    "def control():\n"
    "    while not os.path.exists(os.environ['TRAINMASTER_CONTROL_FILE']): time.sleep(0.01)\n"
    "    return json.load(open(os.environ['TRAINMASTER_CONTROL_FILE']))\n"
)
"""A rank that reports and listens by the files alone."""


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (StopCause.CANCEL, Reason.CANCELLED),
        (StopCause.PAUSE, Reason.PAUSED),
        (StopCause.INACTIVE, Reason.INACTIVE),
        (StopCause.PREEMPT, Reason.PREEMPTED),
        (StopCause.STALL, Reason.STALLED),
        (StopCause.DELETE, Reason.DELETED),
        (StopCause.PEER, Reason.WORKER_LOST),
    ],
)
def test_worker_stop_ends_the_ranks_with_its_reason(attempts: Attempts, cause: StopCause, reason: Reason) -> None:
    attempt = attempts("sleep", "600")
    attempt.start()
    attempt.record("started")
    attempt.stop(cause)
    ended = attempt.ended()
    assert (ended["reason"], ended["stop_cause"], ended["signal"]) == (reason, cause, "SIGTERM")
    assert attempt.record("stopping")["cause"] == cause
    assert attempt.records("grace_missed") == []


def test_rank_that_obeyed_its_engine_before_the_worker_heard_of_it_was_stopped(attempts: Attempts) -> None:
    needs = EngineNeeds(account="a", job_name="n")
    code = "import os, sys, time; sys.exit(85) if os.environ['RANK'] == '0' else time.sleep(600)"
    by_engine = attempts.python(code, engine_needs=needs, ranks_per_node=2)
    by_itself = attempts.python(code, ranks_per_node=2)
    by_engine.start()
    by_itself.start()
    ended = by_engine.ended()
    assert (ended["reason"], ended["stop_cause"]) == (REASON_OF_STOP[StopCause.ENGINE], StopCause.ENGINE)
    assert by_engine.record("stopping")["cause"] == StopCause.ENGINE
    # Without an engine, nobody can have asked it.
    ended = by_itself.ended()
    assert (ended["reason"], ended["stop_cause"], ended["exit_code"]) == (Reason.EXITED_NONZERO, None, EXIT_STOPPED)


def test_worker_stop_lets_a_rank_end_in_its_own_way(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", "trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 0.05; done")
    attempt.start()
    attempt.says("up")
    attempt.stop()
    ended = attempt.ended()
    assert (ended["reason"], ended["exit_code"]) == (Reason.CANCELLED, 5)
    assert attempt.log() == "up\nbye\n"


def test_worker_stop_is_a_stop_even_when_the_signalled_rank_exits_with_0(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", "trap 'exit 0' TERM; echo up; while :; do sleep 0.05; done")
    attempt.start()
    attempt.says("up")
    attempt.stop(StopCause.PREEMPT)
    assert attempt.ended()["reason"] == Reason.PREEMPTED


def test_worker_rank_that_ignores_sigterm_is_killed_after_its_grace(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done")
    attempt.start()
    attempt.says("up")
    attempt.stop(grace_s=0.5)
    ended = attempt.ended()
    assert (ended["reason"], ended["signal"]) == (Reason.CANCELLED, "SIGKILL")
    missed = attempt.record("grace_missed")
    assert (missed["cause"], missed["grace_s"]) == (StopCause.CANCEL, 0.5)


def test_worker_stop_reaches_what_left_the_session(attempts: Attempts) -> None:
    script = (
        "(setsid sh -c 'trap \"\" TERM; echo $$ >> pids; while :; do sleep 1; done' &)\n"
        "setsid sh -c 'trap \"echo told >> told; exit\" TERM; echo $$ >> pids; while :; do sleep 0.05; done' &\n"
        "while [ $(wc -l < pids) -lt 2 ]; do sleep 0.01; done; echo up; wait"
    )
    attempt = attempts("sh", "-c", ": > pids\n" + script)
    attempt.start()
    attempt.says("up")
    attempt.stop(grace_s=1.0)
    assert attempt.ended()["reason"] == Reason.CANCELLED
    assert (attempt.path / "work" / "told").read_text() == "told\n"
    assert attempts.fork_server.ask(op="sweep", attempt_id=attempt.request.attempt_id) == {"killed": 0}


def test_worker_stop_reaches_a_stopped_process(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", "echo up; kill -STOP $$; sleep 600")
    attempt.start()
    attempt.says("up")
    status = Path(f"/proc/{attempt.rank_pid()}/status")
    wait_for(lambda: "State:\tT" in status.read_text(), "the rank's halt")
    attempt.stop()
    assert attempt.ended()["signal"] == "SIGTERM"


def test_worker_saving_rank_gets_its_grace_without_a_signal(attempts: Attempts) -> None:
    code = REPORT + (
        "signal.signal(signal.SIGTERM, lambda *_: print('signalled'))\n"
        "report(type='capable', save=True); print('up')\n"
        "wish = control(); print(wish['stop'], wish['save'])\n"
        f"time.sleep(0.5); print('saved'); sys.exit({EXIT_STOPPED})\n"
    )
    attempt = attempts.python(code)
    attempt.start()
    attempt.says("up")
    attempt.stop(StopCause.PAUSE, save=True, grace_s=60.0)
    ended = attempt.ended()
    assert (ended["reason"], ended["exit_code"]) == (Reason.PAUSED, EXIT_STOPPED)
    assert attempt.log() == "up\npause True\nsaved\n"
    assert attempt.record("stopping")["save"] is True


def test_worker_saving_rank_that_misses_its_grace_is_ended(attempts: Attempts) -> None:
    code = REPORT + "print('up', flush=True); control(); time.sleep(600)"
    attempt = attempts.python(code, can_save=True)
    attempt.start()
    attempt.says("up")
    attempt.stop(StopCause.PREEMPT, save=True, grace_s=0.5)
    ended = attempt.ended()
    assert (ended["reason"], ended["signal"]) == (Reason.PREEMPTED, "SIGTERM")
    assert attempt.record("grace_missed")["grace_s"] == 0.5


def test_worker_rank_that_never_offered_to_save_is_signalled_at_once(attempts: Attempts) -> None:
    attempt = attempts("sleep", "600")
    attempt.start()
    attempt.record("started")
    attempt.stop(StopCause.PAUSE, save=True, grace_s=600.0)
    assert attempt.ended()["signal"] == "SIGTERM"
    assert attempt.record("stopping")["save"] is False


def test_worker_rank_whose_job_says_that_it_cannot_save_is_signalled_at_once(attempts: Attempts) -> None:
    attempt = attempts.python(
        REPORT + "report(type='capable', save=True); print('up'); time.sleep(600)", can_save=False
    )
    attempt.start()
    attempt.says("up")
    attempt.stop(StopCause.PAUSE, save=True, grace_s=600.0)
    assert attempt.ended()["signal"] == "SIGTERM"


def test_worker_rank_that_completes_while_it_should_save_has_succeeded(attempts: Attempts) -> None:
    attempt = attempts.python(REPORT + "print('up'); control()", can_save=True)
    attempt.start()
    attempt.says("up")
    attempt.stop(StopCause.PREEMPT, save=True, grace_s=60.0)
    ended = attempt.ended()
    assert (ended["reason"], ended["stop_cause"]) == (Reason.SUCCEEDED, None)


def test_worker_rank_that_had_finished_has_succeeded_although_it_was_signalled(attempts: Attempts) -> None:
    code = REPORT + (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nreport(type='finished'); print('up'); time.sleep(600)\n"
    )
    attempt = attempts.python(code)
    attempt.start()
    attempt.says("up")
    attempt.stop()
    assert attempt.ended()["reason"] == Reason.SUCCEEDED


def test_worker_more_urgent_stop_replaces_a_patient_one(attempts: Attempts) -> None:
    attempt = attempts.python(REPORT + "print('up'); time.sleep(600)", can_save=True)
    attempt.start()
    attempt.says("up")
    attempt.stop(StopCause.PAUSE, save=True, grace_s=600.0)
    attempt.record("stopping")
    attempt.stop(StopCause.CANCEL, grace_s=600.0)
    ended = attempt.ended()
    assert (ended["reason"], ended["signal"]) == (Reason.CANCELLED, "SIGTERM")


def test_worker_stop_is_never_taken_back(attempts: Attempts) -> None:
    attempt = attempts.python(
        REPORT + f"print('up'); control(); time.sleep(1); sys.exit({EXIT_STOPPED})", can_save=True
    )
    attempt.start()
    attempt.says("up")
    attempt.stop(StopCause.PAUSE, save=True, grace_s=60.0)
    attempt.record("stopping")
    attempt.control()
    assert attempt.ended()["reason"] == Reason.PAUSED


def test_worker_save_without_stop_reaches_the_rank_and_nothing_else_happens(attempts: Attempts) -> None:
    attempt = attempts.python(REPORT + "print('up'); wish = control(); print(wish['stop'], wish['save'])")
    attempt.start()
    attempt.says("up")
    attempt.control(save=True)
    assert attempt.ended()["reason"] == Reason.SUCCEEDED
    assert attempt.log() == "up\nNone True\n"
    assert attempt.records("stopping") == []


def test_worker_stop_before_the_start_runs_nothing(attempts: Attempts) -> None:
    attempt = attempts("true")
    attempt.stop()
    ended = attempt.run()
    assert (ended["reason"], ended["step"], ended["exit_code"]) == (Reason.CANCELLED, None, None)
    assert attempt.records("step_started") == []


def test_worker_stop_while_preparing_skips_the_workload(attempts: Attempts) -> None:
    attempt = attempts(
        steps=(
            LaunchStep(name="fetch", argv=("sh", "-c", "trap 'exit 0' TERM; touch up; while :; do sleep 0.05; done")),
            LaunchStep(name="run", argv=("true",)),
        ),
        can_save=True,
    )
    attempt.start()
    wait_for((attempt.path / "work" / "up").exists)
    attempt.stop(StopCause.PAUSE, save=True, grace_s=600.0)
    ended = attempt.ended()
    assert (ended["reason"], ended["step"]) == (Reason.PAUSED, "fetch")
    assert attempt.records("started") == []


def test_worker_waiting_for_its_gang_can_be_stopped(attempts: Attempts) -> None:
    attempt = attempts("true", nodes=2)
    attempt.start(1)
    attempt.record("staged", 1)
    attempt.stop(StopCause.PEER)
    ended = attempt.ended(1)
    assert (ended["reason"], ended["stop_cause"]) == (Reason.WORKER_LOST, StopCause.PEER)


def test_worker_stopped_for_a_peer_names_it(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", '[ "$NODE_RANK" = 1 ] && exit 9; sleep 600', nodes=2)
    attempt.start(0)
    attempt.start(1)
    assert attempt.ended(1)["exit_code"] == 9
    attempt.record("started")
    attempt.stop(StopCause.PEER)
    assert "node 1" in attempt.ended(0)["message"]


def test_worker_rank_that_runs_too_long_is_stopped_for_it(attempts: Attempts) -> None:
    ended = attempts("sleep", "600", max_runtime_s=0.5).run()
    assert (ended["reason"], ended["stop_cause"]) == (Reason.TIMEOUT, StopCause.TIMEOUT)
    assert "0.5 s" in ended["message"]


def test_worker_failure_before_the_stop_stays_the_cause(attempts: Attempts) -> None:
    script = 'if [ "$RANK" = 0 ]; then exit 7; fi; trap "" TERM; echo up; while :; do sleep 0.2; done'
    attempt = attempts("sh", "-c", script, ranks_per_node=2)
    attempt.start()
    attempt.record("rank_exited")
    attempt.stop()
    ended = attempt.ended()
    assert (ended["reason"], ended["exit_code"], ended["rank"]) == (Reason.EXITED_NONZERO, 7, 0)


def test_worker_dumps_stacks_of_ranks_that_offer_it_and_the_kernels_view_of_others(attempts: Attempts) -> None:
    code = REPORT + (
        "import faulthandler\n"
        "def stuck(): time.sleep(600)\n"
        "if os.environ['RANK'] == '0':\n"
        "    faulthandler.register(signal.SIGUSR1, all_threads=True); report(type='capable', stacks=True)\n"
        "print('up'); stuck()\n"
    )
    # In a shell, which would die of the signal.
    attempt = attempts("sh", "-c", '"$0" -c "$1"; exit 1', sys.executable, code, ranks_per_node=2)
    attempt.start()
    for rank in range(2):
        attempt.says("up", rank)
    attempt.control(dump_stacks=True)
    stacks = attempt.record("stacks")["stacks"]
    assert "in stuck" in stacks["0"]
    assert "sh -c" in stacks["1"]
    attempt.control(dump_stacks=True)
    wait_for(lambda: len(attempt.records("stacks")) == 2, "a second dump")
    assert attempt.records("rank_exited") == []
