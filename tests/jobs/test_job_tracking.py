"""Mirroring metrics to an experiment tracker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainmaster.jobs.tracker import Mirror, TrackerMissingError, TrackerRun, tracker_for

TRACKED = """
import os
import sys
from pathlib import Path
from trainmaster.jobs.tracker import tracker_for

directory, run_id, first = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
tracker = tracker_for(os.environ.get("TRACKER", "trackio"), directory=Path(directory), group="team")
run_id = tracker.start("walk", "project", {"lr": 0.1, "_own": 1}, run_id)
for step in range(first, first + 2):
    tracker.log({"loss": 1 / step}, step)
tracker.finish()
print(run_id)
"""
READ = """
import json
from trackio.sqlite_storage import SQLiteStorage
found = {run: SQLiteStorage.get_logs("project", run) for run in SQLiteStorage.get_runs("project")}
print(json.dumps({run: [[row["step"], row["loss"]] for row in rows] for run, rows in found.items()}))
"""


def python(code: str, directory: Path, *arguments: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRACKIO_", "WANDB_"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**inherited, "HF_HUB_OFFLINE": "1", "HOME": str(directory), **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def test_trackio_run_is_joined_again_and_not_doubled(tmp_path: Path) -> None:
    run_id = python(TRACKED, tmp_path, str(tmp_path / "mirror"), "", "1").strip()
    assert run_id.startswith("walk-")
    assert python(TRACKED, tmp_path, str(tmp_path / "mirror"), run_id, "3").strip() == run_id
    seen = json.loads(python(READ, tmp_path, TRACKIO_DIR=str(tmp_path / "mirror")).splitlines()[-1])
    assert seen == {run_id: [[1, 1.0], [2, 0.5], [3, pytest.approx(1 / 3)], [4, 0.25]]}


def test_directory_of_the_environment_wins(tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    python(TRACKED, tmp_path, str(tmp_path / "mirror"), "", "1", TRACKIO_DIR=str(chosen))
    assert list(chosen.iterdir())
    assert not (tmp_path / "mirror").exists()


def test_no_tracker_keeps_the_run_that_is_known() -> None:
    tracker = tracker_for("none")
    assert tracker.start("a", "b", {}, "run-1") == "run-1"
    tracker.log({"loss": 1.0}, 1)
    tracker.finish()


def test_unknown_tracker_is_refused() -> None:
    with pytest.raises(ValueError, match="there are: none, trackio, wandb"):
        tracker_for("mlflow")


@pytest.mark.parametrize("kind", ["trackio", "wandb"])
def test_tracker_whose_package_is_missing_says_how_to_get_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TrackerMissingError, match=rf"pip install 'trainmaster\[{kind}\]'"):
        tracker_for(kind)


def test_wandb_run_is_kept_offline_without_credentials_and_joined_again(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra `wandb`, which `make setup-dev` installs")
    mirror = tmp_path / "mirror"
    run_id = python(TRACKED, tmp_path, str(mirror), "", "1", TRACKER="wandb").strip()
    assert python(TRACKED, tmp_path, str(mirror), run_id, "3", TRACKER="wandb", WANDB_MODE="offline").strip() == run_id
    first, second = sorted(mirror.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert first.name == second.name == f"run-{run_id}.wandb"
    for path, losses in ((first, (b"1.0", b"0.5")), (second, (b"0.3333", b"0.25"))):
        written = path.read_bytes()  # what `wandb sync` uploads: its strings are readable
        assert all(text in written for text in (run_id.encode(), b"project", b"team", b"walk", b"loss", *losses))


class Broken:
    """A tracker that fails at one point, and counts what it is asked."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at
        self.asked: list[str] = []

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what == self.fails_at:
            raise OSError("no room")

    def start(self, name: str, project: str, config: Mapping[str, Any], run_id: str | None) -> TrackerRun:
        self._ask("start")
        return TrackerRun("new", self.log, self.finish)

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        self._ask("log")

    def finish(self) -> None:
        self._ask("finish")


@pytest.mark.parametrize(
    ("fails_at", "asked"),
    [("start", ["start"]), ("log", ["start", "log"]), ("finish", ["start", "log", "log", "finish"])],
)
def test_tracker_that_fails_is_left_alone(fails_at: str, asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    broken = Broken(fails_at)
    mirror = Mirror(broken.start)
    assert mirror.start("a", "b", {}, "old") == ("old" if fails_at == "start" else "new")
    mirror.log({"loss": 1.0}, 1)
    mirror.log({"loss": 1.0}, 2)
    mirror.finish()
    mirror.finish()
    assert broken.asked == asked
    assert capsys.readouterr().err.count("is disabled from now on: OSError('no room')") == 1
