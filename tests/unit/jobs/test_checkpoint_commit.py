from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trainmaster.jobs import CorruptCheckpointError, Manifest, NotOwnerError, committed, verify
from trainmaster.jobs.report import Reporter
from trainmaster.jobs.roots import open_root
from trainmaster.protocol import environment

SAVE = """
import sys
from trainmaster.jobs import report
with report.checkpoint(step=5) as directory:
    (directory / "weights").write_bytes(b"w" * 100_000)
    print("written", flush=True)
    sys.stdin.readline()
"""


def listed(rank: Any) -> list[str]:
    root = Path(rank.environ[environment.CHECKPOINT_DIR])
    return sorted(path.name for path in root.iterdir() if committed(path))


def on_disk(rank: Any) -> list[str]:
    return sorted(path.name for path in Path(rank.environ[environment.CHECKPOINT_DIR]).iterdir())


def save(rank: Any, step: int, content: bytes = b"weights", **options: Any) -> Path:
    with Reporter(rank.environ).checkpoint(step=step, **options) as directory:
        (directory / "model").mkdir()
        (directory / "model" / "weights").write_bytes(content)
        (directory / "rng").write_bytes(b"state")
    return Path(rank.events_of("checkpoint")[-1]["path"])


@contextmanager
def owner_server(answers: list[tuple[int, dict[str, Any]] | None]) -> Iterator[tuple[str, list[str | None]]]:
    """Answers one after the other; None is a connection that is cut, and the end of the list no answer at all."""
    asked: list[str | None] = []
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            if len(asked) > len(answers):
                released.wait()
                return
            answer = answers[len(asked) - 1]
            if answer is None:
                return
            body = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/owner", asked
    finally:
        released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def test_commit_leaves_a_sealed_directory_and_one_event(rank: Any) -> None:
    path = save(rank, 10, epoch=1.5, metrics={"loss": 0.5, "bad": float("inf")})
    assert path == Path(rank.environ[environment.CHECKPOINT_DIR]) / "checkpoint-10"
    assert on_disk(rank) == ["checkpoint-10"]
    manifest = verify(path)
    assert (manifest.job_id, manifest.attempt, manifest.step, manifest.epoch) == ("job-1", 2, 10, 1.5)
    assert (manifest.metrics, manifest.world_size) == ({"loss": 0.5}, 4)
    assert [(file.path, file.size) for file in manifest.files] == [("model/weights", 7), ("rng", 5)]
    (event,) = rank.events_of("checkpoint")
    assert event == {
        "t": event["t"],
        "type": "checkpoint",
        "checkpoint_id": manifest.checkpoint_id,
        "step": 10,
        "epoch": 1.5,
        "metrics": {"loss": 0.5},
        "path": str(path),
        "size_bytes": 12,
        "duration_s": event["duration_s"],
    }
    assert event["duration_s"] >= 0
    kinds = [event.get("phase", event["type"]) for event in rank.events()]
    assert kinds == ["note", "checkpointing", "checkpoint", "training"]


def test_name_and_attributes_of_a_commit_are_told_and_kept(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    said = {"base_model": "m", "user_metadata": {"a": "b"}, "lora_rank": 8}
    manifest = replace(reporter.new_manifest(step=3), kind="sampler", name="mine", attributes=said)
    assert Manifest.from_bytes(manifest.to_bytes(), "here") == manifest
    reporter.committed(manifest, "/somewhere", took_s=0.1)
    (event,) = rank.events_of("checkpoint")
    assert (event["kind"], event["name"], event["attributes"]) == ("sampler", "mine", said)


def test_manifest_of_an_older_version_has_neither_name_nor_attributes(rank: Any) -> None:
    document = json.loads(Reporter(rank.environ).new_manifest(step=3).to_bytes())
    for name in ("name", "attributes"):
        del document[name]
    manifest = Manifest.from_json(document)
    assert (manifest.name, manifest.attributes) == ("", {})


def test_commit_of_a_step_again_never_replaces_the_first(rank: Any) -> None:
    paths = [save(rank, 10, content) for content in (b"first", b"second", b"third")]
    assert [path.name for path in paths] == ["checkpoint-10", "checkpoint-10-attempt-2", "checkpoint-10-attempt-2-2"]
    assert [(path / "model" / "weights").read_bytes() for path in paths] == [b"first", b"second", b"third"]
    assert len({event["checkpoint_id"] for event in rank.events_of("checkpoint")}) == 3


def test_commit_under_a_name_is_found_there(rank: Any) -> None:
    assert save(rank, 10, name="best").name == "best"
    with pytest.raises(ValueError, match="name"):
        save(rank, 10, name="../elsewhere")


def test_exception_in_the_block_removes_the_draft_and_is_passed_on(rank: Any) -> None:
    reporter = Reporter(rank.environ)

    def fail(directory: Path) -> None:
        (directory / "weights").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), reporter.phase("evaluating"), reporter.checkpoint(step=1) as directory:
        fail(directory)
    assert on_disk(rank) == []
    assert rank.events_of("checkpoint") == []
    assert [event["phase"] for event in rank.events_of("phase")][-2:] == ["evaluating", "training"]


