"""A base model on a disk that does not answer: whoever asks for it waits, and nobody else does."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_world import Served, World
from fireworks_world import MODEL, Door, door_of, knowing

from patience import PATIENCE_S
from trainmaster.protocol.account_files import open_real

SERVICE = {"name": "t", "workload": {"kind": "trainer_service", "base_model": MODEL, "lora_rank": 8}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def served(world: World, directory: Path) -> Iterator[Served]:
    with knowing(world, directory) as served:
        yield served


@pytest.fixture
def door(world: World, served: Served) -> Iterator[Door]:
    with door_of(world, served, f"account-{secrets.token_hex(4)}") as door:
        yield door


def submitted(door: Door) -> Any:
    return door.call("POST", "/v1/jobs", 201, json=SERVICE)


def validated(door: Door) -> Any:
    return door.call("POST", "/v1/jobs/validate", json=SERVICE)


def created(door: Door) -> Any:
    return door.create("job-slow")


@pytest.mark.parametrize("ask", [submitted, validated, created])
def test_model_that_cannot_be_read_yet_keeps_nobody_else_waiting(
    door: Door, ask: Callable[[Door], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def slow(path: Path, within: Sequence[Path]) -> int:
        assert answers.wait(PATIENCE_S)
        return open_real(path, within)

    monkeypatch.setattr("trainmaster.server.coordinator.base_models.open_real", slow)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, door)
        try:
            for _ in range(20):
                door.call("GET", "/v1/jobs", timeout=PATIENCE_S / 2)
                assert not asking.done()
        finally:
            answers.set()
        asking.result(PATIENCE_S)


def test_config_that_is_a_pipe_is_refused_at_once(door: Door, directory: Path) -> None:
    [config] = directory.rglob("config.json")
    before = config.read_bytes()
    config.unlink()
    os.mkfifo(config)  # to open it would wait for somebody who writes
    try:
        answer = door.call("POST", "/v1/jobs", 400, json=SERVICE)
        assert "has no config.json that can be read" in str(answer)
    finally:
        config.unlink()
        config.write_bytes(before)
