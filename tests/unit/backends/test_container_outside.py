"""What becomes of a rank when its engine fails, which a real one does not do on cue."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainmaster.backends.container import container_process, supervision
from trainmaster.backends.container.engine import (
    ContainerEngine,
    ContainerEngineError,
    EngineAwayError,
    NoSuchCommandError,
    RefusedByEngineError,
)
from trainmaster.backends.container.supervision import End, run_container
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.run_directory import RunDirectory, exit_document
from trainmaster.protocol.secrets import NO_SECRETS


class FailingEngine(ContainerEngine):
    """Has one container, and fails as it is told to: method -> the errors of its next calls."""

    def __init__(self, code: int = 0, said: bytes = b"", **failures: Any) -> None:
        super().__init__("unix:///nowhere")
        self.code, self.said, self.failures = code, said, failures
        self.calls: list[str] = []
        self.is_there: str | None = None

    def call(self, method: str) -> None:
        self.calls.append(method)
        if left := self.failures.get(method):
            raise left.pop(0)

    def create(self, name: str, document: Any) -> None:
        self.call("create")
        self.is_there = "created"

    def start(self, name: str) -> None:
        self.is_there = "exited"
        self.call("start")

    def state(self, name: str) -> str | None:
        return self.is_there

    def process(self, name: str) -> int | None:
        self.call("process")
        return None

    def wait(self, name: str, timeout_s: float | None = None) -> int:
        self.call("wait")
        return self.code

    def follow(self, name: str, channel: str) -> Iterator[bytes]:
        self.call("follow")
        yield self.said if channel == "stdout" else b""

    def output(self, name: str, *, lines: int = 20) -> str:
        self.call("output")
        return self.said.decode()

    def ran_out_of_memory(self, name: str) -> bool:
        self.call("ran_out_of_memory")
        return False

    def remove(self, name: str) -> None:
        self.call("remove")


@pytest.fixture
def planned(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "nodes/0").mkdir(parents=True)
    labels = {"trainmaster.keep": "no", "trainmaster.run-dir": str(tmp_path), "trainmaster.node": "0"}
    document = {"Labels": labels, "Env": [], "HostConfig": {"Mounts": []}}
    return {"names": ["tm-1"], "document": document, "reports": False, "secrets": None}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "AWAY_S", 0.01)
    monkeypatch.setattr(container_process, "AWAY_S", 0.01)


def ended(engine: FailingEngine, planned: dict[str, Any]) -> End:
    return run_container(engine, planned, {"LOCAL_RANK": "0"}, ["x"])


def test_rank_that_has_done_its_work_has_whatever_the_engine_says_afterwards(planned: dict[str, Any]) -> None:
    away = EngineAwayError("timed out")
    engine = FailingEngine(process=[ContainerEngineError("500")], wait=[away], remove=[away])
    assert ended(engine, planned) == End(code=0)
    assert ended(FailingEngine(137, ran_out_of_memory=[away]), planned) == End(code=137)


def test_engine_that_is_away_is_waited_for_and_nothing_is_started_twice(planned: dict[str, Any]) -> None:
    engine = FailingEngine(3, create=[EngineAwayError("refused")], start=[EngineAwayError("the answer was lost")])
    assert ended(engine, planned) == End(code=3)
    assert (engine.calls.count("create"), engine.calls.count("start")) == (2, 1)


@pytest.mark.parametrize(
    ("method", "error", "reason"),
    [
        ("create", RefusedByEngineError("no such image"), Reason.LAUNCH_REFUSED),
        ("start", ContainerEngineError("500: port in use"), Reason.ENGINE_UNAVAILABLE),
        ("create", OSError(errno.ELOOP, "a link"), Reason.LAUNCH_REFUSED),
        ("create", OSError(errno.ENOSPC, "full"), Reason.STORAGE_UNAVAILABLE),
        ("create", ValueError("a defect"), Reason.WORKER_LOST),
    ],
)
def test_what_the_engine_does_not_start_is_no_exit_of_the_job(
    planned: dict[str, Any], method: str, error: Exception, reason: Reason
) -> None:
    end = ended(FailingEngine(**{method: [error]}), planned)
    assert (end.reason, str(error) in end.message or repr(error) in end.message) == (reason, True)


def test_program_that_the_image_has_not_is_the_jobs_own_mistake(planned: dict[str, Any]) -> None:
    assert ended(FailingEngine(start=[NoSuchCommandError("no x")]), planned) == End(code=127)


def test_engine_that_stays_away_is_given_up(planned: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_ENGINE_S", 0.05)
    end = ended(FailingEngine(create=[EngineAwayError("no engine")] * 1000), planned)
    assert (end.reason, end.message) == (Reason.ENGINE_UNAVAILABLE, "no engine")


def test_container_that_is_removed_costs_no_time(planned: dict[str, Any]) -> None:
    class Removing(FailingEngine):
        def follow(self, name: str, channel: str) -> Iterator[bytes]:
            self.is_there = None
            raise RefusedByEngineError("404")

        def wait(self, name: str, timeout_s: float | None = None) -> int:
            raise ContainerEngineError("404")

    began = time.monotonic()
    end = ended(Removing(), planned)
    assert (end.reason, "was removed" in end.message) == (Reason.WORKER_LOST, True)
    assert time.monotonic() - began < 60


def test_output_waits_for_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    write, full = os.write, [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "full")]

    def written(descriptor: int, data: bytes) -> int:
        if descriptor != 1:
            return write(descriptor, data)
        if full:
            raise full.pop()
        return write(writer, data[:4])

    monkeypatch.setattr(os, "write", written)
    code = container_process.followed(FailingEngine(said=b"a long line\n"), "tm-1", process=None, copies=True)
    assert (code, os.read(reader, 100)) == (0, b"a long line\n")
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_node_whose_worker_dies_inside_says_what_it_said(
    planned: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = FailingEngine(1, said=b"no module named trainmaster")
    supervision._become_node(engine, {**planned, "secrets": str(tmp_path / "secrets")}, NO_SECRETS)
    written = RunDirectory(tmp_path).document(exit_document(0))
    assert written is not None
    assert written["reason"] == Reason.WORKER_LOST
    assert "exit code 1: no module named trainmaster" in written["message"]
    # Its output is nobody's log out here.
    assert "follow" not in engine.calls
    assert capfd.readouterr().out == ""
