"""The files of an attempt: what it resumes from, and the results that its workers deliver."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from api_world import Served, World

from served_attempt import ServedAttempt, open_attempt, submit
from trainmaster.jobs.checkpoint import Manifest
from trainmaster.jobs.roots import LocalRoot, open_root
from trainmaster.protocol.trainer_requests import REFUSAL_HEADER, SOURCE_HEADER, Trainer
from trainmaster.server.core.accounts import Account
from trainmaster.server.doors.trainers import with_source_as_seen
from trainmaster.server.store import accounts
from trainmaster.server.store.scope import Scope

UID = 54_321


@pytest.fixture
def attempt(world: World, served: Served, tmp_path: Path) -> ServedAttempt:
    """A new attempt on two nodes."""
    return open_attempt(world, served, tmp_path, nodes=2)


def deliver(
    attempt: ServedAttempt, path: str, data: bytes, *, node: int | None = None, expect: int = 200
) -> httpx.Response:
    """Send a result in two pieces, with the worker's token."""
    token = attempt.job.live.token
    half = len(data) // 2
    upload = hashlib.sha256(path.encode() + data + str(node).encode()).hexdigest()
    for begin, piece in ((0, data[:half]), (half, data[half:])):
        answer = attempt.ask("PUT", f"output/{path}?upload={upload}&offset={begin}", content=piece, token=token)
        assert answer.status_code == expect, answer.text
        if expect != 200:
            return answer
    of_node = "" if node is None else f"&node={node}"
    query = f"upload={upload}&size={len(data)}&sha256={hashlib.sha256(data).hexdigest()}{of_node}"
    for _ in range(2):  # a repetition changes nothing
        answer = attempt.ask("POST", f"output/{path}?{query}", token=token)
        if of_node and answer.status_code == 409:
            return answer
        assert answer.status_code == 200, answer.text
    return answer


def output(attempt: ServedAttempt) -> dict[str, bytes]:
    home = attempt.artifacts / attempt.job.job_id / "output"
    return {path.relative_to(home).as_posix(): path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()}


def test_results_are_taken_with_either_token_and_replaced(attempt: ServedAttempt) -> None:
    deliver(attempt, "a/b.txt", b"first")
    deliver(attempt, "a/b.txt", b"second")
    deliver(attempt, "empty", b"")
    assert attempt.ask("PUT", "output/c?upload=c&offset=0", content=b"by a rank").is_success
    digest = hashlib.sha256(b"by a rank").hexdigest()
    assert attempt.ask("POST", f"output/c?upload=c&size=9&sha256={digest}").is_success
    assert output(attempt) == {"a/b.txt": b"second", "c": b"by a rank", "empty": b""}
    assert [path for path in attempt.uploads.rglob("*") if path.is_file()] == []


def test_result_that_is_not_all_there_or_damaged_is_not_taken(attempt: ServedAttempt) -> None:
    assert attempt.ask("PUT", "output/f?upload=u&offset=0", content=b"half").json()["data"] == {"next_offset": 4}
    gap = attempt.ask("PUT", "output/f?upload=u&offset=9", content=b"later")
    assert (gap.status_code, gap.json()["error"]["next_offset"]) == (409, 4)
    early = attempt.ask("POST", f"output/f?upload=u&size=8&sha256={'0' * 64}")
    assert (early.status_code, early.json()["error"]["next_offset"]) == (409, 4)
    assert attempt.ask("PUT", "output/f?upload=u&offset=2", content=b"lf whole").json()["data"] == {"next_offset": 10}
    wrong = attempt.ask("POST", f"output/f?upload=u&size=10&sha256={'0' * 64}")
    assert (wrong.status_code, wrong.json()["error"]["details"][0]["field"]) == (422, "sha256")
    assert output(attempt) == {}


def test_of_several_nodes_the_highest_stays(attempt: ServedAttempt) -> None:
    deliver(attempt, "f", b"by node 1", node=1)
    deliver(attempt, "f", b"by node 0", node=0)
    assert output(attempt) == {"f": b"by node 1"}
    deliver(attempt, "f", b"again by node 1", node=1)
    assert output(attempt) == {"f": b"again by node 1"}


