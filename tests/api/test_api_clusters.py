"""Clusters: operators declare them, everybody sees them without their secrets, and jobs may name them at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from api_world import SEALER, VAULT, Api, Served, World
from pydantic import Field, SecretStr

from trainmaster import backends
from trainmaster.backends import CLUSTER_KINDS, ClusterKind, capabilities_of
from trainmaster.backends.cluster.engine import ClusterOptions
from trainmaster.protocol.launch import LOCAL
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.clusters import Clusters, KnownBackends
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.core.resources import Gpu, Node
from trainmaster.server.store import clusters, nodes
from trainmaster.server.store.scope import Scope

EVERYTHING = Scope.everything()
JOB: dict[str, Any] = {"name": "n", "backend": "hpc", "workload": {"kind": "command", "argv": ["true"]}}


class ToyOptions(ClusterOptions):
    """Of clusters that only this test has."""

    partition: str
    password: SecretStr = Field(default=SecretStr(""), description="A secret.")


@pytest.fixture(autouse=True)
def toy_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = ClusterKind(
        engine="scripted_engine:ScriptedEngine",
        options=f"{__name__}:ToyOptions",
        capabilities=next(iter(CLUSTER_KINDS.values())).capabilities,
    )
    kinds: Mapping[str, ClusterKind] = MappingProxyType({**CLUSTER_KINDS, "toy": toy})
    for module in (backends, "trainmaster.backends.cluster.kinds", "trainmaster.server.coordinator.clusters"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.CLUSTER_KINDS", kinds)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World.open(tmp_path) as world:
        yield world


@pytest.fixture
def served(world: World) -> Iterator[Served]:
    declared = Clusters(world.database, SEALER)
    known = KnownBackends({LOCAL: capabilities_of(LOCAL)}, declared)
    world.commands = Commands(
        world.database,
        admission=Admission(backends=known, default_backend=LOCAL, server_url="http://127.0.0.1:7070"),
        vault=VAULT,
        hint=lambda subject: None,
    )
    with Served.serve(world.context(clusters=declared)) as served:
        yield served


def add(api: Api, name: str = "hpc", **options: Any) -> Any:
    return api.call("PUT", f"/v1/backends/{name}", json={"kind": "toy", "options": {"partition": "low", **options}})


def test_a_cluster_is_listed_and_jobs_may_name_it_at_once(api: Api) -> None:
    assert api.http.post("/v1/jobs", json=JOB).status_code == 400
    added = add(api, password="geheim", work_dir="/scratch")
    assert (added["name"], added["kind"], added["default"], added["here"]) == ("hpc", "toy", False, False)
    options = added["options"]
    assert (options["partition"], options["password"], options["work_dir"]) == ("low", "***", "/scratch")
    listed = api.call("GET", "/v1/backends")["backends"]
    assert [(each["name"], each["kind"]) for each in listed] == [("local", "local"), ("hpc", "toy")]
    job_id = api.call("POST", "/v1/jobs", 201, json=JOB)["job_id"]
    assert api.call("GET", f"/v1/jobs/{job_id}")["backend"] == "hpc"


def test_secrets_are_stored_encrypted_and_never_shown(api: Api, world: World, tmp_path: Path) -> None:
    add(api, password="geheim")
    with world.database.read() as connection:
        (stored,) = clusters.all(connection, EVERYTHING)
    assert "geheim" not in repr(dataclasses.astuple(stored))
    assert "geheim" not in api.http.get("/v1/backends").text + api.http.get("/v1/backends/hpc").text
    options = Clusters(world.database, SEALER).options_of(stored)
    assert isinstance(options, ToyOptions)
    assert options.password.get_secret_value() == "geheim"

    # What is shown can be sent back.
    add(api, password="***", work_dir="/scratch")
    with world.database.read() as connection:
        (changed,) = clusters.all(connection, EVERYTHING)
    assert changed.instance == stored.instance
    options = Clusters(world.database, SEALER).options_of(changed)
    assert isinstance(options, ToyOptions)
    assert (options.password.get_secret_value(), options.work_dir) == ("geheim", "/scratch")


@pytest.mark.parametrize(
    ("name", "body", "field", "says"),
    [
        ("hpc", {"kind": "nope"}, "kind", "there are: slurm"),
        ("hpc", {"kind": "toy"}, "options", "partition: Field required"),
        ("hpc", {"kind": "toy", "options": {"partition": "p", "colour": "red"}}, "options", "no such option"),
        ("hpc", {"kind": "toy", "options": {"partition": "p", "poll_s": 0}}, "options", "poll_s"),
        ("local", {"kind": "toy", "options": {"partition": "p"}}, "name", "backend of every server"),
        ("HPC", {"kind": "toy", "options": {"partition": "p"}}, "name", "lower-case"),
    ],
)
def test_what_is_wrong_with_a_cluster_is_said_and_nothing_is_stored(
    api: Api, name: str, body: dict[str, Any], field: str, says: str
) -> None:
    answer = api.http.put(f"/v1/backends/{name}", json=body)
    assert answer.status_code == 422
    details = answer.json()["error"]["details"]
    assert any(each["field"] == field and says in each["message"] for each in details), details
    assert len(api.call("GET", "/v1/backends")["backends"]) == 1


def test_a_cluster_with_jobs_stays_and_goes_with_its_nodes(api: Api, world: World) -> None:
    add(api)
    job_id = api.call("POST", "/v1/jobs", 201, json=JOB)["job_id"]
    answer = api.http.delete("/v1/backends/hpc")
    assert answer.status_code == 409
    assert job_id in answer.text
    api.call("POST", f"/v1/jobs/{job_id}/cancel")
    report(world, "127.0.0.1")
    assert [node["id"] for node in api.call("GET", "/v1/nodes")["nodes"]] == ["hpc:n1"]
    api.call("DELETE", "/v1/backends/hpc")
    assert api.call("GET", "/v1/nodes")["nodes"] == []
    assert api.http.post("/v1/jobs", json=JOB).status_code == 400
    assert api.http.delete("/v1/backends/hpc").status_code == 404
    assert api.http.delete("/v1/backends/local").status_code == 404


def report(world: World, address: str, **more: Any) -> None:
    """Have the cluster report one node."""
    gpus = tuple(Gpu(index=n, device=str(n), type="H100-80GB", memory_mb=81920) for n in range(4))
    amounts = {"cpu_cores": 8, "ram_mb": 4000, "storage_mb": 10, "last_seen_at": 1.0}
    node = Node(
        node_id="hpc:n1", backend="hpc", hostname="n1", address=address, gpus=gpus, pool="hpc", **amounts, **more
    )
    world.database.write_now(lambda connection: nodes.put(connection, EVERYTHING, [node]))


def test_a_node_of_a_cluster_shows_what_its_engine_says_and_is_drained_there(api: Api, world: World) -> None:
    add(api)
    report(world, "127.0.0.1", held_gpus=3, held_cpu_cores=6, held_ram_mb=1000)
    (node,) = api.call("GET", "/v1/nodes")["nodes"]
    assert sum(gpu["free"] for gpu in node["gpus"]) == 1
    assert (node["cpu_cores"], node["ram_mb"]) == ({"total": 8, "free": 2}, {"total": 4000, "free": 3000})
    answer = api.http.post("/v1/nodes/hpc:n1/drain", json={})
    assert answer.status_code == 409
    assert "drain the node there" in answer.text


def test_a_job_that_no_node_could_hold_is_refused(api: Api, world: World) -> None:
    add(api)
    report(world, "127.0.0.1")
    answer = api.http.post("/v1/jobs", json={**JOB, "resource_config": {"gpu_count": 8}})
    assert answer.status_code == 400
    assert "the largest has 4" in answer.text


def test_a_job_that_waits_for_a_cluster_says_why_by_its_inventory(api: Api, world: World) -> None:
    add(api)
    report(world, "127.0.0.1")
    waiting = {**JOB, "scheduling_config": {"allow_waiting_for_nodes": True}}

    def pending(gpus: int) -> Any:
        document = {**waiting, "resource_config": {"gpu_count": gpus}}
        job_id = api.call("POST", "/v1/jobs", 201, json=document)["job_id"]
        world.queue(job_id)
        return api.show(job_id)["pending"]

    why = pending(8)
    assert why["code"] == "IMPOSSIBLE"
    assert "the largest has 4" in why["message"]
    assert pending(4)["code"] != "IMPOSSIBLE"


@pytest.mark.parametrize("name", ["a%3Fwatch=true", "a%2C b", "%2E%2E", "-a"])
def test_what_is_no_name_of_a_job_reaches_no_engine(api: Api, name: str) -> None:
    add(api)
    for path in (name, f"{name}/logs"):
        answer = api.http.get(f"/v1/backends/hpc/foreign-jobs/{path}")
        assert answer.status_code in (404, 422), answer.text
        assert "there is no job" not in answer.text  # which the engine would have been asked
    assert "there is no job" in api.http.get("/v1/backends/hpc/foreign-jobs/job-a.b").text


def test_workers_must_be_able_to_reach_the_server(api: Api, world: World) -> None:
    add(api)
    report(world, "10.1.2.3")
    answer = api.http.post("/v1/jobs", json=JOB)
    assert answer.status_code == 400
    assert "advertise_url" in answer.text
    add(api, server_url="http://10.1.1.1:7070")
    job_id = api.call("POST", "/v1/jobs", 201, json=JOB)["job_id"]
    assert api.call("GET", f"/v1/jobs/{job_id}")["backend"] == "hpc"
