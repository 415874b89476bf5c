"""The server goes and comes back: jobs run on, and nothing that they said meanwhile is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_servers import LocalServer

from real_server import wait_for
from trainmaster.protocol.processes import ProcessIdentity, identity_of

COUNTS = """
import pathlib, sys, time
from trainmaster.jobs import report

counter, gate = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
n = 0
while not gate.exists():
    n += 1
    print(n, flush=True)
    report.metrics(step=n, count=n)
    counter.write_text(str(n))
    time.sleep(0.01)
if "save" in sys.argv:
    with report.checkpoint(step=n) as directory:
        (directory / "count").write_text(str(n))
report.finished()
"""

SERVES = """
import http.server, os
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


class Counting:
    """A job that counts until it is let go."""

    def __init__(self, server: LocalServer, scripts: Path, *more: str) -> None:
        (scripts / "counts.py").write_text(COUNTS)
        self.counter, self.gate = scripts / "counter", scripts / "gate"
        self.job_id = server.submit_python(scripts / "counts.py", self.counter, self.gate, *more)

    def goes_on(self) -> None:
        """Wait until it has counted further, whether or not anybody listens."""
        reached = self.reached()
        wait_for(lambda: self.reached() > reached + 20, "it to count on")

    def reached(self) -> int:
        try:
            return int(self.counter.read_text() or 0)
        except FileNotFoundError:
            return 0


@pytest.fixture
def counting(server: LocalServer, scripts: Path) -> Counting:
    return Counting(server, scripts)


def leave(server: LocalServer, how: str) -> None:
    server.stop() if how == "SIGTERM" else server.kill()


def rank_of(server: LocalServer, job_id: str) -> ProcessIdentity:
    (pid,) = server.rank_pids(job_id).values()
    identity = identity_of(pid)
    assert identity is not None
    return identity


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_running_job_is_the_same_process_after_a_restart(server: LocalServer, counting: Counting, how: str) -> None:
    job_id = counting.job_id
    before = rank_of(server, job_id)
    counting.goes_on()
    server.until(job_id, "TRAINING")
    leave(server, how)
    counting.goes_on()
    server.start()
    counting.goes_on()
    assert rank_of(server, job_id) == before
    caught_up = server.job(job_id)["progress"]["step"] or 0
    wait_for(lambda: server.job(job_id)["progress"]["step"] > caught_up, "its progress to be seen")
    job = server.job(job_id)
    assert (job["status"], job["attempt"]) == ("TRAINING", 1)
    counting.gate.touch()
    assert_nothing_is_lost(server, counting)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_job_that_ended_while_the_server_was_away_is_taken_in(
    server: LocalServer, counting: Counting, how: str
) -> None:
    rank = rank_of(server, counting.job_id)
    counting.goes_on()
    leave(server, how)
    counting.gate.touch()
    wait_for(lambda: identity_of(rank.pid) != rank, "the rank's end")
    server.start()
    assert_nothing_is_lost(server, counting)


def test_checkpoint_that_was_written_while_the_server_was_away_is_registered(
    server: LocalServer, scripts: Path
) -> None:
    counting = Counting(server, scripts, "save")
    counting.goes_on()
    server.kill()
    counting.gate.touch()
    # Over HTTP it cannot be committed before the server has said whose it is.
    checkpoints = server.directory / "artifacts" / counting.job_id / "checkpoints"
    wait_for(lambda: list(checkpoints.glob("*/count")), "the checkpoint's file")
    server.start()
    job = server.until(counting.job_id)
    assert job["status"] == "COMPLETED"
    assert [checkpoint["step"] for checkpoint in job["checkpoints"]] == [counting.reached()]


def assert_nothing_is_lost(server: LocalServer, counting: Counting) -> None:
    job_id = counting.job_id
    job = server.until(job_id)
    assert (job["status"], job["attempt"]) == ("COMPLETED", 1)
    numbers = list(range(1, counting.reached() + 1))
    assert server.lines(job_id) == [str(n) for n in numbers]
    (series,) = server.data("GET", f"/v1/jobs/{job_id}/metrics?limit=100000")["series"]
    assert [(step, value) for step, _, value in series["points"]] == [(n, float(n)) for n in numbers]
    events = server.events(job_id)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    edges = [(event["from"], event["to"]) for event in events if event["type"] == "status"]
    path = ["PENDING", "QUEUED", "SCHEDULING", "PREPARING", "TRAINING", "COMPLETED"]
    assert edges == list(zip([None, *path], path, strict=False))


def test_stop_that_was_asked_for_outlives_the_server(server: LocalServer, counting: Counting) -> None:
    rank = rank_of(server, counting.job_id)
    server.control(counting.job_id, "cancel")
    server.kill()
    server.start()
    assert server.until(counting.job_id, "CANCELLED")["attempt"] == 1
    assert identity_of(rank.pid) != rank


def test_service_is_reached_again_after_a_restart(server: LocalServer, scripts: Path) -> None:
    (scripts / "serves.py").write_text(SERVES)
    job_id = server.submit_workload("service", {"argv": [str(scripts / "serves.py")], "python": True})
    server.until(job_id, "TRAINING")
    rank = rank_of(server, job_id)
    server.stop()
    server.start()
    assert server.ask("GET", f"/v1/jobs/{job_id}/proxy/").status_code == 200
    assert rank_of(server, job_id) == rank
    assert server.job(job_id)["attempt"] == 1


def test_purged_job_leaves_no_file_and_a_deleted_one_its_checkpoints(server: LocalServer, scripts: Path) -> None:
    kept, purged = (Counting(server, scripts, "save") for _ in range(2))
    kept.gate.touch()
    for counting, query in ((kept, ""), (purged, "?purge=true")):
        assert server.until(counting.job_id)["status"] == "COMPLETED"
        server.data("DELETE", f"/v1/jobs/{counting.job_id}{query}")
        server.wait_until_deleted(counting.job_id)
    # The leader tidies up when it begins to lead, and now and then.
    server.kill()
    server.start()
    files = [server.directory / root / purged.job_id for root in ("artifacts", "runs")]
    wait_for(lambda: not any(path.exists() for path in files), "the purge")
    assert len(list((server.directory / "artifacts" / kept.job_id / "checkpoints").iterdir())) == 1
    assert server.run_directory(kept.job_id).path.exists()
    server.data("DELETE", f"/v1/jobs/{kept.job_id}?purge=true")
    server.kill()
    server.start()
    files = [server.directory / root / kept.job_id for root in ("artifacts", "runs")]
    wait_for(lambda: not any(path.exists() for path in files), "the purge afterwards")