def test_commit_of_what_is_no_plain_file_is_refused(rank: Any) -> None:
    for leave in (
        lambda directory: (directory / "link").symlink_to("/etc/hostname"),
        lambda directory: (directory / "manifest.json").write_text("{}"),
        lambda directory: os.mkfifo(directory / "pipe"),
    ):
        with pytest.raises(ValueError, match=r"link|manifest|pipe"), Reporter(rank.environ).checkpoint(step=1) as there:
            leave(there)
    assert on_disk(rank) == []


def test_commit_by_a_stale_attempt_is_refused(rank: Any) -> None:
    save(rank, 1)
    reporter = Reporter(rank.environ)
    with pytest.raises(NotOwnerError, match=r"job-1\.2"), reporter.checkpoint(step=2):
        rank.own("of another attempt")
    assert on_disk(rank) == ["checkpoint-1"]
    assert len(rank.events_of("checkpoint")) == 1


def test_commit_for_a_deleted_job_is_refused(rank: Any) -> None:
    Path(rank.environ[environment.OWNER_FILE]).unlink()
    with pytest.raises(NotOwnerError):
        save(rank, 1)


def test_commit_that_nobody_can_be_told_of_raises(rank: Any) -> None:
    rank.environ[environment.EVENTS_FILE] = "/dev/full"
    with pytest.raises(OSError, match="No space left"):
        save(rank, 1)


def test_commit_asks_the_server_until_it_answers(rank: Any) -> None:
    yes = {"status": "ok", "data": {"owner": True}}
    with owner_server([None, (503, {}), (200, yes)]) as (url, asked):
        rank.environ[environment.OWNER_URL] = url
        save(rank, 1)
    assert asked == ["Bearer ours"] * 3
    assert listed(rank) == ["checkpoint-1"]


@pytest.mark.parametrize("answer", [(200, {"status": "ok", "data": {"owner": False}}), (401, {}), (404, {})])
def test_commit_that_the_server_refuses_leaves_nothing(rank: Any, answer: tuple[int, dict[str, Any]]) -> None:
    with owner_server([answer]) as (url, _):
        rank.environ[environment.OWNER_URL] = url
        with pytest.raises(NotOwnerError):
            save(rank, 1)
    assert on_disk(rank) == []


