"""Servers whose files of ended jobs move to an object store, which is real, and at times away."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import relay
from local_servers import LocalServer, quiet_port
from real_server import RealServer, wait_for
from seaweed_server import SeaweedServer
from trainmaster.client import Client
from trainmaster.jobs.objects import ObjectPlace, open_place

PROGRAM = """
import json, sys
from trainmaster.jobs import report

step = 0
if path := report.resume_path():
    step = json.loads((path / "state.json").read_text())["step"]
output = report.output_dir()
before = sorted(each.name for each in output.iterdir())
print("begins at", step, "beside", before, flush=True)
for step in range(step + 1, step + 4):
    print("line", step, flush=True)
    report.metrics({"loss": 1 / step}, step=step)
    with report.checkpoint(step=step) as directory:
        (directory / "state.json").write_text(json.dumps({"step": step}))
        (directory / "weights.bin").write_bytes(bytes(range(256)) * 40)
(output / "deep").mkdir(exist_ok=True)
(output / "deep" / f"result-{step}.bin").write_bytes(b"result" * 100_000)
sys.exit(3 if "fail" in sys.argv and step == 3 else 0)
"""


@dataclass(eq=False)
class Gate:
    """The way to the store, which can be closed."""

    port: int
    target: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        listen, connect = f"tcp:127.0.0.1:{self.port}", f"tcp:{self.target}"
        self.process = subprocess.Popen([sys.executable, relay.__file__, listen, connect])

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/healthz", trust_env=False).is_success
            return False

        wait_for(answers, "the way to the store")

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True, eq=False)
class Stored:
    server: LocalServer
    gate: Gate
    store: ObjectPlace
    """Reached directly."""
    root: str
    environment: dict[str, str]

    def keys(self, below: str) -> list[str]:
        found = self.store.listing(self.store.below(below))
        return sorted(each["path"].removeprefix(f"{self.store.key}/") for each in found)

    def here(self, job_id: str) -> list[Path]:
        places = [self.server.directory / root / job_id for root in ("runs", "artifacts")]
        return [place for place in places if place.exists()]

    def until_moved(self, job_id: str) -> None:
        wait_for(lambda: not self.here(job_id), f"the files of {job_id} to move")

    def ended(self, *arguments: str, **document: Any) -> str:
        """A job that has ended, and whose files were moved."""
        job_id = self.server.submit_source(PROGRAM, *arguments, **document)
        self.server.until(job_id)
        self.until_moved(job_id)
        return job_id


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, seaweed: SeaweedServer) -> Iterator[Stored]:
    gate = Gate(quiet_port(), seaweed.url.removeprefix("http://"))
    root = seaweed.new_prefix()
    environment = {**seaweed.environment, "AWS_ENDPOINT_URL": gate.url, "TRAINMASTER_OBJECT_ROOT": root}
    server = LocalServer(tmp_path_factory.mktemp("stored") / "data", "files", **environment)
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, value in seaweed.environment.items():
            patch.setenv(name, value)
        gate.open()
        stack.callback(gate.close)
        stack.callback(server.clean_up)
        server.start()
        yield Stored(server, gate, open_place(root), root, environment)


@pytest.fixture
def other(stored: Stored, tmp_path: Path) -> Iterator[RealServer]:
    """A second server on the same database, with directories of its own."""
    database = f"sqlite:///{stored.server.directory / 'trainmaster.db'}"
    server = RealServer(tmp_path / "other", "--database", database, "--roles", "api", environment=stored.environment)
    server.start()
    yield server
    server.clean_up()


def log_of(server: RealServer, job_id: str, query: str = "attempt=all") -> list[str]:
    lines = server.data("GET", f"/v1/jobs/{job_id}/logs?{query}")["lines"]
    return [line["message"] for line in lines if line["message"].startswith(("line", "begins"))]


def test_files_of_an_ended_job_move_and_every_server_reads_them(stored: Stored, other: RealServer) -> None:
    job_id = stored.ended()
    assert not any("/work/" in key for key in stored.keys(f"runs/{job_id}"))
    for server in (stored.server, other):
        assert log_of(server, job_id) == ["begins at 0 beside []", "line 1", "line 2", "line 3"]
        assert log_of(server, job_id, "tail=2") == ["line 2", "line 3"]
        assert server.data("GET", f"/v1/jobs/{job_id}/logs")["complete"]
        with httpx.stream(
            "GET",
            f"{server.url}/v1/jobs/{job_id}/logs?follow=true",
            headers={"Authorization": f"Bearer {server.key}"},
            trust_env=False,
        ) as followed:
            events = followed.read().decode()
        assert events.count("event: log") == 4
        assert "event: end" in events
        (series,) = server.data("GET", f"/v1/jobs/{job_id}/metrics")["series"]
        assert [point[0] for point in series["points"]] == [1, 2, 3]
        listed = server.data("GET", f"/v1/jobs/{job_id}/artifacts")["artifacts"]
        assert [each["path"] for each in listed if each["kind"] == "output"] == ["output/deep/result-3.bin"]
        assert len([each for each in listed if each["kind"] == "checkpoint"]) == 3 * 3
        assert server.job(job_id)["output"]["model_uri"] is not None
        path = f"/v1/jobs/{job_id}/artifacts/output/deep/result-3.bin"
        assert server.ask("GET", path).content == b"result" * 100_000
        part = server.ask("GET", path, headers={"Range": "bytes=599990-"})
        assert part.status_code == 206
        assert part.content == (b"result" * 100_000)[599_990:]
        with Client(server.url, api_key=server.key) as client:
            for each in client.results.checkpoints(job_id)["checkpoints"]:
                assert client.results.verify_checkpoint(job_id, each["checkpoint_id"]) == []


def test_damage_on_the_store_is_found(stored: Stored) -> None:
    job_id = stored.ended()
    (weights, *_) = [key for key in stored.keys(f"artifacts/{job_id}/checkpoints") if key.endswith("weights.bin")]
    stored.store.put(stored.store.below(weights), b"damaged" * 1000)
    found = []
    with Client(stored.server.url, api_key=stored.server.key) as client:
        for each in client.results.checkpoints(job_id)["checkpoints"]:
            found += client.results.verify_checkpoint(job_id, each["checkpoint_id"])
    assert len(found) == 1
    assert "weights.bin" in found[0]


def test_a_retry_resumes_from_the_moved_checkpoint_of_the_failed_job(stored: Stored) -> None:
    job_id = stored.ended("fail")
    assert stored.server.job(job_id)["status"] == "FAILED"
    again = stored.server.control(job_id, "retry")["job_id"]
    stored.server.until(again, "COMPLETED")
    assert log_of(stored.server, again) == ["begins at 3 beside []", "line 4", "line 5", "line 6"]


SERVICE = """
import http.server, os
from trainmaster.jobs import report

