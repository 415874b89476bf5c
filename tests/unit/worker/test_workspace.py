"""Where ranks find what was fetched, on machines where it can be put there and on others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainmaster.protocol.function_runner import placed
from trainmaster.worker import staging
from trainmaster.worker.staging import Workspace, make_workspace

PREPARED = {"DATASET_PATH": "dataset"}

PROGRAM = """
import json, os, sys
from pathlib import Path
from trainmaster.worker import staging

staging.WORKSPACE = sys.argv[1]
places = {"dataset": sys.argv[3]}
made = staging.make_workspace(Path(sys.argv[2]), {"DATASET_PATH": "dataset"}, places, None)
inside = f"{sys.argv[1]}/dataset"
print(json.dumps({
    "why_not": made.why_not,
    "placed": made.place(f"{inside}/a"),
    "files": os.listdir(inside) if os.path.isdir(inside) else None,
}))
"""


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    (tmp_path / "home" / "prepared" / "dataset").mkdir(parents=True)
    (tmp_path / "home" / "prepared" / "dataset" / "rows").touch()
    return tmp_path / "home"


def made_in_a_process(at: Path, home: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(at), str(home), str(home / "prepared" / "dataset")],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_workspace_is_there_for_the_job_alone_or_words_are_changed(tmp_path: Path, fetched: Path) -> None:
    at = tmp_path / "workspace"
    found = made_in_a_process(at, fetched)
    if found["why_not"]:
        assert found["placed"] == f"{fetched}/prepared/dataset/a"
    else:
        assert (found["files"], found["placed"]) == (["rows"], f"{at}/dataset/a")
        assert os.listdir(at) == []


def test_workspace_of_the_machine_is_left_alone(tmp_path: Path, fetched: Path) -> None:
    at = tmp_path / "workspace"
    (at / "mine").mkdir(parents=True)
    found = made_in_a_process(at, fetched)
    assert found["why_not"]
    assert found["placed"] == f"{fetched}/prepared/dataset/a"
    (at / "dataset").mkdir()
    assert made_in_a_process(at, fetched)["placed"] == f"{at}/dataset/a"


def test_workspace_that_is_mounted_already_is_taken(
    tmp_path: Path, fetched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "WORKSPACE", str(fetched / "prepared"))
    assert make_workspace(fetched, PREPARED, {"dataset": str(fetched / "prepared/dataset")}, None) == Workspace()


def test_program_that_looked_in_vain_is_told_where_to_look() -> None:
    nowhere = Workspace(directories={"dataset": "/run/dataset"}, variables={"dataset": "DATASET_PATH"}, why_not="no")
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/workspace/dataset/a.json'"
    assert nowhere.advice(error) == "/workspace/dataset is not there (no); read os.environ['DATASET_PATH'] instead"
    assert nowhere.advice("FileNotFoundError: '/data'") is None
    assert [nowhere.place(word) for word in ("/workspace/dataset", "/workspace/datasets", "x")] == [
        "/run/dataset",
        "/workspace/datasets",
        "x",
    ]


def test_arguments_of_a_function_name_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = str(tmp_path / "workspace" / "dataset")
    monkeypatch.setattr("trainmaster.protocol.function_runner.WORKSPACE_PATHS", ((named, "DATASET_PATH"),))
    monkeypatch.setenv("DATASET_PATH", "/run/dataset")
    given = {"path": f"{named}/a", "others": [named, 3, f"{named}s"]}
    assert placed(given) == {"path": "/run/dataset/a", "others": ["/run/dataset", 3, f"{named}s"]}
    os.makedirs(named)
    assert placed(given) == given
