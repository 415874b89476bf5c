"""The server goes and comes back: jobs run on, and nothing that they said meanwhile is lost."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import pytest
from backends_under_test import BackendUnderTest, long_on

from job_server import JobServer
from real_server import wait_for
from trainmaster.protocol.launch import Lifetime

COUNTS = """
import sys, time
from trainmaster.jobs import report

n = 0
while n < int(sys.argv[1]) and not report.stop_requested():
    n += 1
    print(n, flush=True)
    report.metrics(step=n, count=n)
    time.sleep(0.01)
if "save" in sys.argv:
    with report.checkpoint(step=n) as directory:
        (directory / "count").write_text(str(n))
if report.stop_requested():
    report.exit_stopped()
report.finished()
"""

SERVES = """
import http.server, os, uuid

started = uuid.uuid4().hex

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(started.encode())

http.server.HTTPServer((os.environ["TRAINMASTER_SERVICE_HOST"], int(os.environ["PORT"])), Handler).serve_forever()
"""

pytestmark = long_on("local-files", "local-http")  # tests/chaos kills servers of local jobs over both
FOR_EVER, SHORT = 1_000_000, 100
PATH = ["PENDING", "QUEUED", "SCHEDULING", "PREPARING", "TRAINING"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The jobs that were there when the server was killed, and when that was."""

    running: str
    ended: str
    """While there was no server."""
    saving: str
    """Likewise, and has a checkpoint to tell of."""
    cancelled: str
    """A moment before."""
    service: str | None
    service_said: str
    kept: str
    kept_checkpoints: int
    """Of a job that was deleted, once the server was back."""
    purged: str
    away: tuple[float, float]


@pytest.fixture(scope="module")
def outage(backend: BackendUnderTest) -> Iterator[Outage]:
    """A server is killed, stays away while jobs end, comes back, is stopped in order, and comes back again.

    The job that runs all the while is paused at the end; tests only look, so that any of them can be tried twice.
    """
    server, mark = backend.server, f"ended-{uuid.uuid4().hex}"
    running, cancelled = (server.submit_source(COUNTS, FOR_EVER, "save") for _ in range(2))
    kept, purged = (server.submit_source(COUNTS, 3, "save") for _ in range(2))
    service, said = _serve(backend)
    for job_id, query in ((kept, ""), (purged, "?purge=true")):
        assert server.until(job_id)["status"] == "COMPLETED"
        server.data("DELETE", f"/v1/jobs/{job_id}{query}")
        server.wait_until_deleted(job_id)
    for job_id in (running, cancelled):
        server.wait_for_line(job_id, "20")
    ended, saving = server.submit_source(COUNTS, SHORT, mark), server.submit_source(COUNTS, SHORT, "save")
    for job_id in (ended, saving):
        server.wait_for_line(job_id, "1")
    server.control(cancelled, "cancel")
    server.kill()
    killed_at = time.time()
    wait_for(lambda: not backend.processes(mark), "the end of a job")
    away = (killed_at, time.time())
    server.start()
    wait_for(lambda: not _files(server, purged), "the purge")
    checkpoints = len(list((server.directory / "artifacts" / kept / "checkpoints").iterdir()))
    server.data("DELETE", f"/v1/jobs/{kept}?purge=true")
    server.stop()
    server.start()
    caught_up = server.until(running, "TRAINING")["progress"]["step"] or 0
    wait_for(lambda: server.job(running)["progress"]["step"] > caught_up, "its progress to be seen")
    server.control(running, "pause")
    server.until(running, "PAUSED")
    yield Outage(
        running=running,
        ended=ended,
        saving=saving,
        cancelled=cancelled,
        service=service,
        service_said=said,
        kept=kept,
        kept_checkpoints=checkpoints,
        purged=purged,
        away=away,
    )
    backend.end_all_jobs()


def _serve(backend: BackendUnderTest) -> tuple[str | None, str]:
    if Lifetime.SERVICE not in backend.capabilities.lifetimes:
        return None, ""
    server = backend.server
    files = [{"path": "serves.py", "sha256": server.upload_files(SERVES.encode())}]
    job_id = server.submit_workload("service", {"argv": ["serves.py"], "python": True, "files": files})
    server.until(job_id, "TRAINING")
    return job_id, server.ask("GET", f"/v1/jobs/{job_id}/proxy/").text


def _files(server: JobServer, job_id: str) -> list[str]:
    return [root for root in ("artifacts", "runs") if (server.directory / root / job_id).exists()]


def test_running_job_runs_on_and_nothing_of_it_is_lost(backend: BackendUnderTest, outage: Outage) -> None:
    server, job_id = backend.server, outage.running
    job = server.job(job_id)
    assert (job["status"], job["attempt"]) == ("PAUSED", 1)
    (saved,) = job["checkpoints"]
    told = assert_nothing_is_lost(server, job_id, saved["step"])
    assert server.statuses(job_id) == [*PATH, "CHECKPOINTING", "TRAINING", "PAUSED"]
    # It did not wait for the server.
    assert any(outage.away[0] < at < outage.away[1] for at in told)
    backend.wait_until_nothing_is_left(job_id)


def test_job_that_ended_while_the_server_was_away_is_taken_in(backend: BackendUnderTest, outage: Outage) -> None:
    assert backend.server.until(outage.ended)["status"] == "COMPLETED"
    assert_nothing_is_lost(backend.server, outage.ended, SHORT)
    assert backend.server.statuses(outage.ended) == [*PATH, "COMPLETED"]
    backend.wait_until_nothing_is_left(outage.ended)


def test_checkpoint_that_was_written_while_the_server_was_away_is_registered(
    backend: BackendUnderTest, outage: Outage
) -> None:
    job = backend.server.until(outage.saving)
    assert (job["status"], job["attempt"]) == ("COMPLETED", 1)
    assert [checkpoint["step"] for checkpoint in job["checkpoints"]] == [SHORT]


def test_stop_that_was_asked_for_outlives_the_server(backend: BackendUnderTest, outage: Outage) -> None:
    assert backend.server.until(outage.cancelled, "CANCELLED")["attempt"] == 1
    backend.wait_until_nothing_is_left(outage.cancelled)


def test_service_is_reached_again_and_is_the_same_one(backend: BackendUnderTest, outage: Outage) -> None:
    if outage.service is None:
        pytest.skip("the backend runs no services")
    assert backend.server.ask("GET", f"/v1/jobs/{outage.service}/proxy/").text == outage.service_said
    job = backend.server.job(outage.service)
    assert (job["status"], job["attempt"]) == ("TRAINING", 1)


def test_purged_job_leaves_no_file_and_a_deleted_one_its_checkpoints_until_it_is_purged(
    backend: BackendUnderTest, outage: Outage
) -> None:
    assert outage.kept_checkpoints == 1
    wait_for(lambda: not _files(backend.server, outage.kept), "the purge afterwards")
    for job_id in (outage.kept, outage.purged):
        backend.wait_until_nothing_is_left(job_id)


def assert_nothing_is_lost(server: JobServer, job_id: str, count: int) -> list[float]:
    """See that every line, metric and event is there, once; when the metrics were told."""
    numbers = list(range(1, count + 1))
    assert server.lines(job_id, stream="stdout") == [str(n) for n in numbers]
    (series,) = server.data("GET", f"/v1/jobs/{job_id}/metrics?limit=100000")["series"]
    assert [(step, value) for step, _, value in series["points"]] == [(n, float(n)) for n in numbers]
    events = server.events(job_id)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    return [datetime.fromisoformat(at).timestamp() for _, at, _ in series["points"]]
