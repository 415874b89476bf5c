"""SIGTERM from the engine of a cluster, which reaches the processes of a node one after another: what it means when the
rank has ended well before its worker knows of the signal."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from worker_attempts import Attempts

from patience import PATIENCE_S
from trainmaster.protocol.environment import ENGINE_SIGNALS_RANKS
from trainmaster.protocol.reasons import REASON_OF_STOP, Reason, StopCause
from trainmaster.protocol.request import EngineNeeds

WORKER = """
import signal, sys
from pathlib import Path
from trainmaster.worker.supervise import run_worker
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
run_worker(Path(sys.argv[1]), 0)
"""
"""As its courier starts it on a cluster."""
FINISHED = """printf '{"type": "finished"}\\n' >> $TRAINMASTER_EVENTS_FILE; """
BEFORE_ITS_END = "kill -TERM $PPID; exit 0"
AFTER_ITS_END = "(while kill -0 $$ 2>/dev/null; do :; done; kill -TERM $PPID) & exit 0"


def end_of(attempts: Attempts, script: str, **environment: str) -> dict[str, Any]:
    """How a worker says that an attempt ended."""
    attempt = attempts("sh", "-c", script, engine_needs=EngineNeeds(account="a", job_name="n"))
    command = [sys.executable, "-c", WORKER, str(attempt.path)]
    subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=PATIENCE_S)
    return attempt.ended()


@pytest.mark.parametrize(
    ("script", "environment"),
    [
        pytest.param(BEFORE_ITS_END, {}, id="before"),
        pytest.param(AFTER_ITS_END, {ENGINE_SIGNALS_RANKS: "1"}, id="after"),
    ],
)
def test_rank_that_exits_with_0_when_the_engine_signals_it_was_stopped(
    attempts: Attempts, script: str, environment: dict[str, str]
) -> None:
    ended = end_of(attempts, script, **environment)
    assert (ended["reason"], ended["stop_cause"]) == (REASON_OF_STOP[StopCause.ENGINE], StopCause.ENGINE)


@pytest.mark.parametrize("script", [FINISHED + BEFORE_ITS_END, "exit 0"], ids=["finished", "not signalled"])
def test_rank_that_finished_or_got_no_signal_from_the_engine_succeeded(attempts: Attempts, script: str) -> None:
    ended = end_of(attempts, script, **{ENGINE_SIGNALS_RANKS: "1"})
    assert (ended["reason"], ended["stop_cause"]) == (Reason.SUCCEEDED, None)
