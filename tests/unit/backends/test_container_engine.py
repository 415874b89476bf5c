"""Which engine is taken, that it is not swapped for another, and that one which hangs holds nobody up for long."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import pytest

from patience import PATIENCE_S
from trainmaster.backends.container import connection as connecting
from trainmaster.backends.container.engine import (
    ContainerEngine,
    EngineAwayError,
    NoSuchCommandError,
    RefusedByEngineError,
    TookTooLongError,
)


class Answers(BaseHTTPRequestHandler):
    """What an engine says, by its path."""

    protocol_version = "HTTP/1.1"
    name = ""
    said: dict[str, tuple[int, bytes]] = {}
    never = threading.Event()

    def address_string(self) -> str:
        return "here"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0].rpartition("v1.41/")[2]
        if path not in self.said:
            self.never.wait(10)
        status, body = self.said[path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if self.name == "podman":
            self.send_header("Libpod-API-Version", "4.0.0")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        self.do_GET()


class Listener(ThreadingUnixStreamServer):
    """Takes no notice of clients that have heard enough."""

    daemon_threads, block_on_close = True, False

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def engine_at(path: Path, name: str, **said: tuple[int, bytes]) -> Iterator[str]:
    """A socket where something answers as such an engine; its address."""
    answers = {path.replace("__", "/"): answer for path, answer in said.items()}
    told = {
        "/_ping": (200, b"OK"),
        "containers/x": (404, b'{"message": "there is none"}'),
        "containers/create": (201, b"{}"),
        **answers,
    }
    handler = type("Told", (Answers,), {"said": told, "name": name, "never": threading.Event()})
    path.unlink(missing_ok=True)
    with Listener(str(path), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"unix://{path}"
        finally:
            handler.never.set()
            server.shutdown()
            path.unlink()


@pytest.fixture
def made() -> Iterator[Callable[..., ContainerEngine]]:
    """Makes clients, and closes them in the end."""
    with ExitStack() as stack:

        def make(*settings: Any, **more: Any) -> ContainerEngine:
            engine = ContainerEngine(*settings, **more)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where engines are looked for."""
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(connecting, "_hosts", lambda: [f"unix://{first}", f"unix://{second}"])
    monkeypatch.setattr(connecting, "_AWAY_S", 0.0)
    return first, second


def test_an_engine_that_is_away_is_not_taken_for_another_one_also_by_the_next_server(
    places: tuple[Path, Path], tmp_path: Path, made: Callable[..., ContainerEngine]
) -> None:
    first, second = places
    mark = tmp_path / "used"
    engine = made(mark=mark)
    with engine_at(second, "podman"):
        with engine_at(first, "docker"):
            assert (engine.name, engine.host) == ("docker", f"unix://{first}")
            assert not mark.exists()
            engine.create("x", {"HostConfig": {}})
        engine.close()
        for each in (engine, made(mark=mark), made(f"unix://{first}", mark=mark)):
            with pytest.raises(EngineAwayError, match="docker, which has this server's containers, does not answer"):
                each.remove("x")
            assert each.name == "docker"
        # Also where it was itself.
        with engine_at(first, "podman"), pytest.raises(EngineAwayError, match="it is podman, and not docker"):
            engine.remove("x")
        # Only by what the settings say; and the containers are there from then on.
        assert made(f"unix://{second}", mark=mark).name == "podman"
        other = made(runtime="podman", mark=mark)
        other.create("x", {"HostConfig": {}})
        assert made(mark=mark).host == f"unix://{second}"
    with engine_at(first, "docker"):
        engine.remove("x")
    mark.write_text("")  # as a server before may have left it
    with engine_at(second, "podman"):
        assert made(mark=mark).name == "podman"


def test_an_engine_that_hangs_is_given_up_soon_and_once_for_all_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[..., ContainerEngine]
) -> None:
    monkeypatch.setattr(connecting, "_CONNECT_TIMEOUT_S", 3.0)
    path, problems = tmp_path / "hangs", []
    with socket.socket(socket.AF_UNIX) as hangs:
        hangs.bind(str(path))
        hangs.listen(64)
        engine = made(f"unix://{path}")

        def ask() -> None:
            with pytest.raises(EngineAwayError, match="timed out") as problem:
                engine.remove("x")
            problems.append(str(problem.value))

        began = time.monotonic()
        asking = [threading.Thread(target=ask) for _ in range(8)]
        for thread in asking:
            thread.start()
        engine.close()
        assert time.monotonic() - began < 2.8
        for thread in asking:
            thread.join(PATIENCE_S)
        assert (len(problems), len(set(problems))) == (8, 1)
        assert time.monotonic() - began < 2 * 3.0 + 10  # and not eight times as long


def test_an_engine_that_is_away_leaves_no_socket_open(tmp_path: Path, made: Callable[..., ContainerEngine]) -> None:
    with engine_at(tmp_path / "e", "docker") as host:
        engine = made(host)
        assert engine.name == "docker"
    gc.collect()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(2):  # with the connection that it had, and with a new one
            with pytest.raises(EngineAwayError):
                engine.remove("x")
        gc.collect()
    assert [str(one.message) for one in warned] == []


def test_an_image_lacks_a_program_only_where_the_engine_says_so_of_that_program(
    tmp_path: Path, made: Callable[..., ContainerEngine]
) -> None:
    def refusal(said: str) -> type[Exception]:
        answers = {
            "containers__x__start": (400, json.dumps({"message": said}).encode()),
            "containers__x__json": (200, b'{"Path": "python3"}'),
        }
        with engine_at(tmp_path / "e", "docker", **answers) as host, pytest.raises(Exception) as error:  # noqa: PT011
            made(host).start("x")
        return error.type

    assert refusal('runc: exec: "python3": executable file not found in $PATH') is NoSuchCommandError
    assert refusal('exec: "python3": permission denied') is NoSuchCommandError
    assert refusal("statfs /data/python3: no such file or directory") is RefusedByEngineError
    assert refusal('error mounting "/x" to rootfs: permission denied') is RefusedByEngineError


def test_what_a_container_says_is_read_up_to_a_limit_and_its_end_awaited_up_to_one(
    tmp_path: Path, made: Callable[..., ContainerEngine]
) -> None:
    said = b"".join(b"\x01\0\0\0" + len(line).to_bytes(4) + line for line in [b"hello\n"] + [b"x" * 1000] * 1_000)
    with engine_at(tmp_path / "e", "docker", containers__x__logs=(200, said)) as host:
        engine = made(host)
        output = engine.output("x")
        assert output.startswith("hello\nxxx")
        assert len(output) < 20_000
        with pytest.raises(TookTooLongError):
            engine.wait("x", 0.2)


def test_a_pull_of_which_nothing_is_heard_any_more_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[..., ContainerEngine]
) -> None:
    monkeypatch.setattr(connecting, "_SILENT_S", 0.2)
    with engine_at(tmp_path / "e", "docker") as host, pytest.raises(EngineAwayError, match="timed out"):
        list(made(host).pull("registry.example/image:1"))
