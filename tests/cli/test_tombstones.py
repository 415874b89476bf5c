"""Commands about deleted jobs whose files are still there: ps --deleted, checkpoints, download, delete --purge."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_server import Server
from typer.testing import Result

from trainmaster.client import Client
from trainmaster.jobs import verify

Tm = Callable[..., Result]

SAVE = f"""
{sys.executable} - <<'PY'
from trainmaster.jobs import report
with report.checkpoint(step=7) as directory:
    (directory / "weights.bin").write_bytes(b"w" * 200_000)
(report.output_dir() / "notes.txt").write_text("notes")
PY
"""


def buried(client: Client, handle: str) -> str:
    """A job that saved, ended and was deleted; returns its id."""
    document = {
        "name": f"the {handle}",
        "handle": handle,
        "workload": {"kind": "command", "argv": ["sh", "-c", SAVE]},
        "resource_config": {"gpu_count": 0},
    }
    job_id = client.submit(document)["job_id"]
    list(client.follow_logs(job_id))
    job = client.get(job_id)
    assert job["status"] == "COMPLETED", job["error"]
    client.delete(job_id)
    return job_id


@pytest.fixture(scope="module")
def deleted(server: Server) -> list[str]:
    """Two deleted jobs that had the same handle, the older first, and one that had another."""
    with Client(server.url, server.api_key) as client:
        return [buried(client, handle) for handle in ("twin", "twin", "single")]


@pytest.mark.usefixtures("connected")
def test_ps_lists_deleted_jobs_that_have_files(tm: Tm, deleted: list[str]) -> None:
    older, newer, single = deleted
    shown = tm("ps", "--deleted")
    assert shown.exit_code == 0, shown.output
    head, *rows = shown.stdout.splitlines()
    assert head.split() == ["JOB", "HANDLE", "NAME", "STATUS", "DELETED", "SIZE"]
    assert [row.split()[:2] for row in rows] == [[single, "single"], [newer, "twin"], [older, "twin"]]
    assert all("KiB" in row for row in rows)
    found = json.loads(tm("ps", "--deleted", "--json").stdout)
    assert [each["job_id"] for each in found] == [single, newer, older]
    assert all(each["size_bytes"] >= 200_000 and each["deleted_at"] for each in found)
    assert tm("ps", "--deleted", "-q", "--limit", "1").stdout == f"{single}\n"
    assert tm("ps", "-a", "-q").stdout == ""
    for option in (["-a"], ["--watch"], ["--status", "FAILED"]):
        assert tm("ps", "--deleted", *option).exit_code == 2


@pytest.mark.usefixtures("connected")
def test_checkpoints_of_deleted_jobs_are_listed_and_verified(tm: Tm, deleted: list[str]) -> None:
    older, newer, single = deleted
    for name, job_id, told in (
        (single, single, f"{single} (single) was deleted at"),
        ("single", single, f"{single} (single) was deleted at"),
        (single.removeprefix("job-")[:-1], single, f"{single} (single) was deleted at"),
        (older, older, f"{older} (twin) was deleted at"),
        ("twin", newer, ", the last of 2 with this handle.\n`trainmaster ps --deleted` lists them all"),
    ):
        result = tm("checkpoints", name, "--json")
        assert result.exit_code == 0, result.output
        (checkpoint,) = json.loads(result.stdout)
        assert (checkpoint["step"], job_id in checkpoint["uri"]) == (7, True)
        assert told in result.stderr
    verified = tm("checkpoints", "verify", "single", "latest")
    assert (verified.exit_code, " ok" in verified.stdout) == (0, True), verified.output
    pinned = tm("checkpoints", "single", "--pin", checkpoint["checkpoint_id"])
    assert pinned.exit_code == 1


@pytest.mark.usefixtures("connected")
def test_files_of_deleted_jobs_are_downloaded(tm: Tm, deleted: list[str], tmp_path: Path) -> None:
    by_id, by_handle, output = tmp_path / "id", tmp_path / "handle", tmp_path / "output"
    checkpoint = json.loads(tm("checkpoints", deleted[0], "--json").stdout)[0]["checkpoint_id"]
    result = tm("download", deleted[0], "--checkpoint", checkpoint, "-o", str(by_id))
    assert result.exit_code == 0, result.output
    assert verify(by_id).step == 7
    assert tm("download", "single", "--checkpoint", "latest", "-o", str(by_handle)).exit_code == 0
    assert (by_handle / "weights.bin").read_bytes() == b"w" * 200_000
    assert tm("download", "single", "-o", str(output)).exit_code == 0
    assert (output / "notes.txt").read_text() == "notes"


@pytest.mark.usefixtures("connected")
def test_purge_takes_the_last_deleted_and_a_living_job_first(tm: Tm, client: Client, deleted: list[str]) -> None:
    older, newer, single = deleted
    command = {"kind": "command", "argv": ["sleep", "600"]}
    living = client.submit(
        {"name": "living", "handle": "twin", "workload": command, "resource_config": {"gpu_count": 0}}
    )["job_id"]
    assert tm("checkpoints", "twin", "--json").stdout == "[]\n"
    client.cancel(living)
    list(client.follow_events(living))
    result = tm("delete", "--purge", "--yes", "twin")
    assert (result.exit_code, "was deleted" in result.stderr) == (0, False), result.output
    assert tm("ps", "--deleted", "-q").stdout.split() == [single, newer, older]

    result = tm("delete", "--purge", "--yes", "twin", "nobody", "single")
    assert result.exit_code == 1
    assert f"{newer} (twin) was deleted at" in result.stderr
    assert "the last of 2 with this handle" in result.stderr
    assert "there is no job nobody" in result.stderr
    assert result.stdout.count("is deleted, with its checkpoints") == 2
    assert tm("ps", "--deleted", "-q").stdout == f"{older}\n"  # the others go from all lists at once
    again = tm("delete", "--purge", "--yes", newer)
    assert (again.exit_code, f"there is no job {newer}" in again.stderr) == (1, True)
    plain = tm("delete", "--yes", older)
    assert (plain.exit_code, "`trainmaster ps --deleted`" in plain.stderr) == (1, True)
    assert tm("delete", "--purge", "--yes", older).exit_code == 0
    assert tm("ps", "--deleted").stdout == "No deleted job has left files.\n"
