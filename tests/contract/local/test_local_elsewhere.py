"""Jobs that share no files with the server at all: what they save and leave arrives, whatever dies on the way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from local_servers import LocalServer
from process_signals import kill_claimant
from saving_program import TRAINS, latest_checkpoint, number_after
from trainmaster.jobs.roots import LocalRoot
from trainmaster.server.failpoints import ELSEWHERE_VARIABLE

LEAVES = """
import os, sys, time
from pathlib import Path
out = Path(os.environ["TRAINMASTER_OUTPUT_DIR"])
(out / "deep" / "er").mkdir(parents=True)
(out / "deep" / "er" / "ü %41.bin").write_bytes(bytes(range(256)) * 20_000)
(out / "empty").touch()
(out / "link").symlink_to("empty")
(out / "outside").symlink_to("/etc/hostname")
(out / "of-all").write_text(os.environ["NODE_RANK"])
(out / ("node-" + os.environ["NODE_RANK"])).touch()
os.mkfifo(out / "pipe")
print("left", flush=True)
while "wait" in sys.argv:
    time.sleep(0.05)
"""
NAMES = ["deep/er/ü %41.bin", "empty", "link", "node-0", "of-all"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("elsewhere") / "data"
    server = LocalServer(directory, "http", **{ELSEWHERE_VARIABLE: "1"})
    try:
        server.start()
        yield server
        server.end_all_jobs()
    finally:
        server.clean_up()


def left_by(server: LocalServer, job_id: str) -> dict[str, bytes]:
    listed = server.data("GET", f"/v1/jobs/{job_id}/artifacts?kind=output&page_size=100")["artifacts"]
    return {each["path"].removeprefix("output/"): server.artifact(job_id, quote(each["path"])) for each in listed}


def test_results_arrive_as_on_one_machine(server: LocalServer) -> None:
    job_id = server.submit_source(LEAVES)
    assert server.until(job_id)["status"] == "COMPLETED"
    left = left_by(server, job_id)
    assert sorted(left) == sorted(NAMES)
    assert left["deep/er/ü %41.bin"] == bytes(range(256)) * 20_000
    assert (left["empty"], left["link"]) == (b"", b"")


def test_results_of_a_job_that_is_cancelled_arrive(server: LocalServer) -> None:
    job_id = server.submit_source(LEAVES, "wait")
    server.wait_for_line(job_id, "left")
    server.control(job_id, "cancel")
    assert server.until(job_id)["status"] == "CANCELLED"
    assert sorted(left_by(server, job_id)) == sorted(NAMES)


def test_results_of_a_courier_that_was_killed_are_delivered_by_the_next(server: LocalServer) -> None:
    job_id = server.submit_source(LEAVES, "wait")
    server.wait_for_line(job_id, "left")
    kill_claimant(server.run_directory(job_id).claimant(0))
    assert server.until(job_id)["error_type"] == "WORKER_LOST"
    assert sorted(left_by(server, job_id)) == sorted(NAMES)


def test_results_of_several_nodes_come_together(server: LocalServer) -> None:
    job_id = server.submit_source(LEAVES, resource_config={"gpu_count": 0, "node_count": 2})
    assert server.until(job_id)["status"] == "COMPLETED"
    left = left_by(server, job_id)
    assert sorted(left) == sorted([*NAMES, "node-1"])
    assert left["of-all"] == b"1"


@pytest.mark.parametrize("point", ["file.before_finish:1", "file.before_commit:2", "file.after_commit:1"])
def test_server_that_is_killed_in_the_middle_of_a_save_costs_only_time(
    point: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = LocalServer(tmp_path_factory.mktemp("killed") / "data", "http", **{ELSEWHERE_VARIABLE: "1"})
    try:
        server.start(TRAINMASTER_FAILPOINT=point)
        job_id = server.submit_source(TRAINS, "--save-every", 20, "--steps", 60)
        assert server.wait() == -signal.SIGKILL
        server.start()
        job = server.until(job_id)
        assert (job["status"], job["attempt"]) == ("COMPLETED", 1)
        assert [each["step"] for each in job["checkpoints"]] == [20, 40, 60]
        home = LocalRoot(server.directory / "artifacts" / job_id / "checkpoints")
        assert home.committed() == ["checkpoint-20", "checkpoint-40", "checkpoint-60"]
        assert [home.verify(name).step for name in home.committed()] == [20, 40, 60]
        server.end_all_jobs()
    finally:
        server.clean_up()


def test_checkpoints_are_resumed_from_whichever_way_they_came(tmp_path: Path) -> None:
    # Its workers see the server's artifacts; the variable alone decides whether they may use them.
    server = LocalServer(tmp_path / "data", "http")
    saved: list[str] = []
    try:
        for number, elsewhere in enumerate((True, False, True)):
            server.start(**({ELSEWHERE_VARIABLE: "1"} if elsewhere else {}))
            workload = {"resume_from_checkpoint": saved[-1]} if saved else {}
            job_id = server.submit_source(TRAINS, "--save-every", 20, "--steps", 20 * (number + 1), workload=workload)
            job = server.until(job_id)
            assert job["status"] == "COMPLETED", job["error"]
            assert number_after(server, job_id, "begins at") == 20 * number
            saved.append(latest_checkpoint(job)["checkpoint_id"])
            files = server.data("GET", f"/v1/jobs/{job_id}/artifacts?kind=checkpoint")["artifacts"]
            digests = {each["path"].rpartition("/")[2]: each["sha256"] for each in files}
            assert digests.keys() == {"state.json", "manifest.json"}
            assert digests["state.json"]
            server.stop()
        server.start()
        server.end_all_jobs()
    finally:
        server.clean_up()
