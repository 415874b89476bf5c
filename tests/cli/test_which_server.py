"""Which server a command talks to: variables, a login, the local one; and what it says of a wrong one."""

from __future__ import annotations

import http.server
import json
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cli_server import Server
from typer.testing import Result

from trainmaster.client import Client, connection, local
from trainmaster.client.server_lookup import load_login, login_file
from trainmaster.trainer import TrainerClient

Tm = Callable[..., Result]


@pytest.fixture
def local_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server as the local one: found in TRAINMASTER_HOME, named by no variable."""
    monkeypatch.setenv("TRAINMASTER_HOME", str(server.directory))
    return server


def error_of(result: Result) -> Any:
    assert isinstance(result.exception, SystemExit), result.exception
    return json.loads(result.stdout)["error"]


@pytest.mark.usefixtures("local_server")
def test_wrong_key_without_a_url_is_not_ignored(tm: Tm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tm("ps").exit_code == 0
    monkeypatch.setenv("TRAINMASTER_API_KEY", "wrong")

    result = tm("ps", "--json")

    assert result.exit_code == 1
    assert error_of(result)["code"] == "AUTH_TOKEN_INVALID"
    assert "TRAINMASTER_API_KEY" in result.stderr
    assert "unset it" in result.stderr


@pytest.mark.usefixtures("local_server")
def test_key_of_another_account_is_used_without_a_url(tm: Tm, monkeypatch: pytest.MonkeyPatch) -> None:
    tm("accounts", "create", "research")
    made = json.loads(
        tm("keys", "create", "--account", "research", "--name", "ci", "--scopes", "view", "--json").stdout
    )
    monkeypatch.setenv("TRAINMASTER_API_KEY", made["key"])

    assert "ci of account research" in tm("login").stdout


@pytest.mark.parametrize("key", ["wröng", "two words", "a\nb"])
@pytest.mark.usefixtures("local_server")
def test_key_that_no_request_can_hold_is_a_sentence(tm: Tm, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TRAINMASTER_API_KEY", key)

    result = tm("ps", "--json")

    assert "copy it again" in error_of(result)["message"]


class Foreign(http.server.BaseHTTPRequestHandler):
    """Somebody else's service: `answer` is what it says to everything."""

    answer: tuple[int, dict[str, str], bytes] = (200, {}, b"")

    def do_GET(self) -> None:
        status, headers, body = self.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Stay quiet."""


@pytest.fixture(scope="module")
def foreign_url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{service.server_address[1]}"
        service.shutdown()
        thread.join()


@pytest.fixture
def foreign(foreign_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINMASTER_URL", foreign_url)
    monkeypatch.setenv("TRAINMASTER_API_KEY", "a-key")


ANSWERS: dict[str, tuple[int, dict[str, str], bytes]] = {
    "a page": (200, {"Content-Type": "text/html"}, b"<html>hello</html>"),
    "nothing": (200, {}, b""),
    "another object": (200, {"Content-Type": "application/json"}, b'{"version": "1.0"}'),
    "a list": (200, {"Content-Type": "application/json"}, b"[1, 2]"),
    "not found": (404, {"Content-Type": "text/html"}, b"<html>no such page</html>"),
    "another error": (400, {"Content-Type": "application/json"}, b'{"error": "bad request"}'),
    "forbidden": (403, {}, b"go away"),
    "a redirect": (301, {"Location": "https://example.com/"}, b""),
    "broken compression": (200, {"Content-Encoding": "gzip"}, b"this is no gzip"),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("command", [("ps",), ("show", "first"), ("nodes",), ("submit", "job.yaml")], ids=" ".join)
@pytest.mark.usefixtures("foreign")
def test_foreign_service_is_a_sentence(
    tm: Tm, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], answer: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("name: a\nworkload: {kind: command, argv: ['true']}\n")
    monkeypatch.setattr(Foreign, "answer", answer)

    result = tm(*command, "--json")

    assert result.exit_code == 3, result.output
    error = error_of(result)
    assert error["code"] == "UNREACHABLE"
    assert "TRAINMASTER_URL" in result.stderr
    if "gzip" not in str(answer):
        assert "is not a Trainmaster server" in error["message"]


@pytest.mark.parametrize("url", ["localhost:7070", "http://[bad", "ftp://host", "http://host:99999", "http://"])
def test_url_that_is_none_is_a_sentence(tm: Tm, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("TRAINMASTER_URL", url)

    assert "is no URL of a server" in error_of(tm("ps", "--json"))["message"]
    assert "is no URL of a server" in tm("doctor").stdout


def test_login_is_used_until_logout(tm: Tm, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tm("login", f"{server.url}/", stdin=f"{server.api_key}\n")

    assert result.exit_code == 0, result.output
    assert server.url in result.stdout
    assert "first of account default" in result.stdout
    assert server.api_key not in result.output
    assert stat.S_IMODE(login_file().stat().st_mode) == 0o600
    with Client() as client:
        assert client.url == server.url
        assert client.admin.own_key()["name"] == "first"
    with TrainerClient() as trainer:
        assert trainer.backend.url == server.url
        assert "trainmaster login" in trainer.backend.why
    assert tm("ps").exit_code == 0
    assert json.loads(tm("login", "--json").stdout) | {"key": None} == {
        "url": server.url,
        "source": "login",
        "key": None,
    }
    assert local.running() is None, "no local server was started"

    # Variables win over the login.
    monkeypatch.setattr(connection, "RETRY_DELAYS_S", ())
    monkeypatch.setenv("TRAINMASTER_URL", "http://127.0.0.1:1")
    assert tm("ps").exit_code == 3
    monkeypatch.setenv("TRAINMASTER_URL", server.url)
    assert tm("ps").exit_code == 0, "the key of the login belongs to this URL"
    monkeypatch.delenv("TRAINMASTER_URL")
    monkeypatch.setenv("TRAINMASTER_API_KEY", "wrong")
    assert error_of(tm("ps", "--json"))["code"] == "AUTH_TOKEN_INVALID"
    monkeypatch.delenv("TRAINMASTER_API_KEY")

    assert "Logged out" in tm("logout").stdout
    assert not login_file().exists()
    assert "Not logged in" in tm("login").stdout
    assert tm("logout").stdout == "Not logged in.\n"


def test_login_to_what_is_no_url_is_refused_before_a_key_is_asked_for(tm: Tm) -> None:
    result = tm("login", "train.example.com", stdin="key\n")

    assert result.exit_code == 2
    assert "'train.example.com' is not a URL" in result.stderr
    assert load_login() is None


def test_login_with_a_wrong_key_saves_nothing(tm: Tm, server: Server) -> None:
    result = tm("login", server.url, "--json", stdin="wrong\n")

    assert error_of(result)["code"] == "AUTH_TOKEN_INVALID"
    assert load_login() is None
    assert "no API key was given" in tm("login", server.url, stdin="\n").stderr


def test_login_that_is_broken_is_a_sentence_and_logout_mends_it(tm: Tm) -> None:
    login_file().parent.mkdir()
    login_file().write_text("{")

    assert "trainmaster logout" in tm("ps").stderr
    doctor = tm("doctor", "--json")
    assert doctor.exit_code == 1
    assert "trainmaster logout" in doctor.stdout
    assert tm("logout").exit_code == 0
    assert "Not logged in" in tm("login").stdout
