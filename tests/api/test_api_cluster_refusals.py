"""Changes of queues and nodes that are refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
from api_world import EVERYTHING, Api, World

from trainmaster.server.core.resources import Node
from trainmaster.server.store import nodes


@pytest.fixture(scope="module")
def node(world: World) -> None:
    """A node that is there."""
    values: dict[str, Any] = {"hostname": "n1", "cpu_cores": 64, "ram_mb": 64_000, "storage_mb": 1_000_000}
    found = Node(node_id="n1", backend="local", last_seen_at=time.time(), **values)
    world.database.write_now(lambda connection: nodes.put(connection, EVERYTHING, [found]))


@pytest.mark.parametrize(
    ("body", "field"),
    [({"weight": 0}, "weight"), ({"weight": "2"}, "weight"), ({"quota_gpus": -1}, "quota_gpus"), ({"wait": 1}, "wait")],
)
def test_queue_with_a_bad_value_is_refused(api: Api, body: dict[str, Any], field: str) -> None:
    assert api.call("PUT", "/v1/queues/night", 422, json=body)["details"][0]["field"] == field


def test_queue_with_a_bad_name_is_refused_in_words(api: Api) -> None:
    assert "letters" in api.call("PUT", "/v1/queues/a b", 422, json={})["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", "drain", {"force": "yes"}, "force"),
        ("POST", "drain", {"grace_seconds": -1}, "grace_seconds"),
        ("POST", "drain", {"why": ""}, "why"),
        ("POST", "enable", {"force": True}, "force"),
        ("PATCH", "", {"labels": ["=a"]}, "labels[0]"),
        ("PATCH", "", {"state": "READY"}, "state"),
    ],
)
@pytest.mark.usefixtures("node")
def test_bad_change_of_a_node_is_refused(api: Api, method: str, path: str, body: dict[str, Any], field: str) -> None:
    route = f"/v1/nodes/n1/{path}".rstrip("/")
    assert api.call(method, route, 422, json=body)["details"][0]["field"] == field
    assert api.call("GET", "/v1/nodes/n1")["state"] == "READY"


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("GET", "/v1/nodes/nope"),
        ("GET", "/v1/nodes/nope/events"),
        ("POST", "/v1/nodes/nope/drain"),
        ("POST", "/v1/nodes/nope/enable"),
        ("PATCH", "/v1/nodes/nope"),
    ],
)
def test_unknown_node_is_not_found(api: Api, method: str, route: str) -> None:
    assert "nope" in api.call(method, route, 404)["message"]
