"""The numbers for Prometheus, as its own parser reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api_world import COMMAND, Served, World
from prometheus_client.parser import text_string_to_metric_families

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.resources import Gpu, Node, Share
from trainmaster.server.store import nodes
from trainmaster.server.store.scope import Scope

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(served: Served, key: str | None) -> Samples:
    answer = httpx.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {key}"} if key else {}, verify=False)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.text))
    assert all(family.documentation for family in families)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[tuple[World, Served]]:
    with World.open(tmp_path) as world, Served.serve(world.context(leads=lambda: True)) as served:
        yield world, served


def test_metrics_tell_of_jobs_nodes_and_requests(filled: tuple[World, Served]) -> None:
    world, served = filled
    key = world.key("a")
    gpus = tuple(
        Gpu(index=index, device=str(index), type="H100", memory_mb=80_000, healthy=index != 3) for index in range(4)
    )
    machine = Node(node_id="box", backend="local", hostname="box", cpu_cores=8, ram_mb=1000, storage_mb=1000, gpus=gpus)
    world.database.write_now(lambda connection: nodes.put(connection, Scope.everything(), [machine]))
    before = read(served, key)
    jobs = [
        httpx.post(f"{served.url}/v1/jobs", json=COMMAND, headers={"X-API-Key": key}, verify=False).json()["data"][
            "job_id"
        ]
        for _ in range(3)
    ]
    for job_id in jobs:
        world.queue(job_id)
    world.place(jobs[0], Share(node_id="box", gpus=(0, 1)))
    assert (
        httpx.get(f"{served.url}/v1/modules/scaimind/jobs/nobody", headers={"X-API-Key": key}, verify=False).status_code
        == 404
    )
    assert httpx.get(f"{served.url}/made/up/{'x' * 50}", headers={"X-API-Key": key}, verify=False).status_code == 404
    after = read(served, key)

    assert value(after, "trainmaster_jobs", status="QUEUED", queue="default") == 2
    assert value(after, "trainmaster_jobs", status="SCHEDULING", queue="default") == 1
    assert value(after, "trainmaster_queue_depth", queue="default") == 2
    assert value(after, "trainmaster_queue_oldest_wait_seconds", queue="default") >= 0
    assert value(after, "trainmaster_nodes", state="READY") == 1
    assert value(after, "trainmaster_gpus", type="H100") == 4
    assert value(after, "trainmaster_gpus_allocated", type="H100") == 2
    assert value(after, "trainmaster_gpus_unhealthy", type="H100") == 1
    assert value(after, "trainmaster_leader") == 1
    assert value(after, "trainmaster_submissions_total") - value(before, "trainmaster_submissions_total") == 3
    commits = "trainmaster_commit_size_count"
    assert value(after, commits) - value(before, commits) >= 4
    submit = {"method": "POST", "route": "/v1/jobs"}
    assert value(after, "trainmaster_http_requests_total", **submit, status="201") >= 3
    assert value(after, "trainmaster_http_request_seconds_count", **submit) >= 3
    assert value(after, "trainmaster_http_request_seconds_bucket", **submit, le="+Inf") >= 3
    show = {"method": "GET", "route": "/v1/jobs/{job_id}", "status": "404"}
    assert value(after, "trainmaster_http_requests_total", **show) >= 1
    assert value(after, "process_resident_memory_bytes") > 0
    assert ("trainmaster_pass_seconds_count", ()) in after
    names = {label for _, labels in after for label in labels}
    assert not [text for name, text in names if "made" in text or "scaimind" in text or text == "a"]


def test_metrics_need_view_unless_they_are_open(world: World, served: Served) -> None:
    assert httpx.get(f"{served.url}/metrics", verify=False).status_code == 401
    manager = world.key("a", KeyScope.MANAGE)
    assert httpx.get(f"{served.url}/metrics", headers={"X-API-Key": manager}, verify=False).status_code == 403
    read(served, world.key("a", KeyScope.VIEW))
    with Served.serve(world.context(open_metrics=True)) as opened:
        read(opened, None)
        assert httpx.get(f"{opened.url}/v1/jobs", verify=False).status_code == 401