def test_directory_takes_the_place_of_a_file_and_a_file_that_of_a_directory(attempt: ServedAttempt) -> None:
    deliver(attempt, "a", b"file")
    deliver(attempt, "a/b", b"inside")
    assert output(attempt) == {"a/b": b"inside"}
    deliver(attempt, "a", b"file again")
    assert output(attempt) == {"a": b"file again"}


def test_link_in_place_of_a_directory_is_replaced(attempt: ServedAttempt, tmp_path: Path) -> None:
    deliver(attempt, "before", b"x")
    home = attempt.artifacts / attempt.job.job_id / "output"
    (tmp_path / "elsewhere").mkdir()
    (home / "a").symlink_to(tmp_path / "elsewhere")
    deliver(attempt, "a/b", b"inside")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not (home / "a").is_symlink()
    assert output(attempt) == {"a/b": b"inside", "before": b"x"}


def test_results_of_an_attempt_that_has_ended_are_refused(attempt: ServedAttempt, world: World) -> None:
    job_id = attempt.job.job_id
    world.see(job_id, {"type": "started"})
    world.end(job_id)
    answer = attempt.ask("PUT", "output/f?upload=u&offset=0", content=b"x", token=attempt.job.live.token)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "ATTEMPT_ENDED")


def saved_by(attempt: ServedAttempt, name: str) -> Manifest:
    job_id = attempt.job.job_id
    return Manifest(
        checkpoint_id=f"{job_id}-{name}",
        job_id=job_id,
        attempt=1,
        step=1,
        epoch=None,
        metrics={},
        world_size=1,
        created_at=1.0,
    )


def resumed(world: World, served: Served, tmp_path: Path, saved: Path, checkpoint_id: str, of_job: str) -> Any:
    """An attempt of a new job that resumes from a checkpoint of another."""
    assert saved.exists()
    job_id = submit(
        world,
        served,
        workload={"kind": "command", "argv": ["x"], "resume_from_checkpoint": checkpoint_id},
        resource_config={"gpu_count": 0},
    )
    return open_attempt(world, served, tmp_path, job_id)


def test_checkpoint_of_another_job_is_read_where_it_lies_and_nothing_beside_it(
    world: World, served: Served, tmp_path: Path
) -> None:
    parent = open_attempt(world, served, tmp_path)
    root = LocalRoot(parent.home)
    for name in ("c-1", "c-2"):
        manifest = saved_by(parent, name)
        with root.draft(name, job_id=parent.job.job_id, attempt=1) as draft:
            (draft / "deep").mkdir()
            (draft / "deep" / "f").write_bytes(b"0123456789")
            root.commit(draft, name, manifest, check_owner=lambda: None)
    checkpoint_id = f"{parent.job.job_id}-c-1"
    record = {
        "type": "checkpoint",
        "t": 1.0,
        "checkpoint_id": checkpoint_id,
        "step": 1,
        "metrics": {},
        "size_bytes": 10,
        "root": "artifacts",
        "path": f"{parent.job.job_id}/checkpoints/c-1",
    }
    world.see(parent.job.job_id, {"type": "claimed"}, {"type": "started"}, record)
    attempt = resumed(world, served, tmp_path, parent.home / "c-1", checkpoint_id, parent.job.job_id)

    listed = attempt.ask("GET", "resume").json()["data"]
    assert [each["path"] for each in listed["files"]] == ["c-1/deep/f", "c-1/manifest.json"]
    assert attempt.ask("GET", "resume?directories=true").json()["data"]["directories"] == ["c-1"]
    assert attempt.ask("GET", "resume/c-1/deep/f").content == b"0123456789"
    part = attempt.ask("GET", "resume/c-1/deep/f", headers={"Range": "bytes=3-"})
    assert (part.status_code, part.content) == (206, b"3456789")
    head = attempt.ask("HEAD", "resume/c-1/deep/f")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "10", b"")
    assert attempt.ask("GET", "resume/c-1/deep/f", headers={"Range": "bytes=10-"}).status_code == 416
    for path in ("c-2/deep/f", "c-1", "c-1/../c-2/deep/f", "c-1/none"):
        assert attempt.ask("GET", f"resume/{path}").status_code in (404, 422), path
    assert attempt.ask("GET", "resume?prefix=c-2").json()["data"]["files"] == []
    assert attempt.ask("PUT", "resume/c-1/.x", content=b"x").status_code == 422
    assert parent.ask("GET", "resume").json()["data"]["files"] == []


