"""The life of a worker: it claims a node of an attempt, runs it (`node`), and last of all records how it ended."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster.protocol.account_files import remove_tree
from trainmaster.protocol.documents import DISK_FULL_ERRNOS, in_memory
from trainmaster.protocol.launch import LaunchStep
from trainmaster.protocol.processes import boot_id
from trainmaster.protocol.reasons import Reason, exit_record
from trainmaster.protocol.request import ContainerOverrides
from trainmaster.protocol.run_directory import RunDirectory, exit_document
from trainmaster.protocol.secrets import NO_SECRETS, Secrets, secret_named
from trainmaster.protocol.sockets import send_hint
from trainmaster.worker.node import NodeRun
from trainmaster.worker.processes import set_undumpable, start_time_of
from trainmaster.worker.records import ExitRecord, Heartbeat, Journal, RunDirectoryGoneError
from trainmaster.worker.users import CannotBecomeError
from trainmaster.worker.verdict import Verdict

_OUTSIDE = ContainerOverrides()


def run_worker(run_dir: Path, node: int, secrets: Secrets = NO_SECRETS, within: ContainerOverrides = _OUTSIDE) -> int:
    """Run one node of an attempt in this process; returns its exit code.

    `within` says what differs from the request where this process runs. If it leads onward, this process becomes the
    program that continues in the node's container, under the same claim. Nothing is touched if somebody else has
    claimed the node, or if the run directory is gone.
    """
    if secrets != NO_SECRETS:
        set_undumpable()  # in a container, ranks run as the same user as this process, which holds tokens
    directory = RunDirectory(run_dir.absolute())
    journal = Journal(directory, node)
    # The job may be deleted at any time: then there is nobody to report to.
    with contextlib.suppress(RunDirectoryGoneError):
        if within.first_step is not None or _claim(directory, node, journal):
            _run_claimed(directory, node, journal, secrets, within)
    return 0


def _claim(directory: RunDirectory, node: int, journal: Journal) -> bool:
    pid = os.getpid()
    identity = {"pid": pid, "start_time": start_time_of(pid), "boot_id": boot_id(), "host": socket.gethostname()}
    try:
        granted = directory.claim(node, {"nonce": os.urandom(16).hex(), **identity})
    except FileNotFoundError:
        return False
    if granted:
        journal.record("claimed", **identity)
    return granted


def _run_claimed(
    directory: RunDirectory, node: int, journal: Journal, secrets: Secrets, within: ContainerOverrides
) -> None:
    exit_record = ExitRecord(directory, node)
    heartbeat = Heartbeat(directory, node)
    heartbeat.beat()
    run = None
    try:
        request = within.amend(directory.request(), node)
        run = NodeRun(directory, request, node, secrets, journal, heartbeat, prepares_only=bool(within.onward))
    except (OSError, ValueError, KeyError, TypeError) as error:
        full = isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS
        reason = Reason.DISK_FULL if full else Reason.LAUNCH_REFUSED
        verdict = Verdict(reason=reason, message=f"the worker cannot read its request: {error!r}")
    except CannotBecomeError as error:
        verdict = Verdict(reason=Reason.LAUNCH_REFUSED, message=str(error))
    else:
        verdict = run.run()
        if within.onward and verdict.reason is Reason.SUCCEEDED:
            journal.flush()
            verdict = _become(within.onward, _unused(secrets, request.launch.steps[:-1]))

    def compose() -> dict[str, Any]:
        journal.flush()
        return _exit_from(verdict, started_at=run.started_at if run else None, streams=dict(directory.streams(node)))

    def wait(seconds: float) -> None:
        time.sleep(seconds)
        heartbeat.beat()

    exit_record.write(compose, wait)
    if run is not None:
        ends = (directory.document(exit_document(each)) for each in range(len(request.nodes)))
        if request.launch.remove_working_directory and all(end is not None for end in ends):
            with contextlib.suppress(OSError):
                remove_tree(directory.path / "work")  # this was the last node that worked in it
        send_hint(request.hint_socket, request.attempt_id)


def _become(command: tuple[str, ...], secrets: Secrets) -> Verdict:
    """Become another program, which reads the secrets from standard input; returns only if that fails."""
    os.dup2(in_memory(secrets.to_json()), 0)
    try:
        os.execv(command[0], command)
    except OSError as error:
        return Verdict(reason=Reason.WORKER_LOST, message=f"the worker cannot go on as {command[0]}: {error}")


def _unused(secrets: Secrets, done: Iterable[LaunchStep]) -> Secrets:
    used = {secret_named(reference) for step in done for reference in step.secrets.values()}
    return replace(secrets, tokens={name: value for name, value in secrets.tokens.items() if name not in used})


def _exit_from(verdict: Verdict, *, started_at: float | None, streams: dict[str, int]) -> dict[str, Any]:
    end, evidence = verdict.end, verdict.evidence
    return exit_record(
        verdict.reason,
        verdict.message,
        exit_code=end.exit_code if end else None,
        signal=end.signal if end else None,
        rank=end.rank if end and end.failed else None,
        step=verdict.step,
        stop_cause=verdict.stop_cause,
        started_at=started_at,
        evidence={"last_lines": evidence.last_lines, "frame": evidence.frame, "oom_kills": verdict.oom_kills},
        streams=streams,
    )
