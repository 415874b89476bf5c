"""What only the server has as a root: uploads that break, attempts that are over, checkpoints that users see there."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_world import Served, World
from root_saves import FILES, everything, fill, manifest, save

from patience import PATIENCE_S
from served_attempt import ServedAttempt, open_attempt, submit
from trainmaster.jobs import NotOwnerError, server_connection, server_place, verify
from trainmaster.jobs.lock import LockedError
from trainmaster.jobs.object_root import ObjectRoot
from trainmaster.jobs.objects import AccessRefusedError, ObjectStoreError
from trainmaster.jobs.roots import LocalRoot, found_again, open_checkpoint, open_root
from trainmaster.jobs.server_connection import Answer, NoAnswerError, ServerConnection
from trainmaster.protocol import environment
from trainmaster.server.coordinator.upload_collection import ABANDONED_S, collect_uploads
from trainmaster.server.core.retention import RetentionPolicy

LARGE = {"large.bin": os.urandom(5_000_000), "small.bin": b"s"}


@pytest.fixture
def root(attempt: ServedAttempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectRoot:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(server_place, "_PIECE", 1 << 20)
    return ObjectRoot(attempt.checkpoints)


class KilledError(BaseException):
    """The client ends here."""


def next_attempt(attempt: ServedAttempt, served: Served, tmp_path: Path) -> ServedAttempt:
    """End an attempt as if its worker was lost, and open the next one of its job."""
    job_id = attempt.job.job_id
    attempt.world.see(job_id, {"type": "claimed"}, {"type": "started"})
    attempt.world.end(job_id, "WORKER_LOST")
    return open_attempt(attempt.world, served, tmp_path, job_id)


def test_checkpoint_lies_on_the_server_as_if_it_was_saved_there(root: ObjectRoot, attempt: ServedAttempt) -> None:
    made = save(root, "checkpoint-1", LARGE)
    local = LocalRoot(attempt.home)
    assert local.committed() == ["checkpoint-1"]
    assert local.verify("checkpoint-1") == verify(attempt.home / "checkpoint-1") == made
    assert (made.data, {*os.listdir(attempt.home / "checkpoint-1")}) == ("", {*LARGE, "manifest.json"})
    assert (attempt.home / "checkpoint-1" / "large.bin").read_bytes() == LARGE["large.bin"]
    local.remove("checkpoint-1")
    assert root.committed() == []


def test_checkpoint_that_was_saved_there_is_read_from_elsewhere(root: ObjectRoot, attempt: ServedAttempt) -> None:
    local = LocalRoot(attempt.home)
    made = save(local, "a/checkpoint-1", LARGE)
    local.point("a", "latest", "checkpoint-1")
    assert (root.committed(), root.names("a"), root.pointer("a", "latest")) == (
        ["a/checkpoint-1"],
        ["checkpoint-1"],
        "checkpoint-1",
    )
    found, rel_path = open_checkpoint(f"{attempt.checkpoints}/a/checkpoint-1")
    with found.fetch(rel_path) as directory:
        assert verify(directory).files == made.files
        assert (directory / "large.bin").read_bytes() == LARGE["large.bin"]


def test_client_that_is_killed_at_any_request_leaves_nothing_or_a_whole_checkpoint(
    root: ObjectRoot, attempt: ServedAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ServerConnection.ask
    for allowed, arrives in itertools.product(range(100), (False, True)):
        left = itertools.count(allowed, -1)
        rel_path = f"c-{allowed}-{arrives}"

        def ask_or_die(
            self: ServerConnection,
            *args: Any,
            left: Iterator[int] = left,
            arrives: bool = arrives,
            **options: Any,
        ) -> Answer:
            if (now := next(left)) <= 0:
                if now == 0 and arrives:
                    ask(self, *args, **options)
                raise KilledError
            return ask(self, *args, **options)

        monkeypatch.setattr(ServerConnection, "ask", ask_or_die)
        try:
            save(root, rel_path, LARGE)
        except KilledError:
            killed = True
        else:
            killed = False
        monkeypatch.setattr(ServerConnection, "ask", ask)
        for name in root.names(""):
            root.verify(name)
        assert set(root.names("")) == set(root.committed())
        if not killed:
            assert rel_path in root.names("")
            assert allowed > 10
            return
    raise AssertionError("a save takes fewer requests")


def test_upload_goes_on_where_it_broke_off(root: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = ServerConnection._sent
    bodies: list[int] = []
    breaks = itertools.cycle([False, False, True])

    def break_now_and_then(self: ServerConnection, method: str, path: str, headers: Any, body: Any, *rest: Any) -> Any:
        if method == "PUT" and "offset" in path:
            bodies.append(len(body))
            if next(breaks):
                raise NoAnswerError("broken off")
        return sent(self, method, path, headers, body, *rest)

    monkeypatch.setattr(ServerConnection, "_sent", break_now_and_then)
    save(root, "c", {"large.bin": LARGE["large.bin"]})
    assert len(bodies) == 7  # five pieces, of which two were sent again
    root.verify("c")


def test_download_goes_on_where_it_broke_off(root: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    made = save(root, "c", {"large.bin": LARGE["large.bin"]})
    pieces = server_connection._pieces
    came: list[int] = []

    def cut(response: Any) -> Iterator[bytes]:
        yield next(pieces(response))
        raise NoAnswerError("broken off")

    monkeypatch.setattr(server_connection, "_pieces", cut)
    with root.fetch("c", on_bytes=came.append) as directory:
        assert (directory / "large.bin").read_bytes() == LARGE["large.bin"]
    assert sum(came) == made.size_bytes
    assert len(came) >= 5


def test_stale_attempt_can_neither_commit_nor_read_nor_remove(
    root: ObjectRoot, attempt: ServedAttempt, served: Served, tmp_path: Path
) -> None:
    save(root, "c-1")
    with root.draft("c-2", job_id="job-1", attempt=1) as draft:
        fill(draft, LARGE)
        later: list[ServedAttempt] = []
        with pytest.raises(NotOwnerError, match="another attempt owns this job"):
            root.commit(
                draft,
                "c-2",
                manifest(2),
                check_owner=lambda: later.append(next_attempt(attempt, served, tmp_path)),
            )
    for ask in (
        lambda: root.manifest("c-1"),
        lambda: root.remove("c-1"),
        lambda: root.point("", "latest", "c-1"),
        lambda: root.committed(),
    ):
        with pytest.raises(NotOwnerError):
            ask()
    assert LocalRoot(attempt.home).committed() == ["c-1"]


def test_uploads_go_with_their_attempt_or_after_a_day(
    root: ObjectRoot, attempt: ServedAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attempt.ask("PUT", "checkpoints/c/.data-job-1.1-00/f?upload=u&offset=0", content=b"half").is_success
    world = attempt.world

    def collected(now: float) -> list[str]:
        found = collect_uploads(world.roots, world.database, RetentionPolicy(), now, dry_run=False)
        return [each.name for each in found if attempt.attempt_id in each.name]

    now = attempt.uploads.stat().st_mtime
    assert collected(now) == []
    assert collected(now + ABANDONED_S + 60) == [f"{attempt.attempt_id}/part-u"]
    assert attempt.ask("PUT", "checkpoints/c/.data-job-1.1-00/f?upload=v&offset=0", content=b"half").is_success
    world.end(attempt.job.job_id)
    assert collected(now) == [attempt.attempt_id]
    assert not attempt.uploads.exists()


def test_token_of_somebody_else_opens_nothing(
    root: ObjectRoot, attempt: ServedAttempt, world: World, served: Served, tmp_path: Path
) -> None:
    save(root, "c-1")
    other = open_attempt(world, served, tmp_path, submit(world, served, "other-account"))
    tokens = {"another job": other.job.live.rank_token, "worker": attempt.job.live.token, "key": world.key("default")}
    for whose, token in tokens.items():
        for method, path in (("GET", "checkpoints"), ("GET", "checkpoints/c-1/state.json"), ("PUT", "checkpoints/.x")):
            answer = attempt.ask(method, path, token=token)
            assert answer.status_code == 401, whose
    tmp = tmp_path / "wrong"
    tmp.write_text(other.job.live.rank_token)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(environment.TOKEN_FILE, str(tmp))
        with pytest.raises(AccessRefusedError, match="not valid for this attempt"):
            ObjectRoot(attempt.checkpoints).committed()


def test_address_outside_a_job_says_who_may_open_it(attempt: ServedAttempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.TOKEN_FILE)
    with pytest.raises(ValueError, match="only a job's own processes"):
        open_root(attempt.checkpoints)
    with pytest.raises(ValueError, match="checkpoints are stored in a directory"):
        open_root("https://example.com/bucket")


def test_full_disk_is_waited_for(root: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainmaster.server.attempt_store import AttemptStore

    append, refused = AttemptStore.append, itertools.count()

    def no_room(self: AttemptStore, *args: Any) -> int:
        if next(refused) < 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append(self, *args)

    monkeypatch.setattr(AttemptStore, "append", no_room)
    save(root, "c", {"f": b"bytes"})
    assert next(refused) > 2
    root.verify("c")


def test_of_two_conditional_writers_one_wins(root: ObjectRoot) -> None:
    place = root._place
    first = place.put_if(".pointer", b"0", version=None)
    assert first is not None
    assert place.put_if(".pointer", b"x", version=None) is None
    both_ready = threading.Barrier(8, timeout=PATIENCE_S)

    def write(number: int) -> str | None:
        both_ready.wait()
        return place.put_if(".pointer", str(number).encode(), version=first)

    with ThreadPoolExecutor(max_workers=8) as pool:
        versions = list(pool.map(write, range(8)))
    (winner,) = [number for number, version in enumerate(versions) if version is not None]
    assert place.get(".pointer") == (str(winner).encode(), versions[winner])


TRICKS = ["../x", "a/../../x", "a//b", "./a", "a/./b", "%2e%2e/x", "a/%2e%2e/%2e%2e/x", "a%00b", "x" * 300, "/x"]


@pytest.mark.parametrize("path", TRICKS)
@pytest.mark.parametrize("area", ["checkpoints", "output"])
def test_path_that_leads_out_is_refused(attempt: ServedAttempt, area: str, path: str) -> None:
    address = f"{area}/{path}"
    # A client that does not tidy addresses up.
    for method, query in (("GET", ""), ("PUT", "?upload=u&offset=0"), ("POST", f"?upload=u&size=0&sha256={'0' * 64}")):
        answer = _raw(attempt, method, f"{address}{query}")
        assert answer in (401, 404, 405, 409, 422), (method, answer)
    assert not (attempt.artifacts / "x").exists()
    assert not attempt.home.exists() or os.listdir(attempt.home) == []


def _raw(attempt: ServedAttempt, method: str, path: str) -> int:
    import http.client
    from urllib.parse import urlsplit

    parts = urlsplit(attempt.files_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    try:
        headers = {"Authorization": f"Bearer {attempt.job.live.rank_token}", "Content-Length": "0"}
        connection.request(method, f"{parts.path}/{path}", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_link_that_a_job_has_made_leads_nowhere(root: ObjectRoot, attempt: ServedAttempt, tmp_path: Path) -> None:
    save(root, "c-1")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "f").write_text("secret")
    (attempt.home / "link").symlink_to(tmp_path / "secret")
    (attempt.home / "c-1" / "file").symlink_to(tmp_path / "secret" / "f")
    (attempt.home / ".latest").symlink_to(tmp_path / "secret" / "pointer")
    for path in ("link/f", "c-1/file"):
        assert attempt.ask("GET", f"checkpoints/{path}").status_code == 404
    root.point("", "latest", "c-1")
    assert not (tmp_path / "secret" / "pointer").exists()
    assert (root.pointer("", "latest"), root.committed()) == ("c-1", ["c-1"])
    with pytest.raises(ObjectStoreError):
        save(root, "link/c")
    assert os.listdir(tmp_path / "secret") == ["f"]


def test_only_saves_and_names_with_a_dot_can_be_written(attempt: ServedAttempt) -> None:
    made = manifest().to_bytes()
    refused: dict[str, Callable[[], Any]] = {
        "a file beside checkpoints": lambda: attempt.ask("PUT", "checkpoints/file", content=b"x"),
        "a manifest of no save": lambda: attempt.ask(
            "PUT", "checkpoints/c/manifest.json", content=made, headers={"If-None-Match": "*"}
        ),
        "a manifest in place of another": lambda: attempt.ask("PUT", "checkpoints/c/manifest.json", content=made),
        "no manifest": lambda: attempt.ask(
            "PUT", "checkpoints/c/manifest.json", content=b"[]", headers={"If-None-Match": "*"}
        ),
        "a piece without an offset": lambda: attempt.ask("PUT", "checkpoints/c/.data-j.1-0/f?upload=u"),
        "a result as a whole": lambda: attempt.ask("PUT", "output/f", content=b"x"),
        "a file of what is resumed from": lambda: attempt.ask("PUT", "resume/c/f?upload=u&offset=0"),
        "a result that is read": lambda: attempt.ask("GET", "output/f"),
        "a list of results": lambda: attempt.ask("GET", "output"),
        "a result that is removed": lambda: attempt.ask("DELETE", "output/f"),
        "an unknown area": lambda: attempt.ask("GET", "elsewhere/f"),
        "an unknown parameter": lambda: attempt.ask("GET", "checkpoints?prefx=a"),
        "another condition": lambda: attempt.ask(
            "PUT", "checkpoints/.x", content=b"x", headers={"If-None-Match": '"1"'}
        ),
    }
    for what, ask in refused.items():
        assert ask().status_code == 422, what
    missing = {**json.loads(made), "data": ".data-j.1-0", "files": [{"path": "f", "size": 1, "sha256": "0" * 64}]}
    answer = attempt.ask(
        "PUT", "checkpoints/c/manifest.json", content=json.dumps(missing), headers={"If-None-Match": "*"}
    )
    assert (answer.status_code, "did not arrive" in answer.text) == (409, True)
    assert everything(ObjectRoot(attempt.checkpoints)) == []


def test_bytes_that_are_damaged_on_the_way_are_sent_again(root: ObjectRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, damaged = ServerConnection.ask, itertools.count()

    def damage(self: ServerConnection, method: str, path: str, **options: Any) -> Answer:
        if method == "PUT" and "offset=0" in path and not next(damaged):
            options["body"] = bytes(len(options["body"]))
        return ask(self, method, path, **options)

    monkeypatch.setattr(ServerConnection, "ask", damage)
    save(root, "c", {"f": b"as it is"})
    assert root.read("c", "f") == b"as it is"


def test_files_are_those_of_the_save(root: ObjectRoot) -> None:
    assert {file.path for file in save(root, "a/b", FILES).files} == set(FILES)


def test_lock_is_respected_by_jobs_here_and_elsewhere(root: ObjectRoot, attempt: ServedAttempt) -> None:
    local = LocalRoot(attempt.home)
    with local.lock("a", "here"), pytest.raises(LockedError, match="here"), root.lock("a", "elsewhere"):
        pass
    with root.lock("a", attempt.attempt_id):
        with pytest.raises(LockedError, match=attempt.attempt_id), local.lock("a", "here"):
            pass
        with pytest.raises(LockedError, match=attempt.attempt_id), root.lock("a", "another"):
            pass
    with local.lock("a", "here"):
        pass
    with root.lock("a", attempt.attempt_id):
        pass


def test_lock_of_an_attempt_that_is_over_is_free(
    root: ObjectRoot, attempt: ServedAttempt, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"owner": attempt.attempt_id, "nonce": "n", "renewals": 1, "expires_at": 2e9}
    root._place.put("a/.lock", json.dumps(record).encode())
    with pytest.raises(LockedError, match=attempt.attempt_id), root.lock("a", "other"):
        pass
    later = next_attempt(attempt, served, tmp_path)
    for name, value in later.environment.items():
        monkeypatch.setenv(name, value)
    with ObjectRoot(later.checkpoints).lock("a", later.attempt_id) as held:
        held.require()


def test_place_that_another_attempt_noted_is_found_again(root: ObjectRoot, attempt: ServedAttempt) -> None:
    job_id = attempt.job.job_id
    local = LocalRoot(attempt.home)
    earlier = attempt.checkpoints.replace(f"{job_id}.1", f"{job_id}.7")
    assert found_again(root, f"{earlier}/a/c-1", job_id) == root.locate("a/c-1")
    assert found_again(local, f"{earlier}/a/c-1", job_id) == local.locate("a/c-1")
    assert found_again(root, local.locate("a/c-1"), job_id) == root.locate("a/c-1")
    assert found_again(local, local.locate("a/c-1"), job_id) == local.locate("a/c-1")
    for foreign in (f"{attempt.files_url}/resume/c-1", "s3://bucket/a", "/srv/job-other/checkpoints/c-1"):
        assert found_again(root, foreign, job_id) == found_again(local, foreign, job_id) == foreign
    assert found_again(root, f"{earlier}/a/c-1", None) == f"{earlier}/a/c-1"
