"""What each transport shares between server and worker, and what it must not need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from job_server import json_lines
from local_servers import LocalServer, over

LISTS = """
import json, os, sys, time
seen = {path: sorted(os.listdir(path)) for path in sys.argv[1:]}
print(json.dumps({"cwd": os.getcwd(), "seen": seen, "names": sorted(os.environ)}), flush=True)
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.02)
print("done")
"""


@over("http")
def test_over_http_neither_side_can_read_the_other_ones_files(server: LocalServer, scripts: Path) -> None:
    if not server.is_sealed:
        pytest.skip("this machine does not allow mount namespaces")
    go = scripts / "go"
    (scripts / "lists.py").write_text(LISTS)
    hidden = [str(server.directory / name) for name in ("runs", "blobs")]
    shipped = server.upload_files(b"shipped")
    workload = {"environment": {"GO": str(go)}, "files": [{"path": "inner/file.txt", "sha256": shipped}]}
    job_id = server.submit_python(scripts / "lists.py", *hidden, ".", "inner", workload=workload)
    server.wait_for_line(job_id, "seen")
    (told,) = json_lines(server.lines(job_id))
    # The worker has what was shipped, and sees nothing of the server's.
    assert told["seen"] == {hidden[0]: [], hidden[1]: [], ".": ["inner"], "inner": ["file.txt"]}
    assert "TRAINMASTER_OWNER_URL" in told["names"]
    assert "TRAINMASTER_OWNER_FILE" not in told["names"]
    # The server has the job's log, and sees nothing of the worker's.
    assert Path(told["cwd"]).is_relative_to(server.directory / "spool")
    assert os.listdir(server.directory / "spool") == []
    assert not (server.run_directory(job_id).path / "work").exists()
    go.touch()
    assert server.until(job_id)["status"] == "COMPLETED"
    assert server.lines(job_id)[-1] == "done"


@over("files")
def test_over_files_the_worker_works_in_the_server_s_run_directory(server: LocalServer) -> None:
    job_id = server.submit("sh", "-c", "pwd; echo left > behind; test -f $TRAINMASTER_OWNER_FILE")
    assert server.until(job_id)["status"] == "COMPLETED"
    work = server.run_directory(job_id).path / "work"
    assert server.lines(job_id) == [str(work)]
    assert (work / "behind").read_text() == "left\n"


@over("http")
def test_spool_is_empty_when_all_is_delivered(server: LocalServer) -> None:
    job_id = server.submit("sh", "-c", "echo delivered")
    server.until(job_id)
    assert server.lines(job_id) == ["delivered"]
    server.end_all_jobs()
    # Seen by a job, because the spool is in the workers' namespace: its own attempt is all there is.
    second = server.submit("sh", "-c", 'ls "$1"', "sh", str(server.directory / "spool"))
    server.until(second)
    assert server.lines(second) == [f"{second}.1.0"]
