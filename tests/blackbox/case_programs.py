"""The program of the cases, started with one client in the environment of that client."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import input_cases
import job_cases
import type_cases

from patience import PATIENCE_S
from process_signals import kill_all_marked
from wheel_index import WheelIndex

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "run_cases.py"
CASES = [case.__name__ for case in (*type_cases.CASES, *input_cases.CASES, *job_cases.CASES)]
TORCHRUN = """\
import runpy
import sys


def main():
    runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""kubeflow starts functions with the `torchrun` of the torch that it installs; this torch is nothing else."""


def kubeflow_python() -> Path:
    """The interpreter that has the real kubeflow package."""
    python = ROOT / ".venvs" / "kubeflow" / "bin" / "python"
    assert python.exists(), f"{python} is missing: run `make setup-dev`"
    return python


def make_index(directory: Path) -> WheelIndex:
    """What jobs install, where there is no network."""
    index = WheelIndex(directory)
    index.add("torch", "99", TORCHRUN, scripts={"torchrun": "torch:main"})
    index.add("greeting", "9.0")
    return index


class Run:
    """The program, with a package and where its jobs run."""

    def __init__(
        self, python: Path, package: str, place: str, directory: Path, index: WheelIndex, **environment: str
    ) -> None:
        directory.mkdir()
        self.directory = directory
        self._log = (directory / "log").open("w+")
        self._process = subprocess.Popen(
            [python, PROGRAM, package, place, directory, index.url],
            cwd=directory,
            env={"PATH": os.environ["PATH"], "HOME": str(directory), **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def outcomes(self) -> dict[str, str]:
        """What every case came to."""
        code = self._process.wait(PATIENCE_S)
        self._log.seek(0)
        assert code == 0, self._log.read()
        written = (self.directory / "outcomes.jsonl").read_text().splitlines()
        said: list[dict[str, Any]] = [json.loads(line) for line in written]
        return {each["case"]: each["outcome"] for each in said}

    def close(self) -> None:
        """End the program, and what kubeflow left running of jobs that were deleted."""
        self._process.kill()
        self._process.wait()
        kill_all_marked(f"HOME={self.directory}")
        self._log.close()
