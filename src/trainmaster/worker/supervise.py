"""The worker's life: it claims a node of an attempt, runs it, and writes down how it ended.

The claim comes before anything else and the exit after everything else. What lies between is `node`.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainmaster.protocol.hints import send_hint
from trainmaster.protocol.processes import boot_id
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import Within
from trainmaster.protocol.rundir import RunDirectory, exit_document
from trainmaster.protocol.secrets import NO_SECRETS, Secrets
from trainmaster.worker.node import NodeRun
from trainmaster.worker.processes import start_time_of
from trainmaster.worker.records import ExitRecord, Heartbeat, Journal, RunDirectoryGoneError
from trainmaster.worker.users import CannotBecomeError
from trainmaster.worker.verdict import Verdict

_OUTSIDE = Within()


def run_worker(run_dir: Path, node: int, secrets: Secrets = NO_SECRETS, within: Within = _OUTSIDE) -> int:
    """Run one node of an attempt in this process; its exit code.

    What the launch refers to as secrets is among those that are handed over here; `within` says what is different
    from the request where this process runs.

    It touches nothing when somebody else has claimed the node, or when the run directory is gone.
    """
    pid = os.getpid()
    identity = {"pid": pid, "start_time": start_time_of(pid), "boot_id": boot_id(), "host": socket.gethostname()}
    directory = RunDirectory(run_dir.absolute())
    try:
        if not directory.claim(node, {"nonce": os.urandom(16).hex(), **identity}):
            return 0
    except FileNotFoundError:
        return 0
    journal = Journal(directory, node)
    journal.record("claimed", **identity)
    try:
        _run_claimed(directory, node, journal, secrets, within)
    except RunDirectoryGoneError:
        # The job was deleted with all that it had; there is nobody to report to.
        return 0
    return 0


def _run_claimed(directory: RunDirectory, node: int, journal: Journal, secrets: Secrets, within: Within) -> None:
    exit_record = ExitRecord(directory, node)
    heartbeat = Heartbeat(directory, node)
    heartbeat.beat()
    run = None
    try:
        request = within.amend(directory.request(), node)
        run = NodeRun(directory, request, node, secrets, journal, heartbeat)
    except (OSError, ValueError, KeyError, TypeError) as error:
        verdict = Verdict(reason=Reason.LAUNCH_REFUSED, message=f"the worker cannot read its request: {error!r}")
    except CannotBecomeError as error:
        verdict = Verdict(reason=Reason.LAUNCH_REFUSED, message=str(error))
    else:
        verdict = run.run()

    def compose() -> dict[str, Any]:
        journal.flush()
        sizes = dict(directory.streams(node))
        return _exit_from(verdict, started_at=run.started_at if run else None, streams=sizes)

    def wait(seconds: float) -> None:
        time.sleep(seconds)
        heartbeat.beat()

    exit_record.write(compose, wait)
    if run is not None:
        if request.launch.remove_working_directory:
            _remove_work(directory, range(len(request.nodes)))
        send_hint(request.hint_socket, request.attempt_id)


def _remove_work(directory: RunDirectory, nodes: Iterable[int]) -> None:
    """Remove the attempt's working directory once the last node that works in it has ended."""
    if all(directory.document(exit_document(node)) is not None for node in nodes):
        shutil.rmtree(directory.path / "work", ignore_errors=True)


def _exit_from(verdict: Verdict, *, started_at: float | None, streams: dict[str, int]) -> dict[str, Any]:
    end = verdict.end
    return {
        "reason": verdict.reason,
        "message": verdict.message,
        "exit_code": end.exit_code if end else None,
        "signal": end.signal if end else None,
        "rank": end.rank if end and end.failed else None,
        "step": verdict.step,
        "stop_cause": verdict.stop_cause,
        "started_at": started_at,
        "ended_at": time.time(),
        "evidence": {
            "last_lines": verdict.evidence.last_lines,
            "frame": verdict.evidence.frame,
            "oom_kills": verdict.oom_kills,
        },
        "streams": streams,
    }
