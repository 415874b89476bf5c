"""Files that jobs leave: listed, fetched in parts, and never anything else."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_world import Api

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.http.artifact_files import Artifact, ArtifactPlace, Position, files
from trainmaster.server.storage import ARTIFACTS


@pytest.fixture
def job(api: Api) -> str:
    """A job that runs, with some output and two checkpoints."""
    job_id = api.submit()
    api.world.start(job_id)
    output = directory(api, job_id)
    (output / "model").mkdir(parents=True)
    (output / "model" / "weights.bin").write_bytes(bytes(range(256)) * 10)
    (output / "notes ü.txt").write_text("hello")
    for name in ("c1", "c2"):
        commit(api, job_id, name)
    return job_id


def directory(api: Api, job_id: str, name: str = "output") -> Path:
    return api.world.roots.path(ARTIFACTS, f"{job_id}/{name}")


def commit(api: Api, job_id: str, name: str, content: bytes = b"state") -> None:
    path = directory(api, job_id, f"checkpoints/{name}")
    path.mkdir(parents=True)
    (path / "state").write_bytes(content)
    described = {"path": "state", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps({"files": [described]}))
    api.world.save(job_id, name, step=int(name[1:]))


def listed(api: Api, job_id: str, **params: Any) -> list[Any]:
    return list(api.call("GET", f"/v1/jobs/{job_id}/artifacts", params=params)["artifacts"])


def test_list_has_output_and_committed_checkpoints(api: Api, job: str) -> None:
    draft = directory(api, job, f"checkpoints/.draft-{job}.1-abcd")
    draft.mkdir()
    (draft / "half").write_text("x")
    found = listed(api, job)
    assert [each["path"] for each in found] == [
        "checkpoints/c1/manifest.json",
        "checkpoints/c1/state",
        "checkpoints/c2/manifest.json",
        "checkpoints/c2/state",
        "output/model/weights.bin",
        "output/notes ü.txt",
    ]
    state = found[1]
    assert (state["kind"], state["checkpoint_id"], state["size_bytes"]) == ("checkpoint", "c1", 5)
    assert state["sha256"] == hashlib.sha256(b"state").hexdigest()
    assert (found[4]["kind"], found[4]["sha256"], found[4]["size_bytes"]) == ("output", None, 2560)
    assert [each["path"] for each in listed(api, job, checkpoint_id="c2")] == [
        "checkpoints/c2/manifest.json",
        "checkpoints/c2/state",
    ]
    assert len(listed(api, job, kind="output")) == 2


def test_list_comes_in_pages_without_gaps(api: Api, job: str) -> None:
    whole = [each["path"] for each in listed(api, job)]
    for size in (1, 2, 4):
        found: list[str] = []
        token: dict[str, Any] = {}
        while True:
            page = api.call("GET", f"/v1/jobs/{job}/artifacts", params={"page_size": size, **token})
            assert len(page["artifacts"]) <= size
            found += [each["path"] for each in page["artifacts"]]
            if page["next_page_token"] is None:
                break
            token = {"page_token": page["next_page_token"]}
        assert found == whole
    api.call("GET", f"/v1/jobs/{job}/artifacts?page_token=nonsense", 422)


def test_page_looks_into_few_of_very_many_checkpoints(api: Api, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their job says that they are there; most of them may have no files."""
    whole = [each["path"] for each in listed(api, job)]
    monkeypatch.setattr("trainmaster.server.http.routes.artifacts.MAX_PLACES", 3)
    for number in range(8):
        api.world.save(job, f"b{number}", step=number)
    opened: list[str] = []

    def counted(place: ArtifactPlace, after: Position = ()) -> Iterator[Artifact]:
        opened.append(place.checkpoint_id or "output")
        return files(place, after)

    monkeypatch.setattr("trainmaster.server.http.routes.artifacts.files", counted)
    found: list[str] = []
    looks = []
    token: dict[str, Any] = {}
    while True:
        page = api.call("GET", f"/v1/jobs/{job}/artifacts", params={"page_size": 100, **token})
        found += [each["path"] for each in page["artifacts"]]
        looks.append([*opened])
        opened.clear()
        if page["next_page_token"] is None:
            break
        token = {"page_token": page["next_page_token"]}
    assert found == whole
    kept = [each["checkpoint_id"] for each in api.call("GET", f"/v1/jobs/{job}/checkpoints")["checkpoints"]]
    assert [each for look in looks for each in look] == [*sorted(kept), "output"]
    assert max(map(len, looks)) <= 4
    assert len(looks) > 1
    listed(api, job, kind="output")
    assert opened == ["output"]
    opened.clear()
    listed(api, job, checkpoint_id="c2")
    assert opened == ["c2"]


