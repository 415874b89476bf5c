"""Canaries: what is given to a job as a secret reaches the job, and is found nowhere else."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from job_server import NO_GPU, processes_marked
from local_servers import LocalServer, over
from process_signals import kill_claimant
from real_server import wait_for
from trainmaster.backends.local.fork_client import ForkServer, ForkServerError
from trainmaster.worker.forkserver import LOG

ENVIRONMENT = {"PASSWORD": "canary-environment-0f3a", "SECOND": "canary-second-77c1\nwith 'quotes' and ☃"}
DRIVE, ATLAS, DRIVE_AGAIN = "canary-drive-40aa", "canary-atlas-9e17", "canary-drive-again-1b6f"
WEBHOOK = "canary-webhook-secret-3c55-abcdefghij"
CANARIES = (*ENVIRONMENT.values(), DRIVE, ATLAS, DRIVE_AGAIN, WEBHOOK)

SCRIPT = """
import hashlib, os, pathlib, sys, time
from trainmaster.jobs import report

gate = pathlib.Path(sys.argv[1])
for name in ("PASSWORD", "SECOND"):
    print("saw", name, hashlib.sha256(os.environ[name].encode()).hexdigest(), flush=True)
others = [name for name, value in os.environ.items() if "canary" in value and name not in ("PASSWORD", "SECOND")]
print("others", others, flush=True)
step = 0
while not gate.exists():
    step += 1
    report.metrics(step=step, loss=1 / step)
    if report.stop_requested():
        with report.checkpoint(step=step) as directory:
            (directory / "step").write_text(str(step))
        sys.exit(report.EXIT_STOPPED)
    time.sleep(0.05)
sys.exit(int(gate.read_text()))
"""


class Search:
    """Looks for canaries in everything that a server has on disk, and in what processes show of themselves."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._needles = [value.encode() for value in (*CANARIES, server.key)]

    def sees(self, text: bytes) -> bool:
        """Whether something that is no secret is found, as it should be."""
        return any(text in _read(path) for path in self._files())

    def __call__(self) -> None:
        __tracebackhide__ = True
        found = [f"{path}: {needle!r}" for path in self._files() for needle in self._needles if needle in _read(path)]
        assert not found
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            if pid != os.getpid():
                shown = _read(Path(f"/proc/{pid}/cmdline"))
                assert not any(needle in shown for needle in self._needles), shown

    def _files(self) -> Iterator[Path]:
        directory = self._server.directory
        roots = [directory]
        # Where the workers live in a file system of their own, it is reached through one of them.
        if (pid := self._server._fork_server_pid()) is not None:
            roots.append(Path(f"/proc/{pid}/root{directory}"))
        for root in roots:
            # The first key lies in a file: how else would its owner get it.
            # `walk` passes over directories that are removed meanwhile.
            found = (Path(directory, name) for directory, _, names in os.walk(root) for name in names)
            yield from (path for path in found if path.is_file() and path != root / "api-key")
        yield self._server._log_path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it went in the meantime


@pytest.fixture
def search(server: LocalServer) -> Search:
    return Search(server)


def submit(server: LocalServer, scripts: Path, **document: Any) -> str:
    (scripts / "job.py").write_text(SCRIPT)
    body = {
        "name": "canary",
        "workload": {
            "kind": "script",
            "path": str(scripts / "job.py"),
            "args": [str(scripts / "gate")],
            "environment": ENVIRONMENT,
        },
        "resource_config": NO_GPU,
        **document,
    }
    headers = {"X-ScaiDrive-Token": DRIVE, "X-ScaiAtlas-Token": ATLAS}
    return str(server.data("POST", "/v1/jobs", body, headers=headers)["job_id"])


def wait_until_seen(server: LocalServer, job_id: str, attempt: int = 1) -> None:
    """Wait for the proof that the job has its variables, and no more than those."""
    out = server.run_directory(job_id, attempt).path / "nodes" / "0" / "logs" / "main.0.out"
    wait_for(lambda: b"others" in _read(out), f"attempt {attempt} of {job_id} to look at its environment")
    lines = _read(out).decode().splitlines()
    for name, value in ENVIRONMENT.items():
        assert f"saw {name} {hashlib.sha256(value.encode()).hexdigest()}" in lines
    assert "others []" in lines


