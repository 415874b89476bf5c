from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trainmaster.protocol import environment
from trainmaster.protocol.documents import read_lines, write_document
from trainmaster.protocol.request import Control


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What a worker sets up for a rank, without the worker."""

    directory: Path
    environ: dict[str, str]

    def events(self) -> list[dict[str, Any]]:
        return self._records(environment.EVENTS_FILE)

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["type"] == kind]

    def metrics(self) -> list[dict[str, Any]]:
        return self._records(environment.METRICS_FILE)

    def control(self, control: Control) -> None:
        write_document(Path(self.environ[environment.CONTROL_FILE]), control.to_json())

    def own(self, token: str) -> None:
        write_document(Path(self.environ[environment.OWNER_FILE]), {"attempt": 2, "token": token})

    def start(self, code: str, **options: Any) -> subprocess.Popen[str]:
        """Run Python code as the rank would run it."""
        environ = {**os.environ, **self.environ}
        return subprocess.Popen([sys.executable, "-c", code], env=environ, text=True, **options)

    def _records(self, variable: str) -> list[dict[str, Any]]:
        path = Path(self.environ[variable])
        return read_lines(path.read_bytes())[0] if path.exists() else []


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    (tmp_path / "token").write_text("ours")
    environ = {
        environment.JOB_ID: "job-1",
        environment.ATTEMPT: "2",
        environment.ATTEMPT_ID: "job-1.2",
        environment.EVENTS_FILE: str(tmp_path / "events.jsonl"),
        environment.METRICS_FILE: str(tmp_path / "metrics.jsonl"),
        environment.CONTROL_FILE: str(tmp_path / "control.json"),
        environment.OWNER_FILE: str(tmp_path / "owner.json"),
        environment.TOKEN_FILE: str(tmp_path / "token"),
        environment.CHECKPOINT_DIR: str(tmp_path / "checkpoints"),
        environment.OUTPUT_DIR: str(tmp_path / "output"),
        "RANK": "3",
        "WORLD_SIZE": "4",
    }
    rank = Rank(directory=tmp_path, environ=environ)
    rank.own("ours")
    return rank
