"""From submission to the first instruction of a job on a cluster, against the engine's own client.

The command is a shell whose first act is to write a line to a FIFO that is open here. The clock starts before `sbatch`,
`ray job submit` or `kubectl create` is called, or before the request is sent to a server whose backend is that engine,
and stops when the line arrives. Both take turns, with the same command and the same resources, on an idle engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import statistics
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster_engine import TESTS, Engine, running_engine
from benchmarks.report import Figure, Progress, WrongResultError
from benchmarks.server import Client, command_job, running_server, wait_for

ROUNDS = 15
TARGET_RATIO = 1.15
_WITHOUT_STEP = frozenset({"sbatch"})
"""Clients that start the command outside of a step of Slurm, where our jobs never run: told, without a target."""
_TIMEOUT_S = 120.0
_RAY = TESTS.parent / ".venvs" / "ray" / "bin" / "ray"

Submission = Callable[[], Callable[[], bool]]
"""Submits a job, and returns what says whether it has ended."""


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """The ratio for each engine that can run here."""
    figures: list[Figure] = []
    for kind in CLIENTS:
        with running_engine(kind) as engine:
            if engine.missing:
                progress(engine.missing)
                continue
            figures += _measure(engine, directory, progress)
    return figures


def _measure(engine: Engine, directory: Path, progress: Progress) -> Iterator[Figure]:
    options = engine.server_options(directory)
    with (
        running_server(directory, *options, environment=engine.environment) as server,
        _listening(directory / f"started-{engine.kind}") as line,
        contextlib.closing(Client(server)) as client,
    ):

        def ours() -> Callable[[], bool]:
            job_id = client.submit(command_job(*line.argv, name="first-instruction"))

            def ended() -> bool:
                status = client.call("GET", f"/v1/jobs/{job_id}")["status"]
                if status in ("FAILED", "CANCELLED", "PREEMPTED"):
                    raise WrongResultError(f"job {job_id} on {engine.kind} ended as {status}")
                return bool(status == "COMPLETED")

            return ended

        clients = CLIENTS[engine.kind](engine, line.argv)
        progress(f"{engine.kind}: the first jobs, which start what later ones find running")
        for submission in (ours, *clients.values()):
            line.await_start(submission)
        progress(f"{engine.kind}: {ROUNDS} jobs through Trainmaster, each beside {' and '.join(clients)}")
        own: list[float] = []
        theirs: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(ROUNDS):
            own.append(line.await_start(ours))
            for name, submission in clients.items():
                theirs[name].append(line.await_start(submission))
    for name, times in theirs.items():
        yield _figure(engine.kind, name, own, times)


class _Line:
    """Where the command says that it has started."""

    def __init__(self, fifo: Path, reader: int) -> None:
        self.argv = ("/bin/sh", "-c", f"echo > {shlex.quote(str(fifo))}")
        self._reader = reader

    def await_start(self, submission: Submission) -> float:
        """Submit a job, and wait for its end; how many seconds it took to its first instruction."""
        began = time.perf_counter()
        ended = submission()
        if not select.select([self._reader], [], [], _TIMEOUT_S)[0]:
            raise WrongResultError(f"the command did not start within {_TIMEOUT_S:.0f} s")
        took_s = time.perf_counter() - began
        if os.read(self._reader, 64) != b"\n":
            raise WrongResultError("the command ran more than once")
        wait_for(lambda: ended() or None, "the job ends", _TIMEOUT_S, every_s=0.1)
        return took_s


@contextlib.contextmanager
def _listening(fifo: Path) -> Iterator[_Line]:
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield _Line(fifo, reader)
    finally:
        os.close(reader)


def _figure(kind: str, client: str, own: Sequence[float], theirs: Sequence[float]) -> Figure:
    ours_s, theirs_s = statistics.median(own), statistics.median(theirs)
    return Figure(
        name=f"first instruction on {kind} over `{client}`",
        measured=ours_s / theirs_s,
        unit="x",
        target=None if client in _WITHOUT_STEP else TARGET_RATIO,
        note=f"medians of {len(own)}: {ours_s:.2f} s, `{client}` {theirs_s:.2f} s; ranges {min(own):.2f} to "
        f"{max(own):.2f} s, {min(theirs):.2f} to {max(theirs):.2f} s",
    )


# -- the engines' own clients --


def _slurm(engine: Engine, argv: Sequence[str]) -> dict[str, Submission]:
    """With the command in the batch script, and as a step, which is how Slurm starts ranks."""
    variables = {**os.environ, **engine.environment, "SLURM_CONF": str(engine.options["conf"])}

    def submission(step: str) -> Submission:
        def submit() -> Callable[[], bool]:
            arguments = ("--parsable", f"--partition={engine.options['partition']}", "--output=/dev/null")
            script = f"#!/bin/sh\n{step}{shlex.join(argv)}\n"
            number = _printed(["sbatch", *arguments], variables, script).strip()
            asked = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={number}"]
            return lambda: _has_ended(_printed(asked, variables).strip(), "COMPLETED", "FAILED", "CANCELLED")

        return submit

    return {"sbatch": submission(""), "sbatch with srun": submission("srun ")}


def _ray(engine: Engine, argv: Sequence[str]) -> dict[str, Submission]:
    address = ("--address", str(engine.options["address"]))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}

    def submit() -> Callable[[], bool]:
        name = f"by-hand-{uuid.uuid4().hex[:8]}"
        _printed([str(_RAY), "job", "submit", *address, "--no-wait", "--submission-id", name, "--", *argv], variables)
        asked = f"{engine.options['address']}/api/jobs/{name}"

        def ended() -> bool:
            with urllib.request.urlopen(asked) as answer:
                return _has_ended(json.load(answer)["status"], "SUCCEEDED", "FAILED", "STOPPED")

        return ended

    return {"ray job submit": submit}


def _kubernetes(engine: Engine, argv: Sequence[str]) -> dict[str, Submission]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise WrongResultError("there is no kubectl on the PATH to compare with")
    command = [kubectl, f"--kubeconfig={engine.options['kubeconfig']}", f"--namespace={engine.options['namespace']}"]
    container = {"name": "main", "image": engine.options["image"], "command": list(argv)}
    pod = {"restartPolicy": "Never", "containers": [container]}

    def submit() -> Callable[[], bool]:
        name = f"by-hand-{uuid.uuid4().hex[:8]}"
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name},
            "spec": {"backoffLimit": 0, "template": {"spec": pod}},
        }
        _printed([*command, "create", "--filename=-"], os.environ, json.dumps(job))
        asked = [*command, "get", f"job/{name}", "--output=jsonpath={.status.conditions[*].type}"]
        return lambda: any(_has_ended(word, "Complete", "Failed") for word in _printed(asked, os.environ).split())

    return {"kubectl create": submit}


CLIENTS: Mapping[str, Callable[[Engine, Sequence[str]], Mapping[str, Submission]]] = {
    "slurm": _slurm,
    "ray": _ray,
    "kubernetes": _kubernetes,
}
"""Kind of engine -> what a user would submit a command with, by its name."""


def _has_ended(state: str, good: str, *bad: str) -> bool:
    if state in bad:
        raise WrongResultError(f"a job that the engine's own client submitted ended as {state}")
    return state == good


def _printed(command: Sequence[str], variables: Mapping[str, Any], text: str = "") -> str:
    done = subprocess.run(command, env=variables, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WrongResultError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout
