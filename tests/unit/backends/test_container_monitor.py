"""Looking after containers by what a scripted engine tells of them, whatever their jobs have written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from trainmaster.backends.container import monitor
from trainmaster.backends.container.engine import Container, ContainerEngine, ContainerEngineError
from trainmaster.backends.container.monitor import ContainerMonitor
from trainmaster.protocol.processes import boot_id
from trainmaster.protocol.run_directory import MOST_CLAIM_BYTES, MOST_DOCUMENT_BYTES, RunDirectory, exit_document


class ScriptedEngine:
    """Containers and networks that are what a test says they are."""

    def __init__(self) -> None:
        self.there: dict[str, Container] = {}
        self.nets: dict[str, Mapping[str, str]] = {}
        self.joined: set[tuple[str, str]] = set()
        self.exit_codes: dict[str, int] = {}

    def containers(self, label: str) -> list[Container]:
        assert label == "trainmaster.runs=/runs"
        return list(self.there.values())

    def networks(self, label: str) -> dict[str, Mapping[str, str]]:
        assert label == "trainmaster.runs=/runs"
        return dict(self.nets)

    def process(self, name: str) -> None:
        assert name in self.there

    def exit_code(self, name: str) -> int | None:
        return self.exit_codes.get(name)

    def ran_out_of_memory(self, name: str) -> bool:
        return name in self.exit_codes

    def kill(self, name: str) -> None:
        self.there[name] = replace(self.there[name], state="exited")

    def remove(self, name: str) -> None:
        del self.there[name]
        self.joined = {(network, joined) for network, joined in self.joined if joined != name}

    def disconnect(self, network: str, name: str) -> None:
        self.joined.discard((network, name))

    def remove_network(self, name: str) -> None:
        if any(network == name for network, _ in self.joined):
            raise ContainerEngineError("network is being used")
        del self.nets[name]


class Yard:
    """Run directories, their containers and networks, and who looks after them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.engine = ScriptedEngine()
        self.monitor = ContainerMonitor(cast(ContainerEngine, self.engine), Path("/runs"), self.engine.remove)

    def add(self, job: str, *, state: str = "running", keep: str = "no", **documents: Any) -> RunDirectory:
        """A job of one node with its container and network; documents are texts, by `claim` and `exit`."""
        directory = RunDirectory(self.place / job / "1")
        for name in ("claims", "nodes/0"):
            (directory.path / name).mkdir(parents=True)
        for kind, name in (("claim", "claims/0.json"), ("exit", exit_document(0))):
            if kind in documents:
                (directory.path / name).write_text(documents[kind])
        attempt = {"trainmaster.attempt": f"{job}.1", "trainmaster.run-dir": str(directory.path)}
        labels = {**attempt, "trainmaster.node": "0", "trainmaster.keep": keep}
        self.engine.there[job] = Container(name=job, state=state, labels=labels)
        self.engine.nets[f"net-{job}"] = {**attempt, "trainmaster.nodes": "1"}
        self.engine.joined.add((f"net-{job}", job))
        return directory


@pytest.fixture
def yard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Yard:
    monkeypatch.setattr(monitor, "_LINGERS_S", 0.0)
    monkeypatch.setattr(monitor, "_NETWORKS_EVERY_S", 0.0)
    return Yard(tmp_path)


@pytest.mark.parametrize("ended_at", ["1e18", '"x"', "null", "-1e999", "[" * 1000])
def test_a_container_that_says_it_has_ended_is_ended_whatever_it_says_of_when(yard: Yard, ended_at: str) -> None:
    exits = f'{{"reason": "SUCCEEDED", "ended_at": {ended_at}}}'
    yard.add("goes", exit=exits)
    yard.add("kept", exit=exits, keep="yes")
    runs = yard.add("runs")
    for _ in range(2):
        yard.monitor.poll()
    assert {name: each.state for name, each in yard.engine.there.items()} == {"kept": "exited", "runs": "running"}
    (runs.path / exit_document(0)).write_text(exits)
    yard.monitor.poll()
    (runs.path / exit_document(0)).unlink()  # too late
    yard.monitor.poll()
    assert "runs" not in yard.engine.there


def test_a_container_ends_with_its_attempt_though_nobody_saw_it_say_so(yard: Yard) -> None:
    yard.add("job", claim="{}").close()
    for _ in range(2):
        yard.monitor.poll()
    assert (yard.engine.there, yard.engine.nets) == ({}, {})


@pytest.mark.parametrize(
    "claim",
    [
        {"pid": 1},
        {"pid": "x", "start_time": 1, "boot_id": boot_id()},
        {"pid": 10**4000, "start_time": 1, "boot_id": boot_id()},
        {"pid": 1, "start_time": float("inf"), "boot_id": boot_id()},
        {"pid": [1], "start_time": 1, "boot_id": None},
    ],
)
def test_no_claim_of_a_job_keeps_the_networks_of_others(yard: Yard, claim: dict[str, Any]) -> None:
    for job in ("forges", "other"):
        yard.add(job, claim=json.dumps(claim if job == "forges" else {"nonce": "1"}))
        yard.engine.remove(job)
    yard.engine.joined.clear()
    yard.engine.nets = {"foreign": {}, **yard.engine.nets}
    yard.monitor.poll()
    assert list(yard.engine.nets) == ["foreign"]


def test_a_network_goes_though_a_container_that_has_ended_is_kept(yard: Yard) -> None:
    yard.add("kept", state="exited", keep="yes", claim="{}", exit="{}")
    yard.add("runs", claim="{}")
    yard.monitor.poll()
    assert (set(yard.engine.there), set(yard.engine.nets)) == ({"kept", "runs"}, {"net-runs"})


def test_a_container_that_was_not_killed_was_not_out_of_memory(yard: Yard) -> None:
    directory = yard.add("job", state="exited")
    for code, is_told in ((1, False), (143, False), (137, True)):
        yard.engine.exit_codes["job"] = code
        yard.monitor.tell_memory("job", directory, 0)
        assert (directory.document(exit_document(0)) is not None) is is_told


def test_what_a_job_writes_is_not_parsed_at_any_length(yard: Yard) -> None:
    directory = yard.add("job", claim=json.dumps({"nonce": "1" * MOST_CLAIM_BYTES}))
    assert directory.claimant(0) == {}
    for length, is_read in ((MOST_DOCUMENT_BYTES - 10, True), (MOST_DOCUMENT_BYTES + 10, False)):
        (directory.path / exit_document(0)).write_text("{}" + " " * length)
        assert (directory.document(exit_document(0)) is not None) is is_read
