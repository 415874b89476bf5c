"""Every request that a `tinker` client can make, made of a server and a trainer that run; and what is no request.

What becomes of each is on the page `docs/reference/compatibility.md`, and this holds the server to it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from tinker_calls import CALLS, PASS, Plain

from client_model import HUB_NAME
from client_programs import PROGRAMS, Client, facts
from patience import PATIENCE_S
from process_signals import kill_marked
from real_server import RealServer, running, wait_for

SILENT_S = 20
WEEK_S = 7 * 86400
SLEEPER = str(PROGRAMS / "tinker_silence.py")
BEAT_S = 3.0
RETRIED = (408, 409, 429)
"""Statuses, beside those from 500 on, that clients take for a fault of the moment."""
POLLS = ("POST /retrieve_future", "POST /retrieve_futures", "POST /cancel_future")
"""Whose answers name futures, and are none."""
TAKE_ANYTHING = ("POST /telemetry", "POST /client/config", "POST /client/dynamic_config")
"""Where a body is not read, or not kept: clients send it again and again until it is taken."""
NEED_NOTHING = (*TAKE_ANYTHING, "POST /sessions/search")
SENT = [name for name in CALLS if name.startswith(("POST", "PUT")) and not name.endswith("/publish")]
"""The requests with a body."""

NO_REQUESTS = {
    "words": b"not JSON",
    "bytes": b"\xff\xfe\x00",
    "list": b"[]",
    "null": b"null",
    "number": b"5",
    "text": b'"text"',
    "half": b'{"model_id": "m',
    "deep list": b"[" * 5000 + b"]" * 5000,
    "deep object": b'{"model_id":' * 5000,
    "not a number": b'{"session_id": NaN, "model_id": NaN, "sampling_session_id": NaN}',
}
WRONG_VALUES: Mapping[str, Any] = {
    "null": None,
    "bool": True,
    "number": 5,
    "fraction": 1.5,
    "negative": -1,
    "beyond 64 bits": 2**70,
    "words": "nonsense",
    "empty text": "",
    "half a character": "\ud800",
    "NUL": "a\0b",
    "long text": "x" * (10 << 20),
    "list": [],
    "list of numbers": [1],
    "object": {},
    "objects": {"a": {"b": 1}},
}
DEPTHS = (60, 64, 70, 900, 950, 980, 5000)
"""Around what JSON may have here, and what Python reads and cannot write."""
IDS = ("session_id", "model_id", "sampling_session_id", "request_id", "tinker_path", "project_id")


@pytest.fixture(scope="module")
def service_server(ground: Path) -> Iterator[RealServer]:
    """A server that takes clients for dead as soon as one may."""
    flags = ["--data-root", str(ground), "--model-alias", f"{HUB_NAME}={ground / 'model'}"]
    with running(ground / "data", *flags, TRAINMASTER_TINKER_SILENT_S=str(SILENT_S)) as started:
        yield started
        assert "Traceback" not in started.log_text(), started.log_text()[-4000:]
        [job] = started.data("GET", "/v1/jobs")["jobs"]
        lines = started.lines(job["job_id"])
        assert not [line for line in lines if "Traceback" in line], lines[-50:]


@pytest.fixture(scope="module")
def left_behind(client: Callable[[str], Client], service_server: RealServer) -> str:
    """The model of a client that was killed."""
    found: dict[str, Any] = {}

    def kill(said: dict[str, Any]) -> None:
        found.update(said)
        kill_marked(said["pid"], str(PROGRAMS / "tinker_refused.py"))

    with contextlib.suppress(AssertionError, BrokenPipeError):  # that it did not come to its end
        client("tinker").scenarios("tinker_refused.py", "left_behind", asked={"kill me": kill})
    return str(found["model_id"])


@pytest.fixture(scope="module")
def plain(left_behind: str, service_server: RealServer) -> Iterator[Plain]:
    """A client that lives, as its heartbeats show."""
    ended = threading.Event()
    with (
        httpx.Client(timeout=PATIENCE_S, trust_env=False) as http,
        httpx.Client(timeout=PATIENCE_S, trust_env=False) as other,
    ):
        made = Plain(server=service_server, http=http).prepare()
        beats = Plain(server=service_server, http=other)

        def beat() -> None:
            while not ended.wait(BEAT_S):
                beats.post("session_heartbeat", {"session_id": made.session_id})

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield made
        finally:
            ended.set()
            thread.join()


@pytest.fixture(scope="module")
def refusals(client: Callable[[str], Client], plain: Plain) -> dict[str, Any]:
    """What the latest client has to say of what is refused."""
    return client("tinker").scenarios("tinker_refused.py", "refused", "arguments")


def outcome(plain: Plain, request: str, answer: httpx.Response) -> Any:
    """What an answer says in the end, which is what its future says where it is the id of one."""
    document = answer.json()
    if answer.status_code == 200 and request not in POLLS and "request_id" in document:
        return plain.result(document)
    return document


def complaint(document: Any) -> str:
    """What an answer has to say of what is wrong."""
    error = document.get("error", document)
    return str(error.get("message", error) if isinstance(error, dict) else error)


# -- what there is --


@pytest.mark.parametrize("request_name", CALLS)
def test_request_is_answered_as_the_page_says(plain: Plain, compatibility: ModuleType, request_name: str) -> None:
    path, body = CALLS[request_name](plain)
    answer = plain.request(request_name.partition(" ")[0], path, body)
    said = outcome(plain, request_name, answer)
    if compatibility.kind_of(request_name) == "works":
        assert answer.status_code == 200, answer.text
        assert "error" not in said, said
        return
    assert answer.status_code < 500
    assert answer.status_code not in RETRIED
    assert compatibility.route_of(request_name).note in complaint(said)
    if answer.status_code == 200:
        assert said.get("category") == "user" or said.get("status") == "failed", said


def test_refused_methods_tell_the_reason_at_once(
    refusals: dict[str, Any], compatibility: ModuleType, latest: dict[str, Any], plain: Plain
) -> None:
    methods = latest["methods"]
    expected = {
        name: why for name in methods for kind, why in [compatibility.fate_of(methods[name])] if kind == "refused"
    }
    found = facts(refusals, "refused")
    assert set(found["errors"]) == set(expected)
    for name, error in found["errors"].items():
        # That there are no tokens is found out by the client itself.
        assert ("JWT" if name == "RestClient.whoami" else expected[name]) in error["message"], error
        assert error["seconds"] < 5, error
    assert found["next"].endswith("/weights/after")


def test_refused_arguments_are_told_by_their_names_at_once(refusals: dict[str, Any], compatibility: ModuleType) -> None:
    expected = {
        f"{method} {argument}": name
        for method, arguments in compatibility.REFUSED_ARGUMENTS.items()
        for argument, name in arguments.items()
    }
    found = facts(refusals, "arguments")
    assert set(found) == set(expected)
    for name, error in found.items():
        assert expected[name] in error["message"], error
        assert error["seconds"] < 5, error


# -- what is no request --


@pytest.mark.parametrize("request_name", [name for name in SENT if name not in TAKE_ANYTHING])
def test_what_is_no_request_is_refused(plain: Plain, request_name: str) -> None:
    method, _, path = request_name.partition(" ")
    path = CALLS[request_name](plain)[0] if "{}" in path else path
    for name, garbage in NO_REQUESTS.items():
        answer = plain.request(method, path, garbage)
        said = outcome(plain, request_name, answer)
        assert 400 <= answer.status_code < 500 or said.get("category") == "user", (name, answer.status_code, said)
        assert 10 < len(complaint(said)) < 1000, (name, said)


@pytest.mark.parametrize("request_name", SENT)
def test_wrong_values_are_refused_or_do_no_harm(plain: Plain, request_name: str) -> None:
    plain = plain.with_another_model()
    method = request_name.partition(" ")[0]
    path, body = CALLS[request_name](plain)
    for field, value, content in list(wrong(body)):
        answer = plain.request(method, path, json.dumps({**body, field: "@"}).replace('"@"', content).encode())
        said = outcome(plain, request_name, answer)
        where = (field, content[:40], answer.status_code, said)
        assert answer.status_code < 500, where
        if answer.status_code >= 400:
            assert 10 < len(complaint(said)) < 5000, where
        elif "error" in said:
            assert said.get("category") == "user", where
        if field in IDS and not isinstance(value, str) and request_name not in NEED_NOTHING:
            assert answer.status_code >= 400 or "error" in said, where
        if answer.status_code == 200 and field not in ("model_id", "seq_id"):
            path, body = CALLS[request_name](plain)  # that one was counted
    if "model_id" in body and "seq_id" in body:
        plain.result(plain.request(method, path, body).json())
        assert plain.done("forward_backward", plain.work(forward_backward_input=PASS))["metrics"]


def wrong(body: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Each field with each wrong value, and how that is written."""
    for field in body:
        for name, value in WRONG_VALUES.items():
            # Whole weights instead of an adapter are another trainer; and other numbers are somebody else's.
            if (field, name) not in (("lora_config", "null"), ("seq_id", "number"), ("seq_id", "bool")):
                yield field, value, json.dumps(value)
        for depth in DEPTHS:
            yield field, [], "[" * depth + "]" * depth


