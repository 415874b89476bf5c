"""What starts the worker of a node where Trainmaster is not installed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trainmaster.backends.worker_package import package_digest, packed_worker
from trainmaster.worker import bootstrap

SPEC = {"attempt_id": "job-1.1", "digest": package_digest()}


@contextmanager
def serving(answers: list[bytes]) -> Iterator[str]:
    """A server that answers with one after another."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answers.pop(0)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "damaged",
    [
        lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:],
        lambda data: data[:-32] + b"0" * 16 + data[-16:],
        lambda data: data[: len(data) // 2],
        lambda data: b"<html>",
    ],
    ids=["a bit", "of other sources", "cut off", "another page"],
)
def test_a_worker_that_arrives_damaged_is_fetched_again(
    tmp_path: Path, damaged: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap.time, "sleep", lambda _: None)
    whole = packed_worker(tmp_path).read_bytes()
    with serving([damaged(whole), whole]) as url:
        assert bootstrap.fetch({**SPEC, "server_url": url}, "token", None) == whole


def test_workers_that_share_a_directory_and_have_the_same_process_id_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "worker.pyz"
    replace = os.replace

    def other_is_faster(draft: str, path: str) -> None:
        monkeypatch.setattr(os, "replace", replace)
        bootstrap.write(path, b"worker")
        replace(draft, path)

    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "replace", other_is_faster)
    bootstrap.write(str(target), b"worker")
    assert target.read_bytes() == b"worker"
    assert os.listdir(tmp_path) == ["worker.pyz"]