def test_list_is_read_in_pages(attempt: ServedAttempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmaster.server.http.routes.worker_files.MOST_LISTED", 2)
    names = [f"p/.{number}" for number in range(5)]
    for name in names:
        assert attempt.ask("PUT", f"checkpoints/{name}", content=b"x").is_success
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = attempt.ask("GET", f"checkpoints?prefix=p&after={after}").json()["data"]
        assert len(page["files"]) <= 2
        found += [each["path"] for each in page["files"]]
        after = page["next_after"]
    assert found == names


def test_attempt_of_another_account_sees_its_own_files_alone(
    attempt: ServedAttempt, world: World, served: Served, tmp_path: Path
) -> None:
    assert attempt.ask("PUT", "checkpoints/.latest", content=b"mine").is_success
    stranger = open_attempt(world, served, tmp_path, submit(world, served, "stranger"))
    assert stranger.ask("GET", "checkpoints/.latest").status_code == 404
    assert stranger.ask("GET", f"checkpoints/../../{attempt.job.job_id}/checkpoints/.latest").status_code in (401, 404)
    assert stranger.ask("GET", "checkpoints").json()["data"]["files"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root works for other users")
def test_files_belong_to_the_user_that_runs_the_account_s_jobs_here(
    world: World, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = Account(account_id="with-a-user", created_at=time.time(), uid=UID)
    world.database.write_now(lambda connection: accounts.create(connection, Scope.everything(), account))
    attempt = open_attempt(world, served, tmp_path, submit(world, served, "with-a-user"))
    for name, value in attempt.environment.items():
        monkeypatch.setenv(name, value)
    root = open_root(attempt.checkpoints)
    manifest = saved_by(attempt, "c-1")
    with root.draft("a/c-1", job_id=attempt.job.job_id, attempt=1) as draft:
        (draft / "deep").mkdir()
        (draft / "deep" / "f").write_bytes(b"0123456789")
        root.commit(draft, "a/c-1", manifest, check_owner=lambda: None)
    root.point("a", "latest", "c-1")
    deliver(attempt, "deep/result", b"bytes")
    job = attempt.artifacts / attempt.job.job_id
    found = {path: path.lstat() for path in (attempt.home, *job.rglob("*"))}
    assert {status.st_uid for path, status in found.items()} == {UID}
    assert (job.stat().st_uid, job.stat().st_mode & 0o777) == (0, 0o711)
    assert root.verify("a/c-1") == LocalRoot(attempt.home).verify("a/c-1")


def test_trainer_elsewhere_is_told_where_it_finds_checkpoints(world: World, served: Served, tmp_path: Path) -> None:
    attempt = open_attempt(world, served, tmp_path)
    trainer = Trainer(attempt.job.job_id, attempt.job.live.number)
    own, other = str(attempt.home / "weights" / "a" / "1"), str(attempt.artifacts / "job-x" / "checkpoints" / "c")

    def told(source: str) -> dict[str, str]:
        return dict(with_source_as_seen(world.roots, trainer, {"x": "y", SOURCE_HEADER: source}))

    assert told(own) == {"x": "y", SOURCE_HEADER: own}
    request = world.directory(attempt.job).path / "request.json"
    request.write_text(json.dumps({**json.loads(request.read_text()), "checkpoint_dir": attempt.checkpoints}))
    assert told(own) == {"x": "y", SOURCE_HEADER: f"{attempt.checkpoints}/weights/a/1"}
    assert told("s3://bucket/c") == {"x": "y", SOURCE_HEADER: "s3://bucket/c"}
    assert "shares no files" in unquote(told(other)[REFUSAL_HEADER])
    assert SOURCE_HEADER not in told(other)
