"""Images that have nothing but the program of the job."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from backends_under_test import BackendUnderTest

from job_server import JobServer, json_lines
from kubernetes_launches import BARE
from kubernetes_under_test import KUBECONFIG

pytestmark = pytest.mark.skipif(
    bool(KUBECONFIG), reason="every pod of a real cluster gets the programs of this machine"
)
ON_KUBERNETES = pytest.mark.parametrize("backend", ["kubernetes"], indirect=True, scope="module")

LOOKS = """
echo said
echo "{\\"rank\\": $RANK, \\"size\\": $WORLD_SIZE, \\"colour\\": \\"$COLOUR\\"}"
[ -e /bin/sh ] && echo has a shell
echo kept > $TRAINMASTER_OUTPUT_DIR/made
"""


@pytest.fixture
def shell(tmp_path: Path) -> str:
    """A shell where images have no programs."""
    place = tmp_path / "own-shell"
    shutil.copy(Path("/bin/sh").resolve(), place)
    return str(place)


@ON_KUBERNETES
def test_command_runs_in_an_image_without_python_and_without_a_shell(
    backend: BackendUnderTest, server: JobServer, shell: str
) -> None:
    spec = {"image": BARE, "environment": {"COLOUR": "blue"}}
    two = {"resource_config": {"gpu_count": 0, "node_count": 2}}
    job_id = server.submit_workload("container", {"argv": [shell, "-c", LOOKS], **spec}, **two)
    assert server.until(job_id)["status"] == "COMPLETED", server.lines(job_id)
    told = sorted(json_lines(server.lines(job_id)), key=lambda each: int(each["rank"]))
    assert told == [{"rank": rank, "size": 2, "colour": "blue"} for rank in (0, 1)]
    assert sorted(set(server.lines(job_id)) - {line for line in server.lines(job_id) if line[0] == "{"}) == ["said"]
    assert server.artifact(job_id, "output/made") == b"kept\n"
    backend.wait_until_nothing_is_left(job_id)


@ON_KUBERNETES
def test_python_script_in_an_image_without_python_says_what_is_missing(server: JobServer) -> None:
    sha256 = server.upload_files(b"print('never')\n")
    workload = {"image": BARE, "path": "job.py", "files": [{"path": "job.py", "sha256": sha256}]}
    job = server.until(server.submit_workload("script", workload), "FAILED")
    assert job["error"]["error_type"] == "LAUNCH_REFUSED"
    assert "jobs that run Python need an image with" in job["error"]["error_message"]
