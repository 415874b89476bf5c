"""Cancel, time-out and delete: whatever a job started is gone when its status says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_servers import LocalServer, is_alive, processes_marked

STARTS_A_FAMILY = """
import os, signal, subprocess, sys, time

WAIT = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"

def stubborn(**options):
    child = subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, **options)
    assert child.stdout.readline() == b"up\\n"
    return child.pid

def daemon(environment):
    # Forks twice and starts a session, as daemons do, and waits in a process whose parent is gone.
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writer, str(stubborn(env=environment)).encode())
        os._exit(0)
    os.wait()
    return int(os.read(reader, 64))

pids = [os.getpid(), stubborn(), stubborn(start_new_session=True), daemon(None), daemon({})]
print("family", *pids, flush=True)
time.sleep(600)
"""


@pytest.fixture
def family(server: LocalServer, scripts: Path) -> Path:
    path = scripts / "family.py"
    path.write_text(STARTS_A_FAMILY)
    return path


def family_of(server: LocalServer, job_id: str) -> list[int]:
    pids = [int(pid) for pid in server.wait_for_line(job_id, "family").split()[1:]]
    assert len(pids) == 5
    assert all(is_alive(pid) for pid in pids)
    return pids


def test_cancelled_job_leaves_no_process(server: LocalServer, family: Path) -> None:
    job_id = server.submit_python(family, workload={"grace_period_s": 0.5})
    pids = family_of(server, job_id)
    answer = server.control(job_id, "cancel", reason="enough")
    assert answer["cancel_requested"]
    job = server.until(job_id, "CANCELLED")
    assert not any(is_alive(pid) for pid in pids)
    assert not processes_marked(job_id)
    assert (job["placement"], job["error"]) == (None, None)
    assert server.events_of(job_id, "cancel_requested")[0]["message"] == "enough"


def test_job_that_ran_too_long_fails_and_leaves_no_process(server: LocalServer) -> None:
    # The trap makes the shell outlive its SIGTERM.
    program = "trap '' TERM; setsid sleep 600 & echo pids $$ $!; sleep 600; sleep 600"
    job_id = server.submit_workload(
        "command",
        {"argv": ["sh", "-c", program], "grace_period_s": 0.5},
        scheduling_config={"max_runtime_seconds": 2},
    )
    job = server.until(job_id, "FAILED")
    assert (job["error_type"], job["error"]["fault"]) == ("TIMEOUT", "user")
    assert "2 s" in job["error_message"]
    assert "max_runtime_seconds" in job["error"]["advice"]
    (line,) = server.lines(job_id)
    assert not any(is_alive(int(pid)) for pid in line.split()[1:])


def test_job_that_ends_by_itself_leaves_no_process(server: LocalServer, family: Path) -> None:
    family.write_text(STARTS_A_FAMILY.rstrip().removesuffix("time.sleep(600)"))
    job_id = server.submit_python(family)
    job = server.until(job_id)
    assert job["status"] == "COMPLETED", job["error"]
    pids = [int(pid) for pid in server.wait_for_line(job_id, "family").split()[1:]]
    assert not any(is_alive(pid) for pid in pids)
    assert server.events_of(job_id, "strays_killed")


def test_waiting_job_is_cancelled_at_once(server: LocalServer) -> None:
    job_id = server.submit("true", resource_config={"gpu_count": 1, "gpu_type": "none of these"})
    assert "no node has" in server.until(job_id, "QUEUED")["pending_reason"]
    answer = server.control(job_id, "cancel", reason="not needed")
    assert (answer["status"], answer["status_message"]) == ("CANCELLED", "not needed")
    assert server.ask("POST", f"/v1/jobs/{job_id}/cancel").status_code == 409


def test_deleted_job_is_stopped_and_hidden_and_its_files_stay(server: LocalServer, family: Path) -> None:
    job_id = server.submit_python(family, workload={"grace_period_s": 0.5})
    pids = family_of(server, job_id)
    assert server.data("DELETE", f"/v1/jobs/{job_id}")["desired"] == "delete"
    server.wait_until_deleted(job_id)
    assert not any(is_alive(pid) for pid in pids)
    assert job_id not in [job["job_id"] for job in server.data("GET", "/v1/jobs")["jobs"]]
    assert server.raw_log(job_id).startswith(b"family")