def test_file_of_a_checkpoint_is_found_without_reading_the_others(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("trainmaster.server.store.checkpoints.of_job")
    assert api.http.get(f"/v1/jobs/{job}/artifacts/checkpoints/c1/state").content == b"state"
    for path in ("checkpoints/c9/state", "checkpoints/c1", "checkpoints", "checkpoints//state"):
        api.call("GET", f"/v1/jobs/{job}/artifacts/{path}", 404)


def test_list_ends_after_very_many_entries_that_are_no_files(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job could leave a million pipes, each of which is looked at."""
    monkeypatch.setattr("trainmaster.server.http.artifact_files.MAX_MISSED", 5)
    for number in range(4):
        os.mkfifo(directory(api, job) / f"a{number}")
    assert "output/notes ü.txt" in {each["path"] for each in listed(api, job)}
    os.mkfifo(directory(api, job) / "a4")
    found = {each["path"] for each in listed(api, job)}
    assert "checkpoints/c2/state" in found
    assert not any(path.startswith("output/") for path in found)


def test_job_without_files_lists_none(api: Api) -> None:
    assert listed(api, api.submit()) == []


def test_file_is_fetched_whole_with_its_name_and_etag(api: Api, job: str) -> None:
    answer = api.http.get(f"/v1/jobs/{job}/artifacts/output/notes ü.txt")
    assert (answer.status_code, answer.text) == (200, "hello")
    assert answer.headers["Content-Disposition"] == "attachment; filename*=utf-8''notes%20%C3%BC.txt"
    assert answer.headers["Accept-Ranges"] == "bytes"
    etags = {each["path"]: each["etag"] for each in listed(api, job)}
    assert answer.headers["ETag"] == etags["output/notes ü.txt"]


@pytest.mark.parametrize(
    ("asked", "status", "expected"),
    [
        ("bytes=0-9", 206, slice(0, 10)),
        ("bytes=250-", 206, slice(250, None)),
        ("bytes=-6", 206, slice(-6, None)),
        ("bytes=2000-999999", 206, slice(2000, None)),
        ("bytes=5-1", 200, slice(None)),
        ("bytes=0-1,5-6", 200, slice(None)),
        ("lines=1-2", 200, slice(None)),
    ],
)
def test_part_of_a_file_is_fetched(api: Api, job: str, asked: str, status: int, expected: slice) -> None:
    content = bytes(range(256)) * 10
    answer = api.http.get(f"/v1/jobs/{job}/artifacts/output/model/weights.bin", headers={"Range": asked})
    assert answer.status_code == status
    assert answer.content == content[expected]
    if status == 206:
        begin = content.index(answer.content) if expected.start == 0 else len(content) - len(answer.content)
        assert answer.headers["Content-Range"] == f"bytes {begin}-{begin + len(answer.content) - 1}/{len(content)}"


def test_range_beyond_the_end_is_refused(api: Api, job: str) -> None:
    path = f"/v1/jobs/{job}/artifacts/output/model/weights.bin"
    error = api.call("GET", path, 416, headers={"Range": "bytes=2560-"})
    assert error["code"] == "RANGE_NOT_SATISFIABLE"
    assert "2560 bytes" in error["message"]


def test_range_of_another_version_gets_the_whole_file(api: Api, job: str) -> None:
    path = f"/v1/jobs/{job}/artifacts/output/model/weights.bin"
    etag = api.http.get(path).headers["ETag"]
    kept = api.http.get(path, headers={"Range": "bytes=10-", "If-Range": etag})
    assert kept.status_code == 206
    (directory(api, job) / "model" / "weights.bin").write_bytes(b"new")
    changed = api.http.get(path, headers={"Range": "bytes=1-", "If-Range": etag})
    assert (changed.status_code, changed.content) == (200, b"new")


def test_no_path_leads_out(api: Api, job: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hidden words")
    other = api.submit()
    api.world.start(other)
    (directory(api, other)).mkdir(parents=True)
    (directory(api, other) / "theirs").write_text("hidden words")
    output = directory(api, job)
    os.symlink(secret, output / "link")
    os.symlink(tmp_path, output / "elsewhere")
    os.symlink(output / "model" / "weights.bin", output / "inside")
    os.mkfifo(output / "pipe")
    paths = [each["path"] for each in listed(api, job, kind="output")]
    assert paths == ["output/inside", "output/model/weights.bin", "output/notes ü.txt"]
    for path in (
        "output/link",
        "output/elsewhere/secret",
        "output/pipe",
        "output/model",
        f"output/%2e%2e/%2e%2e/{other}/output/theirs",
        "output//etc/passwd",
        "output/",
        "checkpoints/c1/%2e%2e/c2/state",
        "checkpoints/nobody/state",
        f"checkpoints/.draft-{job}.1-abcd/half",
        "etc/passwd",
        "output/a%00b",
    ):
        answer = api.http.get(f"/v1/jobs/{job}/artifacts/{path}")
        assert answer.status_code in (404, 422), path
        assert b"hidden" not in answer.content
    assert api.http.get(f"/v1/jobs/{job}/artifacts/output/inside").status_code == 200


def test_files_of_a_deleted_job_are_there_and_those_of_another_account_are_not(api: Api, job: str) -> None:
    stranger = api.world.key("stranger", KeyScope.VIEW)
    for path in ("artifacts", "artifacts/output/model/weights.bin"):
        answer = api.http.get(f"/v1/jobs/{job}/{path}", headers={"Authorization": f"Bearer {stranger}"})
        assert answer.status_code == 404
    api.world.end(job)
    assert len(listed(api, job)) == 6  # also after its end
    api.call("DELETE", f"/v1/jobs/{job}")
    assert len(listed(api, job)) == 6  # and until it is purged
    assert api.http.get(f"/v1/jobs/{job}/artifacts/output/model/weights.bin").status_code == 200
    api.call("GET", f"/v1/jobs/{job}/artifacts", 404, headers={"Authorization": f"Bearer {stranger}"})
