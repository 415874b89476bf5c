"""Commands about nodes and queues, against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cli_server import Server
from typer.testing import Result

from trainmaster.client import Client, NotFoundError

pytestmark = pytest.mark.usefixtures("connected")

Tm = Callable[..., Result]
Submit = Callable[..., str]
Wait = Callable[..., Any]


@pytest.fixture
def node(client: Client) -> Iterator[str]:
    """The server's node, which accepts jobs again after the test."""
    node_id = client.cluster.nodes()[0]["id"]
    yield node_id
    client.cluster.enable(node_id)
    client.cluster.change_node(node_id, labels=[], capabilities=[])


@pytest.fixture
def queue(client: Client) -> Iterator[str]:
    client.cluster.put_queue("night", weight=2, quota_gpus=8)
    yield "night"
    client.cluster.delete_queue("night")


def test_why_says_what_would_let_a_job_run(tm: Tm, submit: Submit, status: Wait) -> None:
    waits = {"allow_waiting_for_nodes": True}
    job_id = submit("true", resource_config={"gpu_count": 0, "cpu_cores": 4096}, scheduling_config=waits)
    status(job_id, "QUEUED")

    told = tm("why", job_id)

    assert told.exit_code == 0
    assert "no node has 4096 cores" in told.stdout
    assert "in queue default" in told.stdout
    assert "never, as things are" in told.stdout
    assert "would start if it asked for at most" in told.stdout
    document = json.loads(tm("why", job_id, "--json").stdout)
    assert (document["job_id"], document["pending"]["code"]) == (job_id, "IMPOSSIBLE")


def test_why_of_a_failed_job_gives_the_error_and_what_to_do(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("echo a last word; exit 3")
    status(job_id, "FAILED")

    told = tm("why", job_id).stdout

    assert "FAILED" in told
    assert "exit" in told
    assert "a last word" in told


def test_why_of_a_job_that_does_not_wait_says_so(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("while true; do sleep 0.05; done")
    status(job_id, "TRAINING")
    assert "does not wait: it is TRAINING" in tm("why", job_id).stdout
    done = submit("true")
    status(done, "COMPLETED")
    assert "is COMPLETED" in tm("why", done).stdout


def test_drained_node_takes_no_work_until_it_is_enabled(tm: Tm, node: str, submit: Submit, status: Wait) -> None:
    drained = tm("drain", node, "--reason", "new disks", "--wait")
    assert drained.exit_code == 0
    assert "is drained" in drained.stdout
    row = next(line for line in tm("nodes").stdout.splitlines() if line.startswith(node))
    assert "DRAINED (new disks)" in row
    job_id = submit("true")
    status(job_id, "QUEUED")
    assert "new disks" in tm("why", job_id).stdout
    assert json.loads(tm("enable", node, "--json").stdout)["state"] == "READY"
    status(job_id, "COMPLETED")
    shown = tm("nodes", node).stdout
    assert "node_enabled" in shown
    assert "new disks" in shown


def test_grace_period_of_a_drain_that_stops_nothing_is_wrong_usage(tm: Tm, node: str) -> None:
    result = tm("drain", node, "--grace-seconds", "5")
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert json.loads(tm("nodes", node, "--json").stdout)["state"] == "READY"


def test_unknown_node_is_refused(tm: Tm) -> None:
    for command in (("drain", "nope"), ("enable", "nope"), ("nodes", "nope")):
        result = tm(*command)
        assert result.exit_code == 1
        assert "there is no node nope" in result.stderr


def test_node_is_given_labels_and_capabilities_and_loses_them(tm: Tm, node: str) -> None:
    given = json.loads(tm("nodes", node, "--label", "zone=a", "--capability", "nvlink", "--json").stdout)
    assert (given["given_labels"], given["given_capabilities"]) == (["zone=a"], ["nvlink"])
    kept = json.loads(tm("nodes", node, "--label", "rack=1", "--no-capability", "nvlink", "--json").stdout)
    assert (kept["given_labels"], kept["given_capabilities"]) == (["zone=a", "rack=1"], [])
    assert "zone=a (given)" in tm("nodes", node).stdout
    assert "no operator set" in tm("nodes", node, "--unlabel", "zone=b").stderr
    assert tm("nodes", "--label", "zone=a").exit_code == 2


def test_queues_are_listed_set_and_removed(tm: Tm, client: Client) -> None:
    assert (
        "is new, with weight 2 and a quota of 8 GPUs"
        in tm("queues", "set", "eve", "--weight", "2", "--quota", "8").stdout
    )
    assert "weight 3 and a quota of 8 GPUs" in tm("queues", "set", "eve", "--weight", "3").stdout
    assert json.loads(tm("queues", "set", "eve", "--no-quota", "--json").stdout)["quota_gpus"] is None
    row = next(line for line in tm("queues").stdout.splitlines() if line.startswith("eve"))
    assert row.split()[1] == "3"
    assert {queue["name"] for queue in json.loads(tm("queues", "--json").stdout)} >= {"default", "eve"}
    assert tm("queues", "remove", "eve").stdout == "Queue eve is removed.\n"
    with pytest.raises(NotFoundError):
        client.cluster.delete_queue("eve")


def test_queue_set_with_both_quotas_is_wrong_usage(tm: Tm) -> None:
    assert tm("queues", "set", "eve", "--quota", "8", "--no-quota").exit_code == 2
    assert tm("queues", "set", "eve", "--weight", "0").exit_code == 1


def test_queue_that_is_in_use_says_how_to_empty_it(tm: Tm, queue: str, submit: Submit, client: Client) -> None:
    config = {"gpu_count": 0, "cpu_cores": 4096}
    scheduling = {"queue": queue, "allow_waiting_for_nodes": True}
    job_id = submit("true", resource_config=config, scheduling_config=scheduling)
    result = tm("queues", "remove", queue)
    assert result.exit_code == 1
    assert "trainmaster edit --queue" in result.stderr
    shown = tm("queues", "show", queue).stdout
    assert job_id in shown
    assert "no node has 4096 cores" in shown
    assert [entry["job_id"] for entry in json.loads(tm("queues", "show", queue, "--json").stdout)] == [job_id]
    client.cancel(job_id)
    assert tm("queues", "show", queue).stdout == "Nothing waits in queue night.\n"


def test_summary_names_the_leader(client: Client, server: Server) -> None:
    summary = client.cluster.summary()
    assert summary["leader"] is not None
    assert summary["leader"]["url"] == server.url
    assert summary["nodes"]["READY"] >= 1
