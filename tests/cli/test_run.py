"""`trainmaster run`: a job class in the foreground, without a server."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_server import wait_for
from typer.testing import Result

from patience import PATIENCE_S
from trainmaster.client import Client

JOB = """
import time
from dataclasses import dataclass

import numpy as np

from trainmaster.jobs import RestoreableJob


@dataclass(frozen=True, kw_only=True)
class CountConfig:
    steps: int = 4
    pause_s: float = 0.0
    start: float = 0.0


class Count(RestoreableJob[CountConfig]):
    def __init__(self, spec, config=None):
        super().__init__(spec, config)
        self.step, self.total = 0, np.full((), self.config.start)

    @property
    def done(self):
        return self.step >= self.config.steps

    def run(self):
        while not self.done:
            self.step += 1
            self.total = self.total + self.step
            self.log({"total": self.total}, step=self.step, total_steps=self.config.steps)
            time.sleep(self.config.pause_s)
            if self.checkpoint_due(self.step) or self.done:
                self.save_tree_and_metadata(str(self.step), {"total": self.total}, {"step": self.step})
                self.register(str(self.step))
            self.exit_if_stopped()
        print("total", float(self.total))

    def restore_from_path(self, rel_path):
        tree, metadata = self.get_tree_and_metadata_from_path(rel_path, {"total": self.total})
        self.total = tree["total"]
        if self.is_own(rel_path):
            self.step = metadata["step"]
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a module of its own name in it, in which commands are run."""
    path = list(sys.path)
    (tmp_path / f"counting_{tmp_path.name}.py".replace("-", "_")).write_text(JOB)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path


@pytest.fixture
def target(place: Path) -> str:
    return f"counting_{place.name}:Count".replace("-", "_")


def test_run_prints_configuration_and_progress_and_leaves_checkpoints(
    tm: Callable[..., Result], place: Path, target: str
) -> None:
    (place / "cfg.yaml").write_text("start: 1e1\n")
    result = tm("run", target, "--config", "cfg.yaml", "steps=3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "# general/default/Count"
    assert yaml.safe_load("\n".join(lines[1:4])) == {"steps": 3, "pause_s": 0.0, "start": 10.0}
    assert lines[4] == "step 1/3  total 11"
    assert lines[-1] == "total 16.0"
    assert "Complete; its files lie below runs." in result.stderr
    assert (place / "runs/checkpoints/general/default/Count/3/manifest.json").is_file()


def test_finished_run_ends_at_once(tm: Callable[..., Result], target: str) -> None:
    assert tm("run", target).exit_code == 0
    again = tm("run", target)
    assert again.exit_code == 0
    assert "total" not in again.stdout.replace("total_steps", "")
    assert "general/default/Count is complete already" in again.stderr


def test_changed_configuration_is_refused_or_overlaid(tm: Callable[..., Result], target: str) -> None:
    options = ("--name", "mine", "--project", "p", "--group", "g", "--root", "elsewhere")
    assert tm("run", target, *options).exit_code == 0
    refused = tm("run", target, "steps=6", *options)
    assert refused.exit_code == 1
    assert "p/g/mine/4 (step 4) has another configuration" in refused.stderr
    assert "steps: 4 -> 6" in refused.stderr
    overlaid = tm("run", target, "steps=6", "--overlay", *options)
    assert overlaid.exit_code == 0
    assert overlaid.stdout.splitlines()[-1] == "total 21.0"


def test_restore_begins_from_another_run(tm: Callable[..., Result], target: str) -> None:
    assert tm("run", target).exit_code == 0
    branch = tm("run", target, "--name", "branch", "--restore", "general/default/Count/4", "steps=1")
    assert branch.exit_code == 0
    assert branch.stdout.splitlines()[-1] == "total 11.0"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("stepz=1",), 1, "stepz: unknown key; did you mean 'steps'?"),
        (("--config", "nowhere.yaml"), 2, "cannot read nowhere.yaml: No such file or directory"),
        (("--tracker", "paper"), 2, "--tracker paper: there are none, trackio"),
        (("--name", "a/b"), 1, "name 'a/b'"),
        (("--root", "gs://bucket/x"), 1, "checkpoints are stored in a directory or below s3://bucket/prefix"),
        (("--restore", "general/default/x/1"), 1, "there is no checkpoint general/default/x/1"),
    ],
)
def test_wrong_use_is_told_in_a_line(
    tm: Callable[..., Result], target: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    result = tm("run", target, *arguments)
    assert (result.exit_code, said in result.stderr) == (code, True), result.output
    assert "Traceback" not in result.output


def test_unknown_class_is_told_with_the_nearest(tm: Callable[..., Result], target: str) -> None:
    result = tm("run", target.replace("Count", "Cont"))
    assert result.exit_code == 1
    assert "did you mean 'Count'?" in result.stderr


def test_error_of_the_class_is_shown_from_where_it_begins(tm: Callable[..., Result], target: str) -> None:
    result = tm("run", target, "pause_s=-1")
    assert result.exit_code == 1
    assert "ValueError: sleep length must be non-negative" in result.stderr
    assert "typer" not in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_signal_saves_and_the_next_run_goes_on(place: Path, target: str, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "trainmaster", "run", target, "steps=40", "pause_s=0.05"]
    with (place / "out").open("w") as out:
        first = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=place)
    try:
        wait_for(lambda: "step 1/40" in (place / "out").read_text())
        first.send_signal(number)
        _, said = first.communicate(timeout=PATIENCE_S)
    finally:
        first.kill()
    assert first.returncode == 85, said
    assert f"trainmaster: {number.name}: saving and stopping after this step" in said
    assert "Saved; the same command continues from there." in said
    saved = [path.name for path in (place / "runs/checkpoints/general/default/Count").iterdir() if path.is_dir()]
    assert len(saved) == 1
    second = subprocess.run(command, capture_output=True, text=True, cwd=place, check=True, env={**os.environ})
    assert f"continues from general/default/Count/{saved[0]} (step {saved[0]})" in second.stderr
    assert second.stdout.splitlines()[-1] == "total 820.0"


def test_example_of_the_docs_does_what_they_say(
    tm: Callable[..., Result], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "job-classes.md").read_text()
    module, outside, imports = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (commands,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    (place / "fit.py").write_text(module)
    try:
        for line in commands.splitlines():
            result = tm(*shlex.split(line, comments=True)[1:])
            assert result.exit_code == 0, result.output
        assert (place / "runs/results/general/default/Fit/line.txt").read_text() == "y = 3.00 x + 1.00\n"
        exec(f"from fit import Fit\n{outside}", {})
        exec(imports, {})
        assert (place / "runs/checkpoints/general/default/notebook/steps/50").is_dir()
    finally:
        sys.modules.pop("fit", None)


def test_submit_sends_the_module_along_and_restore_names_another_runs_checkpoint(
    tm: Callable[..., Result],
    place: Path,
    target: str,
    connected: object,
    status: Callable[..., Any],
    client: Client,
) -> None:
    document = {
        "name": f"first {place.name}",
        "workload": {"kind": "job_class", "target": target, "config": {"steps": 3}},
        "resource_config": {"gpu_count": 0},
    }
    (place / "job.json").write_text(json.dumps(document))
    first = tm("submit", "job.json")
    assert first.exit_code == 0, first.output
    status(first.stdout.split()[0], "COMPLETED")
    assert f"{target} steps=3" in tm("show", first.stdout.split()[0]).stdout
    rel_path = f"general/default/first {place.name}/3"
    second = tm("submit", "job.json", "--name", "second", "--restore", rel_path)
    assert second.exit_code == 0, second.output
    job_id = second.stdout.split()[0]
    status(job_id, "COMPLETED")
    lines = [line["message"] for line in client.logs(job_id)["lines"]]
    assert "total 12.0" in lines


def test_restore_of_another_kind_of_job_is_refused(tm: Callable[..., Result], place: Path, connected: object) -> None:
    (place / "job.json").write_text(json.dumps({"name": "x", "workload": {"kind": "command", "argv": ["true"]}}))
    refused = tm("submit", "job.json", "--restore", "a/b/c/d")
    assert refused.exit_code == 2
    assert "--restore is for jobs with a workload of kind job_class" in refused.stderr


def test_job_file_in_place_of_a_class_leads_to_submit(tm: Callable[..., Result]) -> None:
    refused = tm("run", "my job.yaml")
    assert refused.exit_code == 2
    assert "`trainmaster submit 'my job.yaml' --follow` runs a job file" in refused.stderr
