"""Reading what ranks wrote: they may write anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.coordinator.launching import attempt_request, run_directory
from trainmaster.coordinator.watch import look
from trainmaster.core.job import Job, Progress
from trainmaster.core.observations import admit, place
from trainmaster.core.resources import Share
from trainmaster.core.sight import Liveness
from trainmaster.core.spec import parse_submit
from trainmaster.core.submission import submit
from trainmaster.protocol.rundir import RunDirectory, metrics_stream
from trainmaster.storage import ARTIFACTS, BLOBS, RUNS, Roots


def placed_job() -> Job:
    request = parse_submit(
        {"name": "j", "workload": {"kind": "command", "argv": ["x"]}, "resource_config": {"gpu_count": 0}}
    )
    change = submit(request, account_id="a", job_id="j", created_by="t", now=1.0, default_backend="local")
    admitted = admit(change.job, now=1.0)
    assert admitted is not None
    placed = place(admitted.job, now=1.0, shares=[Share(node_id="n")], token="t")
    assert placed is not None
    return placed.job


@pytest.fixture
def job() -> Job:
    return placed_job()


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots({RUNS: tmp_path / "runs", ARTIFACTS: tmp_path / "artifacts", BLOBS: tmp_path / "blobs"})


@pytest.fixture
def directory(job: Job, roots: Roots) -> RunDirectory:
    laid_out = run_directory(roots, job.job_id, job.live.number)
    laid_out.create(attempt_request(job, nodes={}, roots=roots, resume=None, hint_socket=None, server_url=None))
    return laid_out


def progress_after(lines: bytes, job: Job, directory: RunDirectory, roots: Roots) -> Progress | None:
    directory.append(metrics_stream(0, 0), 0, lines)
    return look(job, directory, [Liveness.ALIVE], ranks_per_node=1, roots=roots).progress


def test_report_without_a_time_counts_as_progress(job: Job, directory: RunDirectory, roots: Roots) -> None:
    progress = progress_after(b'{"step": 3, "values": {"loss": 0.5}}\n', job, directory, roots)
    assert progress is not None
    assert (progress.step, progress.metrics, progress.step_at) == (3, {"loss": 0.5}, None)


@pytest.mark.parametrize(
    "malformed",
    [b'{"t": 1, "step": "x"}', b'{"t": [], "step": 1e999}', b'{"t": 1, "values": 3}', b"[]", b"nonsense", b"\xff"],
)
def test_malformed_report_does_not_hide_the_next(
    malformed: bytes, job: Job, directory: RunDirectory, roots: Roots
) -> None:
    progress = progress_after(malformed + b'\n{"t": 5.0, "step": 2, "values": {}}\n', job, directory, roots)
    assert progress is not None
    assert (progress.step, progress.step_at) == (2, 5.0)