# -- who is gone, or sleeps longer than the server waits --


def test_models_of_a_client_that_died_are_let_go(plain: Plain, left_behind: str) -> None:
    session_id = left_behind.partition(":")[0]

    def status() -> Any:
        [session] = plain.post("sessions/search", {"session_id": session_id}).json()["sessions"]
        return session["status"] if (session["status"] or {}).get("type") == "client_finished" else None

    assert wait_for(status, "the session to be ended")["reason"] == {"type": "interrupted"}

    numbers = itertools.count(1)  # a number that was used before would be answered with the result of then

    def gone() -> Any:
        body = {"model_id": left_behind, "seq_id": next(numbers), "forward_backward_input": PASS}
        return plain.result(plain.post("forward_backward", body).json()).get("error")

    assert "was unloaded with its session" in wait_for(gone)
    # Who is there keeps what it has.
    assert plain.done("forward_backward", plain.work(forward_backward_input=PASS))["metrics"]


@pytest.mark.long  # tests/trainer_service/test_service_silence.py
def test_client_that_slept_goes_on_to_the_bit(client: Callable[[str], Client], service_server: RealServer) -> None:
    """Its unsaved model is saved for it, and goes on from there."""

    def sleep(said: dict[str, Any]) -> Any:
        """Until what it has not saved is on record."""
        stem = said["model_id"].replace(":", "-")
        kill_marked(said["pid"], SLEEPER, signal.SIGSTOP)
        try:
            return wait_for(lambda: saved(stem), f"a checkpoint of {said['model_id']}")
        finally:
            kill_marked(said["pid"], SLEEPER, signal.SIGCONT)

    def saved(stem: str) -> Any:
        [job] = service_server.data("GET", "/v1/jobs")["jobs"]
        listed = service_server.data("GET", f"/v1/jobs/{job['job_id']}/checkpoints?page_size=1000")["checkpoints"]
        return next((each for each in listed if each["name"].startswith(stem)), None)

    results = client("tinker").scenarios("tinker_silence.py", asked={"put me to sleep until it is saved": sleep})
    found = facts(results, "slept")
    assert found["saved"]["name"].endswith("-step-2")
    assert found["saved"]["name"] in found["woken"]["message"]
    assert found["woken"]["category"].lower().endswith("server")
    expires_at = datetime.fromisoformat(found["saved"]["expires_at"]).timestamp()
    assert expires_at == pytest.approx(time.time() + WEEK_S, abs=300)
    assert found["interrupted"] == found["uninterrupted"]
    assert len(set(found["uninterrupted"])) == 5
