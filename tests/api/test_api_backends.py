"""Where jobs can run, and what is refused before it waits for something that no backend has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_world import VAULT, Api, Served, World

from trainmaster.backends import capabilities_of
from trainmaster.protocol.launch import CONTAINER, LOCAL
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.core.reports import EngineFacts

ENGINES: dict[str, EngineFacts | None] = {LOCAL: None, CONTAINER: EngineFacts(name="podman", host="unix:///a.sock")}
JOB: dict[str, Any] = {"name": "n", "workload": {"kind": "command", "argv": ["true"]}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server that has both backends, and no image of its own."""
    directory: Path = tmp_path_factory.mktemp("backends")
    with World.open(directory) as world:
        world.commands = Commands(
            world.database,
            admission=Admission(
                backends={name: capabilities_of(name) for name in (CONTAINER, LOCAL)}, default_backend=LOCAL
            ),
            vault=VAULT,
            hint=lambda subject: None,
        )
        yield world


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[Served]:
    with Served.serve(world.context(engine=ENGINES.get)) as served:
        yield served


def test_backends_are_listed_with_the_default_first(api: Api) -> None:
    assert api.call("GET", "/v1/backends") == {
        "backends": [
            {"name": "local", "default": True, "images": False, "here": True, "kind": "local", "options": None},
            {"name": "container", "default": False, "images": True, "here": True, "kind": "container", "options": None},
        ]
    }


def test_backend_is_shown_with_its_engine_and_one_that_is_not_there_with_the_remedy(api: Api) -> None:
    engine = {"name": "podman", "host": "unix:///a.sock", "problem": None}
    assert api.call("GET", "/v1/backends/container")["engine"] == engine
    assert api.call("GET", "/v1/backends/local")["engine"] is None
    answer = api.http.get("/v1/backends/slurm")
    assert answer.status_code == 404
    assert "it has: container, local" in answer.text


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/validate"])
def test_job_without_an_image_is_refused_where_it_would_need_one(api: Api, path: str) -> None:
    answer = api.http.post(path, json={**JOB, "backend": CONTAINER})
    assert answer.status_code == 400
    (problem,) = answer.json()["error"]["details"]
    assert problem["field"] == "workload.image"
    for word in ("names none", "CustomTrainer(image=...)", "container_image"):
        assert word in problem["message"]
    assert api.http.post(path, json=JOB).is_success
    in_image = {**JOB, "backend": CONTAINER, "workload": {**JOB["workload"], "image": "image"}}
    assert api.http.post(path, json=in_image).is_success
