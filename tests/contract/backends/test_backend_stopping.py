"""Cancel, time-out and delete: whatever a job started is gone when its status says so."""

from __future__ import annotations

import uuid

import pytest
from backends_under_test import BackendUnderTest, long_on

from job_server import JobServer

STARTS_A_FAMILY = """
import os, subprocess, sys, time

WAIT = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"

def stubborn(**options):
    child = subprocess.Popen([sys.executable, "-c", WAIT, *sys.argv[1:]], stdout=subprocess.PIPE, **options)
    assert child.stdout.readline() == b"up\\n"

def daemon(environment):
    # Forks twice and starts a session, as daemons do, and waits in a process whose parent is gone.
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            stubborn(env=environment)
            os.write(writer, b"up")
        os._exit(0)
    os.wait()
    assert os.read(reader, 64) == b"up"

stubborn(), stubborn(start_new_session=True), daemon(None), daemon({})
print("family", flush=True)
if "stays" in sys.argv:
    time.sleep(600)
"""

SAVES = """
import signal, sys, time

def end(*_):
    print("saving", flush=True)
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def mark() -> str:
    """A word in the arguments of whatever a job of the test starts."""
    return f"family-{uuid.uuid4().hex}"


def start_family(backend: BackendUnderTest, mark: str) -> str:
    job_id = backend.server.submit_source(STARTS_A_FAMILY, mark, "stays", workload={"grace_period_s": 0.5})
    backend.server.wait_for_line(job_id, "family")
    assert len(backend.processes(mark)) >= 5
    return job_id


@long_on("local-files")
def test_cancelled_job_has_its_grace_and_ends_by_itself(backend: BackendUnderTest, server: JobServer) -> None:
    job_id = server.submit_source(SAVES)
    server.wait_for_line(job_id, "up")
    assert server.ask("GET", f"/v1/jobs/{job_id}/proxy/").status_code == 409  # it is no service
    answer = server.control(job_id, "cancel", reason="enough")
    assert answer["cancel_requested"]
    job = server.until(job_id, "CANCELLED")
    assert server.lines(job_id) == ["up", "saving", "saved"]
    assert (job["placement"], job["error"]) == (None, None)
    assert (job["status_reason"], job["status_message"]) == ("CANCELLED", "enough")
    assert server.events_of(job_id, "cancel_requested")[0]["message"] == "enough"
    backend.wait_until_nothing_is_left(job_id)


@long_on("local-http")
def test_cancelled_job_that_ignores_signals_leaves_no_process(
    backend: BackendUnderTest, server: JobServer, mark: str
) -> None:
    job_id = start_family(backend, mark)
    server.control(job_id, "cancel")
    server.until(job_id, "CANCELLED")
    assert not backend.processes(mark)
    backend.wait_until_nothing_is_left(job_id)


@long_on("local-files", "container")
def test_job_that_ran_too_long_fails_and_leaves_no_process(
    backend: BackendUnderTest, server: JobServer, mark: str
) -> None:
    # The trap makes the shell outlive its SIGTERM.
    program = "trap '' TERM; sleep 600 & echo up; sleep 600; sleep 600"
    workload = {"argv": ["sh", "-c", program, mark], "grace_period_s": 0.5}
    job_id = server.submit_workload("command", workload, scheduling_config={"max_runtime_seconds": 1})
    job = server.until(job_id, "FAILED")
    assert (job["error_type"], job["error"]["fault"]) == ("TIMEOUT", "user")
    assert "1 s" in job["error_message"]
    assert "max_runtime_seconds" in job["error"]["advice"]
    assert server.lines(job_id) == ["up"]
    assert not backend.processes(mark)


@long_on("local-http")
def test_job_that_ends_by_itself_leaves_no_process(backend: BackendUnderTest, server: JobServer, mark: str) -> None:
    job_id = server.submit_source(STARTS_A_FAMILY, mark)
    job = server.until(job_id)
    assert job["status"] == "COMPLETED", job["error"]
    assert not backend.processes(mark)
    assert server.events_of(job_id, "strays_killed")


def test_waiting_job_is_cancelled_at_once(server: JobServer) -> None:
    job_id = server.submit(
        "true",
        resource_config={"gpu_count": 1, "gpu_type": "none of these"},
        scheduling_config={"allow_waiting_for_nodes": True},
    )
    assert "no node has" in server.until(job_id, "QUEUED")["pending_reason"]
    answer = server.control(job_id, "cancel", reason="not needed")
    assert (answer["status"], answer["status_message"]) == ("CANCELLED", "not needed")
    assert server.ask("POST", f"/v1/jobs/{job_id}/cancel").status_code == 409


@long_on("local-files", "container")
def test_deleted_job_is_stopped_and_hidden_and_its_files_stay(
    backend: BackendUnderTest, server: JobServer, mark: str
) -> None:
    job_id = start_family(backend, mark)
    assert server.data("DELETE", f"/v1/jobs/{job_id}")["desired"] == "delete"
    server.wait_until_deleted(job_id)
    assert not backend.processes(mark)
    assert job_id not in [job["job_id"] for job in server.data("GET", "/v1/jobs")["jobs"]]
    assert server.raw_log(job_id).startswith(b"family")
    backend.wait_until_nothing_is_left(job_id)
