"""What happens to engines, nodes and networks while jobs run, on every real engine."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster_servers import ClusterServer
from cuttable_link import CuttableLink
from engine_under_test import EngineUnderTest
from local_servers import quiet_port
from patience import PATIENCE_S
from real_server import wait_for
from saving_program import TRAINS, number_after, wait_until_it_can_save

pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * PATIENCE_S)]

AGAIN: dict[str, Any] = {"scheduling_config": {"max_retries": 2}}
GANG: dict[str, Any] = {"resource_config": {"gpu_count": 0, "node_count": 2}}
MINUTE_S = 60.0

COUNTS = """
import pathlib, sys, time
from trainmaster.jobs import report

place, cut_s = pathlib.Path(sys.argv[1]), float(sys.argv[2])
n, cut_at = 0, None
while not (place / "end").exists():
    n += 1
    print(n, flush=True)
    report.metrics(step=n, count=n)
    if cut_at is None and (place / "cut").exists():
        cut_at = time.monotonic()
    if cut_at is not None and time.monotonic() > cut_at + cut_s:
        (place / "over").touch()
    time.sleep(0.05)
print("told", n, flush=True)
"""
"""Runs until there is a file `end`; writes a file `over` a while after there is a file `cut`."""


@contextlib.contextmanager
def serving(directory: Path, engine: EngineUnderTest, **changes: object) -> Iterator[ClusterServer]:
    server = ClusterServer(directory / "data", quiet_port(), {engine.kind: engine}, changes=changes)
    try:
        yield server.start()
        server.end_all_jobs()
    finally:
        server.clean_up()


def test_job_that_somebody_removes_from_the_engine_says_so_and_is_tried_again(
    server: ClusterServer, engine: EngineUnderTest
) -> None:
    job_id = server.submit_source(TRAINS, "--save-every", 20, **AGAIN)
    wait_for(lambda: server.job(job_id)["checkpoints"], "a checkpoint")
    engine.remove(job_id)
    server.wait_for_event(job_id, "resumed")
    assert number_after(server, job_id, "begins at", attempt=2) > 0
    assert server.job(job_id)["attempts"][0]["reason"] == "ENGINE_CANCELLED"


def test_controller_that_is_killed_ends_no_job_or_is_the_reason_of_its_end(
    server: ClusterServer, engine: EngineUnderTest
) -> None:
    job_id = server.submit_source(TRAINS, "--save-every", 20, "--steps", 4000, **AGAIN)
    wait_for(lambda: server.job(job_id)["checkpoints"], "a checkpoint")
    engine.kill_controller()
    try:
        wait_for(lambda: "does not answer" in server.log_text(), "the server to miss the controller")
        assert server.job(job_id)["status"] in ("TRAINING", "CHECKPOINTING", "COMPLETED")
    finally:
        engine.start_controller()
    if engine.lost_with_controller:
        server.wait_for_event(job_id, "resumed")
        engine.start_node()
    job = server.until(job_id)
    assert job["status"] == "COMPLETED"
    reasons = [attempt["reason"] for attempt in job["attempts"]]
    assert reasons == (["NODE_LOST", "SUCCEEDED"] if engine.lost_with_controller else ["SUCCEEDED"])


def test_gang_whose_node_is_killed_is_lost_with_it_and_runs_again(
    server: ClusterServer, engine: EngineUnderTest
) -> None:
    job_id = server.submit("sh", "-c", "echo up on $NODE_RANK; exec sleep 600", **GANG, **AGAIN)
    wait_for(lambda: len(server.lines(job_id)) == 2, "both nodes")
    engine.kill_node()
    try:
        wait_for(lambda: server.job(job_id)["attempts"][0]["reason"], "the end of its attempt")
    finally:
        engine.start_node()
    wait_for(lambda: server.job(job_id)["attempt"] == 2, "its second attempt")
    wait_for(lambda: len(server.lines(job_id, attempt=2)) == 2, "both nodes of its second attempt")
    assert server.job(job_id)["attempts"][0]["reason"] == "NODE_LOST"


def test_nothing_is_lost_while_workers_cannot_reach_the_server_for_a_minute(
    engine: EngineUnderTest, tmp_path: Path
) -> None:
    port = quiet_port()
    link = CuttableLink(port, engine.address)
    with link.running():
        server = ClusterServer(tmp_path / "data", port, {engine.kind: engine}, changes={"server_url": link.url})
        try:
            server.start()
            job_id = server.submit_source(COUNTS, tmp_path, MINUTE_S)
            server.wait_for_line(job_id, "10")
            link.cut()
            (tmp_path / "cut").touch()
            wait_for((tmp_path / "over").exists, "a minute")
            assert server.job(job_id)["status"] == "TRAINING"
            link.mend()
            (tmp_path / "end").touch()
            job = server.until(job_id)
            assert (job["status"], len(job["attempts"])) == ("COMPLETED", 1)
            *numbers, told = server.lines(job_id)
            assert numbers == [str(n) for n in range(1, len(numbers) + 1)]
            assert told == f"told {len(numbers)}"
            (series,) = server.data("GET", f"/v1/jobs/{job_id}/metrics?limit=100000")["series"]
            assert [step for step, _, _ in series["points"]] == list(range(1, len(numbers) + 1))
            server.end_all_jobs()
        finally:
            server.clean_up()


def test_engine_that_is_slow_and_has_too_many_requests_starts_each_job_once(
    engine: EngineUnderTest, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    with engine.slow(tmp_path) as changes, serving(tmp_path, engine, **changes) as server:
        jobs = [server.submit("sh", "-c", f"echo $TRAINMASTER_JOB_ID >> {ledger}") for _ in range(5)]
        stopped = server.submit_source(TRAINS)
        wait_until_it_can_save(server, stopped)
        server.control(stopped, "cancel")
        for job_id in jobs:
            job = server.until(job_id)
            assert (job["status"], len(job["attempts"])) == ("COMPLETED", 1)
        assert server.until(stopped)["status"] == "CANCELLED"
        assert sorted(ledger.read_text().split()) == sorted(jobs)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", place], check=False)
    if mounted.returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        yield place
    finally:
        wait_for(lambda: subprocess.run(["umount", place], check=False).returncode == 0, "the end of its use")


def test_node_whose_disk_is_full_is_the_reason_and_works_again_when_it_is_not(
    engine: EngineUnderTest, tmp_path: Path, small_disk: Path
) -> None:
    with serving(tmp_path, engine, work_dir=str(small_disk)) as server:
        writes = "while head -c 1000000 /dev/zero >> big 2>/dev/null; do :; done; echo full; exit 1"
        job_id = server.submit("sh", "-c", writes)
        failed = server.until(job_id, "FAILED")
        assert failed["error_type"] == "DISK_FULL", failed["error"]
        wait_for(lambda: not any(small_disk.glob("*/attempts/*")), "its files to go")
        assert server.until(server.submit("true"))["status"] == "COMPLETED"
        # Its worker removes what it had after that.
        wait_for(lambda: not any(small_disk.glob("*/attempts/*")), "the files of that job to go")
        (small_disk / "filler").write_bytes(b"x" * free(small_disk))
        waits = server.submit("true", **AGAIN)
        reason = wait_for(lambda: server.job(waits)["attempts"] and server.job(waits)["attempts"][0]["reason"], "why")
        assert reason in ("DISK_FULL", "LAUNCH_REFUSED")
        (small_disk / "filler").unlink()
        assert server.until(server.submit("true"))["status"] == "COMPLETED"


def free(place: Path) -> int:
    return shutil.disk_usage(place).free
