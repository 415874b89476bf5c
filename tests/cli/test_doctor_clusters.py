"""What `trainmaster doctor` says of the clusters that a server declares, whatever their kind."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.cli.commands.doctor import FAIL, OK, WARN, of_cluster

BACKEND: dict[str, Any] = {
    "name": "hpc",
    "kind": "slurm",
    "engine": {"name": "Slurm 24.05", "host": "test, partition low", "problem": None},
    "server_url": "http://10.0.0.1:7070",
    "unreachable": None,
}
READY = {"hostname": "n1", "state": "READY", "gpus": [{}, {}], "drain_reason": None}
DRAINED = {**READY, "hostname": "n2", "state": "DRAINED", "drain_reason": "a broken fan"}


def findings(nodes: list[dict[str, Any]], **changes: Any) -> list[tuple[str, str, str, str]]:
    found = of_cluster({**BACKEND, **changes}, nodes)  # type: ignore[typeddict-item, arg-type]
    return [(each.check, each.verdict, each.found, each.remedy) for each in found]


def test_a_cluster_that_is_well_has_its_engine_its_nodes_and_the_way_to_the_server() -> None:
    assert findings([READY, DRAINED]) == [
        ("hpc", OK, "Slurm 24.05, test, partition low", ""),
        ("hpc: nodes", OK, "1 of 2 usable, with 2 GPUs", ""),
        ("hpc: workers", OK, "reach the server at http://10.0.0.1:7070", ""),
    ]


def test_an_engine_that_does_not_answer_is_broken_with_its_remedy() -> None:
    engine = {"name": None, "host": None, "problem": "start munged on this machine"}
    first, nodes, _ = findings([], engine=engine)
    assert first == ("hpc", FAIL, "no slurm answers", "start munged on this machine")
    assert nodes == ("hpc: nodes", WARN, "none is known", "")


def test_a_cluster_without_a_usable_node_says_why_there_is_none() -> None:
    _, nodes, _ = findings([DRAINED])
    assert nodes[1:3] == (WARN, "0 of 1 usable, with 0 GPUs")
    assert nodes[3].endswith("n2 is DRAINED a broken fan")
    _, none, _ = findings([])
    assert none == (
        "hpc: nodes",
        WARN,
        "none is known",
        "jobs wait until the engine has a node for them; see its own list of nodes",
    )


def test_workers_that_cannot_reach_the_server_are_broken_with_the_remedy() -> None:
    *_, workers = findings([READY], server_url="http://127.0.0.1:7070", unreachable="set the setting advertise_url")
    assert workers[1:] == (FAIL, "cannot reach the server at http://127.0.0.1:7070", "set the setting advertise_url")


@pytest.mark.parametrize("server_url", [None, ""])
def test_a_cluster_whose_workers_need_no_address_has_no_finding_about_it(server_url: str | None) -> None:
    assert len(findings([READY], server_url=server_url)) == 2


def test_a_server_that_runs_no_jobs_knows_no_engine() -> None:
    ((_, verdict, found, remedy),) = findings([], engine=None)
    assert (verdict, found) == (WARN, "slurm: this server does not run jobs, and knows no engine")
    assert "role coordinator" in remedy
