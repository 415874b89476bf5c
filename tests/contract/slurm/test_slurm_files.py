"""The ways of checkpoints and results from nodes of a real cluster to the server, as the cluster's option says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_servers import quiet_port
from real_server import wait_for
from saving_program import latest_checkpoint, number_after
from seaweed_server import SeaweedServer
from slurm_cluster import SlurmCluster
from slurm_servers import SlurmServer
from trainmaster.client import Client
from trainmaster.jobs.objects import open_place
from trainmaster.protocol.attempt_files import is_url

TRAINS = """
import json, os, sys
from trainmaster.jobs import report

step = 0
if path := report.resume_path():
    step = json.loads((path / "state.json").read_text())["step"]
print("begins at", step, flush=True)
(report.output_dir() / f"result-{step}.txt").write_text("done")
while step < 6:
    step += 1
    with report.checkpoint(step=step) as directory:
        (directory / "state.json").write_text(json.dumps({"step": step}))
    if step == 3 and os.environ["TRAINMASTER_ATTEMPT"] == "1":
        sys.exit(1)
"""


@pytest.fixture(params=[pytest.param("server", marks=pytest.mark.long), "shared", "object_root"])
def server(
    request: pytest.FixtureRequest, shared_cluster: SlurmCluster, tmp_path: Path, seaweed: SeaweedServer
) -> Iterator[SlurmServer]:
    """A server with a cluster whose checkpoints come by one of the ways."""
    started = SlurmServer(tmp_path / "data", shared_cluster, quiet_port())
    with open(started.directory / "config.toml", "a") as settings:
        settings.write(f'files = "{request.param}"\n')
    if request.param == "object_root":
        started.environment |= {**seaweed.environment, "TRAINMASTER_OBJECT_ROOT": seaweed.new_prefix()}
    with contextlib.ExitStack() as stack:
        stack.callback(started.clean_up)
        started.start()
        yield started
        started.end_all_jobs()


def test_a_job_saves_resumes_on_a_node_and_leaves_what_everybody_can_fetch_and_verify(
    server: SlurmServer, request: pytest.FixtureRequest
) -> None:
    way = request.node.callspec.params["server"]
    job_id = server.submit_source(TRAINS)
    wait_for(lambda: server.job(job_id)["status"] in ("FAILED", "COMPLETED"), "its end")
    failed = server.job(job_id)
    assert latest_checkpoint(failed)["step"] == 3
    child = server.control(job_id, "retry")["job_id"]
    server.until(child, "COMPLETED")
    assert number_after(server, child, "begins at") == 3
    assert server.artifact(job_id, "output/result-0.txt") == b"done"
    assert server.artifact(child, "output/result-3.txt") == b"done"
    with Client(server.url, api_key=server.key) as client:
        for each in (job_id, child):
            found = client.results.checkpoints(each)["checkpoints"]
            assert [one["step"] for one in found] == ([1, 2, 3] if each == job_id else [4, 5, 6])
            assert [client.results.verify_checkpoint(each, one["checkpoint_id"]) for one in found] == [[], [], []]
    saved_at = server.run_directory(job_id).request().checkpoint_dir if way != "object_root" else ""
    assert is_url(saved_at) == (way == "server")
    if way == "object_root":
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            store = open_place(server.environment["TRAINMASTER_OBJECT_ROOT"])
        keys = [each["path"] for each in store.listing(store.below(f"artifacts/{job_id}/checkpoints"))]
        assert len([key for key in keys if "/.data-" in key]) == 3
        assert server.ask("DELETE", f"/v1/jobs/{job_id}?purge=true").is_success
        wait_for(lambda: not store.listing(store.below(f"artifacts/{job_id}")), "the store to be empty")
