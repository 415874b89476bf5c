from __future__ import annotations

from pathlib import Path

from trainmaster.protocol.documents import read_document
from trainmaster.protocol.launch import Launch, LaunchStep
from trainmaster.protocol.request import AttemptRequest, NodeAssignment
from trainmaster.protocol.run_directory import OWNER, RunDirectory


def lay_out(root: Path, attempt: int) -> None:
    request = AttemptRequest(
        job_id="j",
        attempt=attempt,
        token=f"token {attempt}",
        rank_token=f"rank token {attempt}",
        launch=Launch(kind="command", steps=(LaunchStep(name="main", argv=("true",)),)),
        nodes=(NodeAssignment(node_id="n"),),
        checkpoint_dir="c",
        output_dir="o",
        owner_file="f",
    )
    RunDirectory(root / str(attempt)).create(request)


def test_newer_attempt_becomes_the_owner(tmp_path: Path) -> None:
    for attempt in (1, 2):
        lay_out(tmp_path, attempt)
        assert read_document(tmp_path / OWNER) == {"attempt": attempt, "token": f"rank token {attempt}"}


def test_older_attempt_that_is_laid_out_late_does_not_take_the_job_back(tmp_path: Path) -> None:
    lay_out(tmp_path, 2)
    lay_out(tmp_path, 1)
    assert read_document(tmp_path / OWNER) == {"attempt": 2, "token": "rank token 2"}