(report.output_dir() / "note.txt").write_text("of the service")
print("serves", flush=True)
place = (os.environ["TRAINMASTER_SERVICE_HOST"], int(os.environ["PORT"]))
http.server.HTTPServer(place, http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_logs_of_a_cancelled_service_move_and_it_is_resumed(stored: Stored) -> None:
    server = stored.server
    files = [{"path": "main.py", "sha256": server.upload_files(SERVICE.encode())}]
    job_id = server.submit_workload("service", {"argv": ["main.py"], "python": True, "files": files})
    server.until(job_id, "TRAINING")
    server.control(job_id, "cancel")
    server.until(job_id, "CANCELLED")
    wait_for(lambda: not (server.directory / "runs" / job_id).exists(), "the logs to move")
    server.control(job_id, "resume")
    server.until(job_id, "TRAINING")
    lines = server.data("GET", f"/v1/jobs/{job_id}/logs?attempt=all&stream=stdout")["lines"]
    assert [(line["attempt"], line["message"]) for line in lines] == [(1, "serves"), (2, "serves")]
    assert server.artifact(job_id, "output/note.txt") == b"of the service"
    server.control(job_id, "cancel")


def test_another_job_resumes_from_a_moved_checkpoint(stored: Stored) -> None:
    first = stored.ended()
    (latest,) = [each for each in stored.server.job(first)["checkpoints"] if each["is_latest"]]
    second = stored.server.submit_source(PROGRAM, workload={"resume_from_checkpoint": latest["checkpoint_id"]})
    stored.server.until(second, "COMPLETED")
    assert log_of(stored.server, second)[0] == "begins at 3 beside []"
    # What was brought back is the source's as before.
    listed = stored.server.data("GET", f"/v1/jobs/{first}/artifacts")["artifacts"]
    assert len(listed) == 1 + 3 * 3


def test_a_purged_job_leaves_nothing(stored: Stored) -> None:
    job_id = stored.ended()
    assert stored.keys(f"runs/{job_id}")
    assert stored.keys(f"artifacts/{job_id}")
    assert stored.server.ask("DELETE", f"/v1/jobs/{job_id}?purge=true").is_success
    wait_for(
        lambda: not stored.keys(f"runs/{job_id}") and not stored.keys(f"artifacts/{job_id}"), "the store to be empty"
    )
    assert not stored.here(job_id)


def test_a_deleted_checkpoint_leaves_nothing(stored: Stored) -> None:
    job_id = stored.ended()
    first, *_ = stored.server.job(job_id)["checkpoints"]
    assert stored.server.ask("DELETE", f"/v1/jobs/{job_id}/checkpoints/{first['checkpoint_id']}").is_success
    path = first["uri"].removeprefix("artifacts:")
    wait_for(lambda: not stored.keys(f"artifacts/{path}"), "the files of the checkpoint to go")
    assert len(stored.keys(f"artifacts/{job_id}/checkpoints")) == 2 * 3


def test_while_the_store_is_away_jobs_go_on_and_nothing_is_lost(stored: Stored) -> None:
    moved = stored.ended()
    digest = stored.server.upload_files(PROGRAM.encode())
    server = stored.server
    server.kill()
    stored.gate.close()
    server.start()  # it forgets what it has read, and starts without the store
    try:
        program = {"path": "main.py", "files": [{"path": "main.py", "sha256": digest}]}
        job_id = server.submit_workload("script", program)
        server.until(job_id, "COMPLETED")
        assert log_of(server, job_id)[-1] == "line 3"
        refused = server.ask("PUT", f"/v1/blobs/{hashlib.sha256(b'new').hexdigest()}", content=b"new")
        assert refused.status_code == 503
        assert "object store" in refused.json()["error"]["message"]
        unread = server.ask("GET", f"/v1/jobs/{moved}/logs")
        assert unread.status_code == 503
        assert "object store" in unread.json()["error"]["message"]
        assert server.job(moved)["status"] == "COMPLETED"
        wait_for(lambda: "files of ended jobs stay on this server" in server.log_text(), "the warning")
        assert len(stored.here(job_id)) == 2
    finally:
        stored.gate.open()
    stored.until_moved(job_id)
    assert log_of(server, job_id)[-1] == "line 3"
    wait_for(lambda: server.ask("GET", f"/v1/jobs/{moved}/logs").is_success, "the logs of the moved job")


def test_a_server_killed_between_commit_and_removal_moves_once_more(stored: Stored) -> None:
    server = stored.server
    server.stop()
    server.start(TRAINMASTER_FAILPOINT="move.committed:1")
    job_id = server.submit_source(PROGRAM)
    server.wait()
    assert stored.keys(f"runs/{job_id}/1/.index.json") or stored.keys(f"runs/{job_id}/1")
    assert len(stored.here(job_id)) == 2
    server.start()
    stored.until_moved(job_id)
    assert log_of(server, job_id)[-1] == "line 3"
    listed = server.data("GET", f"/v1/jobs/{job_id}/artifacts")["artifacts"]
    assert len(listed) == 1 + 3 * 3


def test_uploaded_files_are_on_the_store_at_once_and_other_servers_have_them(stored: Stored, other: RealServer) -> None:
    content = b"shipped to one server"
    digest = stored.server.upload_files(content)
    assert stored.store.get(stored.store.below(f"blobs/default/{digest}"))[0] == content
    assert other.ask("GET", f"/v1/blobs/{digest}").content == content
    elsewhere = hashlib.sha256(b"shipped to the other").hexdigest()
    assert other.ask("PUT", f"/v1/blobs/{elsewhere}", content=b"shipped to the other").is_success
    source = "print(open('data.txt').read())"
    files = [{"path": "data.txt", "sha256": elsewhere}]
    job_id = stored.server.submit_source(source, workload={"files": files})
    stored.server.until(job_id, "COMPLETED")
    lines = stored.server.data("GET", f"/v1/jobs/{job_id}/logs")["lines"]
    assert [line["message"] for line in lines] == ["shipped to the other"]


def test_a_log_with_a_gap_keeps_it(stored: Stored) -> None:
    server = stored.server
    server.stop()
    server.start(TRAINMASTER_LOG_CAP_MB="1")
    source = "for number in range(60000): print(number, 'x' * 80)\n"
    job_id = server.submit_source(source)
    server.until(job_id, "COMPLETED")
    expected = [line["message"] for line in server.data("GET", f"/v1/jobs/{job_id}/logs?limit=10000")["lines"]]
    assert any("bytes removed" in line for line in expected) or len(expected) == 10_000
    tail = [line["message"] for line in server.data("GET", f"/v1/jobs/{job_id}/logs?tail=5")["lines"]]
    stored.until_moved(job_id)
    sizes = {each["path"]: each["size"] for each in stored.store.listing(stored.store.below(f"runs/{job_id}/1"))}
    assert sum(sizes.values()) < 3 << 20
    again = [line["message"] for line in server.data("GET", f"/v1/jobs/{job_id}/logs?limit=10000")["lines"]]
    assert again == expected
    assert [line["message"] for line in server.data("GET", f"/v1/jobs/{job_id}/logs?tail=5")["lines"]] == tail
    assert json.dumps(tail[-1]).startswith('"59999')


def test_the_collector_removes_from_the_store_what_is_not_kept(stored: Stored) -> None:
    job_id = stored.ended()
    server = stored.server
    server.stop()
    server.start(TRAINMASTER_KEEP_RUNS_S="1")
    collected = server.data("POST", "/v1/gc", {"dry_run": True})["kinds"]
    (runs,) = [each for each in collected if each["what"] == "run directory"]
    assert job_id in runs["names"]
    assert runs["size_bytes"] > 0
    server.data("POST", "/v1/gc", {})
    assert stored.keys(f"runs/{job_id}") == []
    answer = server.data("GET", f"/v1/jobs/{job_id}/logs")
    assert answer["lines"] == []
    assert "removed" in answer["notice"]
    server.stop()
    server.start()
