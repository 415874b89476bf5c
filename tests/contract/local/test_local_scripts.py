"""Scripts by a path on the server that it allows, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from local_servers import LocalServer

GREETS = b"""
import pathlib, sys
print("hello", *sys.argv[1:], pathlib.Path(__file__).name, pathlib.Path("data/names.txt").exists())
"""
TRAINING = {"training_type": "SFT", "base_model": {"model_id": "m"}}


def test_file_that_was_never_shipped_is_refused_at_once(server: LocalServer) -> None:
    files = [{"path": "train.py", "sha256": "0" * 64}]
    body = {"name": "n", "workload": {"kind": "script", "path": "train.py", "files": files}}
    answer = server.ask("POST", "/v1/jobs", body)
    assert answer.status_code == 422
    assert "/v1/blobs/" in answer.json()["error"]["details"][0]["message"]


def test_script_on_the_server_runs_by_its_path(server: LocalServer, scripts: Path) -> None:
    (scripts / "train.py").write_bytes(GREETS)
    (scripts / "train.sh").write_text("echo shell $1 $PWD\n")
    python = server.submit_python(scripts / "train.py", "there")
    shell = server.submit_python(scripts / "train.sh", "also", workload={"working_directory": str(scripts)})
    assert server.until(python)["status"] == "COMPLETED"
    assert server.lines(python) == ["hello there train.py False"]
    assert server.until(shell)["status"] == "COMPLETED"
    assert server.lines(shell) == [f"shell also {scripts}"]


def test_path_outside_the_data_roots_is_refused_at_admission(server: LocalServer) -> None:
    assert_refused(server, server.submit_python(Path("/etc/profile")), "/etc/profile")
    elsewhere = server.submit_workload("command", {"argv": ["true"], "working_directory": "/etc"})
    assert_refused(server, elsewhere, "/etc")


def test_link_out_of_the_data_roots_is_refused_at_admission(server: LocalServer, scripts: Path) -> None:
    (scripts / "link.py").symlink_to("/etc/profile")
    assert_refused(server, server.submit_python(scripts / "link.py"), "link.py")


def assert_refused(server: LocalServer, job_id: str, path: str) -> None:
    job = server.until(job_id, "FAILED")
    assert (job["error_type"], job["error"]["fault"], job["attempt"]) == ("ADMISSION", "user", 0)
    assert path in job["error_message"]
    assert "--data-root" in job["error_message"]
    assert "ship" in job["error_message"]


def test_script_that_is_not_there_is_refused_at_admission(server: LocalServer, scripts: Path) -> None:
    job = server.until(server.submit_python(scripts / "missing.py"), "FAILED")
    assert job["error_type"] == "ADMISSION"
    assert "missing.py" in job["error_message"]


CUSTOM = """
import json, os
from pathlib import Path

inputs, prepared = Path(os.environ["TRAINMASTER_INPUTS_DIR"]), Path(os.environ["TRAINMASTER_PREPARED_DIR"])
training = json.loads((inputs / "training.json").read_text())
[source] = json.loads((prepared / "prepared.json").read_text())["sources"]
print("custom", os.environ["LEARNING"], training["training_config"]["hyperparameters"]["rate"])
print(Path(source["files"][0]).read_text())
"""


def test_custom_framework_runs_its_script_with_data_and_configuration(server: LocalServer, scripts: Path) -> None:
    (scripts / "custom.py").write_text(CUSTOM)
    (scripts / "rows.jsonl").write_text('{"text": "hello"}')
    framework = {"type": "CUSTOM", "custom_script_path": str(scripts / "custom.py")}
    document: dict[str, Any] = {
        "name": "custom",
        "training_config": {
            **TRAINING,
            "framework": framework,
            "environment": {"LEARNING": "slow"},
            "hyperparameters": {"rate": 3},
        },
        "data_config": {"sources": [{"path": str(scripts / "rows.jsonl")}]},
        "resource_config": {"gpu_count": 0},
    }
    job_id = server.data("POST", "/v1/jobs", document)["job_id"]
    job = server.until(job_id)
    assert (job["status"], job["kind"]) == ("COMPLETED", "script")
    assert server.lines(job_id)[-2:] == ["custom slow 3", '{"text": "hello"}']


def test_training_on_data_that_is_not_there_fails_at_admission(server: LocalServer, scripts: Path) -> None:
    document: dict[str, Any] = {
        "name": "tune",
        "training_config": TRAINING,
        "data_config": {"sources": [{"path": str(scripts / "missing.jsonl")}]},
        "resource_config": {"gpu_count": 0},
    }
    job = server.until(server.data("POST", "/v1/jobs", document)["job_id"], "FAILED")
    assert job["error_type"] == "ADMISSION"
    assert f"data_config.sources[0].path: there is no {scripts / 'missing.jsonl'}" in job["error_message"]