def test_canaries_are_nowhere_but_in_the_job(server: LocalServer, scripts: Path, search: Search) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there: what is to be delivered is kept
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        hook = server.data("POST", "/v1/webhooks", {"url": url, "secret": WEBHOOK})["webhook_id"]

        job_id = submit(server, scripts, scheduling_config={"max_retries": 1})
        wait_until_seen(server, job_id)
        assert search.sees(b"saw PASSWORD")
        search()
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
            environ = _read(Path(f"/proc/{pid}/environ"))
            assert not any(value.encode() in environ for value in (DRIVE, ATLAS, server.key))
            assert ENVIRONMENT["PASSWORD"].encode() not in environ or pid in processes_marked(job_id)

        wait_for(lambda: server.job(job_id)["can_save"], "the job to say that it saves")
        server.control(job_id, "pause")
        server.until(job_id, "PAUSED")
        search()
        server.data("POST", f"/v1/jobs/{job_id}/resume", {}, headers={"X-ScaiDrive-Token": DRIVE_AGAIN})
        wait_until_seen(server, job_id, attempt=2)
        search()

        kill_claimant(server.run_directory(job_id, 2).claimant(0))
        wait_until_seen(server, job_id, attempt=3)
        search()

        (scripts / "gate").write_text("3")
        server.until(job_id, "FAILED")
        search()
        (scripts / "gate").unlink()
        child = server.data("POST", f"/v1/jobs/{job_id}/retry", {}, headers={"X-ScaiAtlas-Token": ATLAS})["job_id"]
        wait_until_seen(server, child)
        search()
        (scripts / "gate").write_text("0")
        server.until(child, "COMPLETED")
        search()

        assert_routes_tell_nothing(server, {"job_id": job_id, "webhook_id": hook})
        assert_routes_tell_nothing(server, {"job_id": child, "webhook_id": hook})
        server.data("DELETE", f"/v1/jobs/{job_id}?purge=true")
        search()
        server.data("DELETE", f"/v1/webhooks/{hook}")


def assert_routes_tell_nothing(server: LocalServer, known: dict[str, str]) -> None:
    """Ask every route that reads; none may answer with a canary."""
    document = server.ask("GET", "/openapi.json").json()
    paths = [path for path, verbs in document["paths"].items() if "get" in verbs and "/proxy" not in path]
    assert "/v1/jobs/{job_id}/events" in paths
    for path in paths:
        filled = re.sub(r"{(\w+)}", lambda match: known.get(match[1], "1"), path)
        answer = server.ask("GET", filled)
        assert answer.status_code < 500, answer.text
        told = [value for value in (*CANARIES, server.key) if value in answer.text]
        assert not told, f"GET {filled} told {told}"


def test_job_that_was_submitted_before_a_restart_gets_its_secrets(
    server: LocalServer, scripts: Path, search: Search
) -> None:
    """The server dies between the submission and a launch, and its fork server is gone as well."""
    job_id = submit(server, scripts, scheduling_config={"max_retries": 1})
    wait_until_seen(server, job_id)
    server.kill()
    kill_claimant(server.run_directory(job_id, 1).claimant(0))
    server.start()
    wait_until_seen(server, job_id, attempt=2)
    search()


@over("files")
def test_fork_server_s_log_and_answers_hold_no_secret(server: LocalServer, scripts: Path) -> None:
    server.until(server.submit("true"))  # starts the fork server, which `ask` would start as a child of this process
    fork_server = ForkServer(server.directory / "forkserver")
    for order in (
        {"op": "start", "secrets": {"environment": {"A": CANARIES[0]}}},
        {"op": "start", "run_dir": 7, "node": "x", "secrets": {"environment": {"A": CANARIES[0]}}},
        {"op": "start", "run_dir": "/nowhere", "node": 0, "secrets": [CANARIES[0]]},
        {"op": "begin", "secrets": {"environment": {"A": CANARIES[0]}}},
    ):
        try:
            answer = str(fork_server.ask(order))
        except ForkServerError as error:
            answer = str(error)
        assert CANARIES[0] not in answer
    # It still forks, and by the time that this job runs it has written whatever it had to say.
    wait_until_seen(server, submit(server, scripts))
    assert CANARIES[0].encode() not in _read(server.directory / "forkserver" / LOG)