def test_kill_while_the_job_writes_leaves_nothing_listed(rank: Any) -> None:
    with rank.start(SAVE, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "written\n"
        process.kill()
    assert len(on_disk(rank)) == 1
    assert listed(rank) == []
    assert rank.events_of("checkpoint") == []


def test_kill_between_seal_and_rename_leaves_nothing_listed_and_the_next_save_tidies(rank: Any) -> None:
    with owner_server([]) as (url, asked):
        rank.environ[environment.OWNER_URL] = url
        with rank.start(SAVE, stdin=subprocess.PIPE) as process:
            process.stdin.write("\n")
            process.stdin.flush()
            while not asked:
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
    (left,) = on_disk(rank)
    assert (Path(rank.environ[environment.CHECKPOINT_DIR]) / left / "manifest.json").exists()
    assert listed(rank) == []

    del rank.environ[environment.OWNER_URL]
    save(rank, 6)
    assert on_disk(rank) == ["checkpoint-6"]


def test_draft_that_somebody_still_writes_is_left_alone_until_its_attempt_is_over(rank: Any) -> None:
    with rank.start(SAVE, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "written\n"
        save(rank, 6)
        assert len(on_disk(rank)) == 2
        rank.environ[environment.ATTEMPT] = "3"
        save(rank, 7)
        assert on_disk(rank) == ["checkpoint-6", "checkpoint-7"]
        process.kill()


def test_verify_names_the_file_that_differs(rank: Any) -> None:
    path = save(rank, 1)
    weights = path / "model" / "weights"
    weights.write_bytes(b"WEIGHTS")
    with pytest.raises(CorruptCheckpointError, match="model/weights"):
        verify(path)
    weights.unlink()
    with pytest.raises(CorruptCheckpointError, match="model/weights: No such file"):
        verify(path)


def test_verify_of_what_was_never_committed_is_corrupt(tmp_path: Path) -> None:
    assert not committed(tmp_path)
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
        verify(tmp_path)
    (tmp_path / "manifest.json").write_text('{"files": []')
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
        verify(tmp_path)


def test_save_larger_than_the_disk_is_refused_before_it_starts(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Reporter(rank.environ)
    with reporter.checkpoint(step=1) as directory:
        (directory / "weights").write_bytes(b"w" * 1000)
    usage = shutil.disk_usage(rank.directory)._replace(free=600)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    told = r"No space left .* 1000 bytes, 600 bytes are free, 400 bytes are missing"
    with pytest.raises(OSError, match=told), reporter.checkpoint(step=2):
        pytest.fail("there is no room for another of the same size")
    assert on_disk(rank) == ["checkpoint-1"]


def test_commit_elsewhere_is_told_with_its_place_and_what_is_known_of_it(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    manifest = reporter.new_manifest(step=7, epoch=2.0, metrics={"loss": 0.5, "bad": float("nan")})
    assert (manifest.job_id, manifest.attempt, manifest.world_size) == ("job-1", 2, 4)
    assert manifest.metrics == {"loss": 0.5}
    reporter.committed(manifest, "s3://bucket/prefix/7", took_s=1.25)
    (event,) = rank.events_of("checkpoint")
    told = (event["checkpoint_id"], event["path"], event["step"], event["duration_s"])
    assert told == (manifest.checkpoint_id, "s3://bucket/prefix/7", 7, 1.25)


def test_commit_to_an_object_store_is_told_by_its_uri_and_resumed_from(
    rank: Any, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(rank.directory))
    monkeypatch.setattr("tempfile.tempdir", None)
    rank.environ[environment.CHECKPOINT_DIR] = s3_root
    for content in (b"first", b"second"):
        with Reporter(rank.environ).checkpoint(step=10) as directory:
            (directory / "weights").write_bytes(content)
    places = [event["path"] for event in rank.events_of("checkpoint")]
    assert places == [f"{s3_root}/checkpoint-10", f"{s3_root}/checkpoint-10-attempt-2"]
    with pytest.raises(NotOwnerError), Reporter(rank.environ).checkpoint(step=11):
        rank.own("of another attempt")
    assert open_root(s3_root).committed() == ["checkpoint-10", "checkpoint-10-attempt-2"]

    rank.environ[environment.RESUME_FROM] = places[1]
    reporter = Reporter(rank.environ)
    path = reporter.resume_path()
    assert path is not None
    assert reporter.resume_from() == places[1]
    assert ((path / "weights").read_bytes(), verify(path).step) == (b"second", 10)
    assert reporter.resume_path() == path


def test_checkpoint_with_too_many_metrics_is_told_with_some(rank: Any) -> None:
    names = [f"{number}-" + "\N{HOT BEVERAGE}" * 300 for number in range(2000)]
    save(rank, 1, metrics=dict.fromkeys(names, 1.0), epoch=float("nan"))
    (event,) = rank.events_of("checkpoint")
    assert len(event["metrics"]) == 200
    assert event["epoch"] is None
    assert Path(rank.environ[environment.EVENTS_FILE]).stat().st_size < 1 << 20
