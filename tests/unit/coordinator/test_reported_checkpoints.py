"""Where a rank may say that a checkpoint lies, for each kind of job."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trainmaster.backends.base import endpoint_on_node
from trainmaster.protocol.run_directory import events_stream
from trainmaster.server.coordinator.launch import attempt_request, compiled_launch
from trainmaster.server.coordinator.observation import observe_attempt
from trainmaster.server.core.commands import submit
from trainmaster.server.core.job import Change, CheckpointRecord
from trainmaster.server.core.observations import admit, observe, place
from trainmaster.server.core.reports import Liveness
from trainmaster.server.core.resources import Share
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots, run_directory

COMMAND = {"kind": "command", "argv": ["x"]}
TRAINER = {"kind": "trainer_service", "base_model": "m", "model_path": "/m"}
CLASS = {"kind": "job_class", "target": "module:Class", "project": "p", "group": "g", "name": "n"}


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots({RUNS: tmp_path / "runs", ARTIFACTS: tmp_path / "artifacts", BLOBS: tmp_path / "blobs"})


def reported(roots: Roots, workload: dict[str, Any], path: str) -> Change:
    """What the core makes of a job whose rank says that a checkpoint lies there."""
    document = {"name": "j", "workload": workload, "resource_config": {"gpu_count": 0}}
    made = submit(
        compile_job(parse_submit(document)),
        account_id="a",
        job_id="job-mine",
        created_by="t",
        now=1.0,
        default_backend="local",
    )
    admitted = admit(made.job, now=1.0)
    assert admitted is not None
    placed = place(admitted.job, now=1.0, shares=[Share(node_id="n")], token="t")
    assert placed is not None
    directory = run_directory(roots, "job-mine", 1)
    directory.create(
        attempt_request(
            placed.job,
            compiled_launch(placed.job),
            nodes={},
            roots=roots,
            resume=None,
            hint_socket=None,
            server_url="http://server",
        )
    )
    absolute = path if "://" in path or path.startswith("/") else str(roots.path(ARTIFACTS, "")) + "/" + path
    record = {"type": "checkpoint", "checkpoint_id": "c", "step": 1, "path": absolute}
    directory.append(events_stream(0, 0), 0, json.dumps(record).encode() + b"\n")
    observation = observe_attempt(
        placed.job,
        directory,
        [Liveness.ALIVE],
        ranks_per_node=1,
        roots=roots,
        endpoint=partial(endpoint_on_node, directory.request()),
    )
    change = observe(placed.job, observation, now=2.0)
    assert change is not None
    return change


@pytest.mark.parametrize(
    ("workload", "path", "root", "kept"),
    [
        (COMMAND, "job-mine/checkpoints/c", "artifacts", "job-mine/checkpoints/c"),
        (COMMAND, "s3://bucket/run/c", "uri", "s3://bucket/run/c"),
        (CLASS, "classes/a/p/g/n/c", "artifacts", "classes/a/p/g/n/c"),
        (CLASS, "classes/a/p/g/n/deep/c", "artifacts", "classes/a/p/g/n/deep/c"),
        (CLASS, "s3://bucket/p/g/n/c", "uri", "s3://bucket/p/g/n/c"),
        (TRAINER, "job-mine/checkpoints/weights/n/1", "artifacts", "job-mine/checkpoints/weights/n/1"),
    ],
)
def test_checkpoint_in_the_jobs_own_place_is_registered(
    roots: Roots, workload: dict[str, Any], path: str, root: str, kept: str
) -> None:
    [checkpoint] = reported(roots, workload, path).checkpoints
    assert (checkpoint.root, checkpoint.path) == (root, kept)


@pytest.mark.parametrize(
    ("workload", "path"),
    [
        (COMMAND, "/etc"),
        (COMMAND, "job-theirs/checkpoints/c"),
        (COMMAND, "job-mine/output"),
        (COMMAND, "classes/a/p/g/n/c"),
        (COMMAND, "gs://bucket/c"),
        (COMMAND, "job-mine/checkpoints/a/b"),
        (TRAINER, "job-theirs/checkpoints/weights/n/1"),
        (TRAINER, "job-mine/checkpoints"),
        (TRAINER, "models/a/m"),
        (CLASS, "classes/b/p/g/n/c"),
        (CLASS, "classes/ab/p/g/n/c"),
        (CLASS, "classes/a/p/g/n"),
        (CLASS, "classes/a/p"),
        (CLASS, "classes/a"),
        (CLASS, "classes/a/p/g/n/../../../../b/p/g/n/c"),
        (CLASS, "job-mine/checkpoints/c"),
    ],
)
def test_checkpoint_anywhere_else_is_a_note(roots: Roots, workload: dict[str, Any], path: str) -> None:
    change = reported(roots, workload, path)
    assert change.checkpoints == ()
    assert any("was not registered" in event.message for event in change.events)


@pytest.mark.parametrize(
    ("root", "path", "passed"),
    [("uri", "s3://bucket/run/c", "s3://bucket/run/c"), (ARTIFACTS, "job-x/checkpoints/c", None)],
)
def test_checkpoint_is_passed_back_as_a_path_or_as_its_uri(
    roots: Roots, root: str, path: str, passed: str | None
) -> None:
    made = submit(
        compile_job(parse_submit({"name": "j", "workload": COMMAND})),
        account_id="a",
        job_id="job-mine",
        created_by="t",
        now=1.0,
        default_backend="local",
    )
    admitted = admit(made.job, now=1.0)
    assert admitted is not None
    placed = place(admitted.job, now=1.0, shares=[Share(node_id="n")], token="t")
    assert placed is not None
    checkpoint = CheckpointRecord(
        checkpoint_id="c", job_id="job-x", attempt=1, step=1, created_at=1.0, root=root, path=path
    )
    request = attempt_request(
        placed.job,
        compiled_launch(placed.job),
        nodes={},
        roots=roots,
        resume=checkpoint,
        hint_socket=None,
        server_url=None,
    )
    assert request.resume_from == (passed or str(roots.path(root, path)))
