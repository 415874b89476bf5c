from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from trainmaster import __version__
from trainmaster.client import Client, LocalServerError, local
from trainmaster.protocol.processes import identity_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINMASTER_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TRAINMASTER_URL", raising=False)
    monkeypatch.delenv("TRAINMASTER_API_KEY", raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


class Answers(BaseHTTPRequestHandler):
    """Well, whatever is asked; and repeats the key that it was given."""

    def do_GET(self) -> None:
        body = json.dumps({"status": "ok", "data": {"key": self.headers["Authorization"]}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    """Where something answers, in this very process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def announce(home: Path, url: str, *, version: str = __version__, **changes: object) -> None:
    identity = identity_of(os.getpid())
    assert identity is not None
    (home / "api-key").write_text("eyJkey\n")
    (home / "server.json").write_text(json.dumps({"url": url, "version": version, **identity.to_json(), **changes}))


def test_server_that_runs_and_answers_is_found(home: Path, url: str) -> None:
    announce(home, url)

    server = local.find()

    assert server is not None
    assert (server.url, server.api_key, server.process.pid, server.data_dir) == (url, "eyJkey", os.getpid(), home)
    assert local.start() == server


def test_nothing_is_found_where_nothing_was_started() -> None:
    assert local.find() is None
    assert local.running() is None
    assert local.stop() is False


@pytest.mark.parametrize("change", [{"start_time": 1}, {"boot_id": "another"}, {"pid": 2**22 + 1}, {"pid": "x"}])
def test_server_that_is_gone_is_not_found(home: Path, url: str, change: dict[str, object]) -> None:
    announce(home, url, **change)

    assert local.find() is None
    assert local.stop() is False


def test_half_a_file_is_no_server(home: Path) -> None:
    (home / "server.json").write_text('{"url": "http')

    assert local.find() is None


def test_server_that_does_not_answer_runs_but_is_not_found(home: Path) -> None:
    announce(home, "http://127.0.0.1:1")

    assert local.find() is None
    assert local.running() is not None


def test_server_of_another_major_version_is_refused(home: Path, url: str) -> None:
    announce(home, url, version="999.0.0")

    with pytest.raises(LocalServerError, match=r"version 999\.0\.0"):
        local.find()


def test_key_of_the_local_server_is_used_when_its_address_is_named(home: Path, url: str) -> None:
    announce(home, url)

    with Client(url + "/") as client:
        assert client.health()["key"] == "Bearer eyJkey"


def test_key_of_the_local_server_is_given_to_no_other(home: Path, url: str) -> None:
    announce(home, "http://127.0.0.1:1")

    with Client(url) as client:
        assert client.health()["key"] is None


def test_directory_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINMASTER_HOME", str(tmp_path / "file" / "home"))

    with pytest.raises(LocalServerError, match="set TRAINMASTER_HOME"):
        local.start()
