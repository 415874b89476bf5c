"""`update_trainjob_status`: what is sent, how often, and that nothing can go wrong for the training."""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from real_server import wait_for
from tls_files import self_signed
from trainmaster.trainer import status, update_trainjob_status


class Taker:
    """A server that takes reports, and answers as it is told."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.seen: list[tuple[str, str | None, Any]] = []
        self.answer = 200
        self.wait = threading.Event()
        self.wait.set()
        taker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                taker.seen.append((self.path, self.headers["Authorization"], body["trainerStatus"]))
                taker.wait.wait(5)
                self.send_response(taker.answer)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has reported nothing yet."""
    monkeypatch.setattr(status, "_reports", status.Reports())


@pytest.fixture
def taker() -> Iterator[Taker]:
    made = Taker()
    yield made
    made.close()


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taker: Taker) -> Path:
    """The token's file, in an environment in which reports arrive."""
    file = tmp_path / "token"
    file.write_text("sesame\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{taker.server.server_port}/a/b?c=d")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(file))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    return file


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pause between two reports."""
    monkeypatch.setattr(status, "INTERVAL_S", 0.0)


@pytest.mark.usefixtures("token")
def test_report_has_progress_and_metrics_as_text(taker: Taker) -> None:
    assert update_trainjob_status(150, -4, {"loss": 0.5, "step": 3, "note": "x", "bad": float("nan")}) is True
    [(path, authorization, sent)] = taker.seen
    assert (path, authorization) == ("/a/b?c=d", "Bearer sesame")
    assert datetime.fromisoformat(sent.pop("lastUpdatedTime")).tzinfo is not None
    assert sent == {
        "progressPercentage": 100,
        "estimatedRemainingSeconds": 0,
        "metrics": [
            {"name": "loss", "value": "0.5"},
            {"name": "step", "value": "3"},
            {"name": "note", "value": "x"},
            {"name": "bad", "value": "nan"},
        ],
    }


@pytest.mark.usefixtures("token", "often")
def test_what_is_not_known_is_not_sent(taker: Taker) -> None:
    assert update_trainjob_status() is True
    assert update_trainjob_status(progress_percent=0, metrics={}) is True
    assert [set(sent) for _, _, sent in taker.seen] == [
        {"lastUpdatedTime"},
        {"lastUpdatedTime", "progressPercentage"},
    ]


@pytest.mark.usefixtures("token")
def test_metrics_beyond_the_limit_are_left_out(taker: Taker) -> None:
    assert update_trainjob_status(metrics={f"m{number}": number for number in range(300)}) is True
    [(_, _, sent)] = taker.seen
    assert [metric["name"] for metric in sent["metrics"]] == [f"m{number}" for number in range(256)]


@pytest.mark.usefixtures("token")
def test_only_a_report_that_arrived_holds_back_the_next(taker: Taker) -> None:
    taker.answer = 503
    assert update_trainjob_status(1) is False
    taker.answer = 200
    assert update_trainjob_status(2) is True
    assert update_trainjob_status(3) is False
    assert [sent["progressPercentage"] for _, _, sent in taker.seen] == [1, 2]


@pytest.mark.usefixtures("token")
def test_last_report_is_sent_at_the_end_where_it_was_held_back(taker: Taker) -> None:
    assert [update_trainjob_status(percent) for percent in (1, 50, 100)] == [True, False, False]
    status.send_last_report()
    status.send_last_report()
    assert [sent["progressPercentage"] for _, _, sent in taker.seen] == [1, 100]


@pytest.mark.usefixtures("token")
def test_child_does_not_send_what_its_parent_held_back(taker: Taker) -> None:
    assert [update_trainjob_status(percent) for percent in (1, 100)] == [True, False]
    status._reports.renew()
    status.send_last_report()
    assert len(taker.seen) == 1


@pytest.mark.usefixtures("token", "often")
@pytest.mark.parametrize("answer", [201, 204, 307, 401, 500])
def test_every_answer_but_200_is_a_failure(taker: Taker, answer: int) -> None:
    taker.answer = answer
    assert update_trainjob_status(1) is False
    assert len(taker.seen) == 1, "a redirect would carry the token elsewhere"


@pytest.mark.usefixtures("often")
def test_token_is_read_again_once_it_is_refused(taker: Taker, token: Path) -> None:
    assert update_trainjob_status(1) is True
    token.write_text("changed")
    assert update_trainjob_status(2) is True
    taker.answer = 401
    assert update_trainjob_status(3) is False
    taker.answer = 200
    assert update_trainjob_status(4) is True
    assert [said for _, said, _ in taker.seen] == [*["Bearer sesame"] * 3, "Bearer changed"]


@pytest.mark.usefixtures("often")
def test_token_is_read_again_once_it_is_old(taker: Taker, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert update_trainjob_status(1) is True
    token.write_text("changed")
    monkeypatch.setattr(status, "TOKEN_AGE_S", -1.0)
    assert update_trainjob_status(2) is True
    assert taker.seen[-1][1] == "Bearer changed"


@pytest.mark.usefixtures("token", "often")
def test_report_of_another_thread_is_not_waited_for(taker: Taker) -> None:
    taker.wait.clear()
    answers: list[bool] = []
    first = threading.Thread(target=lambda: answers.append(update_trainjob_status(1)))
    first.start()
    wait_for(lambda: taker.seen, "the first report")
    assert update_trainjob_status(2) is False
    taker.wait.set()
    first.join()
    assert answers == [True]
    assert len(taker.seen) == 1


def test_certificate_is_checked_against_the_one_that_is_named(
    token: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    secure = Taker(context)
    try:
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://127.0.0.1:{secure.server.server_port}")
        assert update_trainjob_status(1) is False, "nobody vouches for it"
        assert secure.seen == []
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(files.cert))
        assert update_trainjob_status(1) is True
        assert secure.seen[0][:2] == ("/", f"Bearer {token.read_text().strip()}")
    finally:
        secure.close()


def test_outside_of_a_job_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KUBEFLOW_TRAINER_SERVER")]:
        monkeypatch.delenv(name)
    assert update_trainjob_status(1) is False


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KUBEFLOW_TRAINER_SERVER_TOKEN", ""),
        ("KUBEFLOW_TRAINER_SERVER_TOKEN", "/nowhere/token"),
        ("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:1/"),
        ("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:none/"),
        ("KUBEFLOW_TRAINER_SERVER_URL", "nonsense"),
    ],
)
def test_surroundings_that_are_wrong_only_lose_the_report(
    monkeypatch: pytest.MonkeyPatch, taker: Taker, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert update_trainjob_status(1) is False
    assert taker.seen == []


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("given", [("x",), (float("nan"),), (1, "soon"), (1, 1, "loss"), (1, 1, [1])])
def test_values_that_are_wrong_only_lose_the_report(taker: Taker, given: tuple[Any, ...]) -> None:
    assert update_trainjob_status(*given) is False
    assert taker.seen == []
