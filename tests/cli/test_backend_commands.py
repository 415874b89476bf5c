"""Commands about backends, against a real server with a cluster that does not answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from typer.testing import Result

from trainmaster.cli.commands import backends, show
from trainmaster.client import Client
from trainmaster.client.types import Job

pytestmark = pytest.mark.usefixtures("connected")

Tm = Callable[..., Result]


@pytest.fixture
def pool(tm: Tm, client: Client) -> Iterator[str]:
    added = tm(
        "backends", "add", "pool", "--kind", "ray", "--set", "address=http://127.0.0.1:9", "--set", "token=geheim"
    )
    assert added.exit_code == 0, added.stderr
    assert "trainmaster backends test pool" in added.stdout
    yield "pool"
    client.cluster.remove_backend("pool")


def test_backends_are_listed_with_what_was_said_of_them_first(tm: Tm, pool: str) -> None:
    (row,) = (line for line in tm("backends").stdout.splitlines() if line.startswith(pool))
    assert row.split()[1:4] == ["ray", "address=http://127.0.0.1:9", "token=***"]
    assert tm("backends", "list").stdout == tm("backends").stdout
    (listed,) = (each for each in json.loads(tm("backends", "--json").stdout) if each["name"] == pool)
    assert list(listed["options"])[:2] == ["address", "token"]
    assert (listed["options"]["poll_s"], listed["options"]["headers"]) == (1.0, None)


def test_backend_is_shown_with_its_options_and_what_is_wrong_with_its_engine(tm: Tm, pool: str) -> None:
    shown = tm("backends", "show", pool)
    assert shown.exit_code == 0
    assert "poll_s" in shown.stdout
    assert "geheim" not in shown.stdout
    assert "is the Ray cluster up, and the option address right?" in shown.stdout
    tm("backends", "add", pool, "--kind", "ray", "--set", "address=http://127.0.0.1:11")
    assert "http://127.0.0.1:11: ConnectError" in tm("backends", "show", pool).stdout
    tested = tm("backends", "test", pool)
    assert tested.exit_code == 1
    assert "is the Ray cluster up" in tested.stderr


def test_doctor_looks_at_the_clusters(tm: Tm, pool: str) -> None:
    (found,) = (each for each in json.loads(tm("doctor", "--json").stdout) if each["check"] == pool)
    assert found["verdict"] == "fail"
    assert "is the Ray cluster up" in found["remedy"]


def test_wrong_options_are_usage_errors_with_a_remedy(tm: Tm) -> None:
    refused = tm("backends", "add", "pool", "--kind", "ray", "--set", "address=ray-head:8265")
    assert refused.exit_code != 0
    assert "such as `http://ray-head:8265`" in refused.stderr
    assert "write KEY=VALUE" in tm("backends", "add", "pool", "--kind", "ray", "--set", "address").stderr


@pytest.mark.parametrize(
    ("nodes", "gpus", "told"),
    [
        (["gpu-1", "gpu-2"], 0, "hpc: gpu-1, gpu-2"),
        (["hpc", "hpc"], 8, "hpc: 2 nodes, 8 GPUs"),
        (["hpc"], 1, "hpc: 1 node, 1 GPU"),
    ],
)
def test_nodes_that_an_engine_chooses_are_counted(nodes: list[str], gpus: int, told: str) -> None:
    placement = {"backend": "hpc", "nodes": nodes, "gpus": [{}] * gpus}
    assert show._placement({"placement": placement}) == told  # type: ignore[typeddict-item]


def test_a_test_of_a_backend_tells_each_wait_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ["waits 9 s more before its next try (full)", "waits 8 s more before its next try (full)", "placed", ""]

    class Waiting:
        def get(self, job_id: str) -> Job:
            message = said.pop(0)
            return {"status": "QUEUED" if message else "COMPLETED", "pending_reason": message, "status_message": ""}  # type: ignore[typeddict-item]

    monkeypatch.setattr(backends, "LOOK_EVERY_S", 0.0)
    backends._followed(Waiting(), "job-1", deadline=float("inf"))  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines() == [
        "QUEUED: waits 9 s more before its next try (full)",
        "QUEUED: placed",
    ]
