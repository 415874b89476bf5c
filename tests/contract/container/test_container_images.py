"""Images come from a registry: when they are to, once for all that wait for them, and with what went wrong told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from container_engine import Engine, plain_image
from container_servers import ContainerServer
from real_server import wait_for
from registry_server import LABEL, Registry, running_registry


@pytest.fixture(scope="module")
def registry(engine: Engine) -> Iterator[Registry]:
    with running_registry(engine, plain_image(engine)) as running:
        yield running
        for image in engine.podman("images", "--quiet", "--filter", f"label={LABEL}={running.host}").split():
            engine.podman("rmi", "--force", image)


def submit(server: ContainerServer, image: str, policy: str) -> str:
    """A job that runs the image's own command; its id."""
    workload = {"kind": "container", "image": image, "container": {"pull_policy": policy}}
    return server.submit(workload=workload, resource_config={"gpu_count": 0})


def said(server: ContainerServer, image: str, policy: str) -> list[str]:
    """What such a job says, to its end."""
    job_id = submit(server, image, policy)
    assert server.until(job_id)["status"] == "COMPLETED"
    return server.lines(job_id)


def wait_until_told(server: ContainerServer, job_id: str, message: str) -> None:
    """Wait until a job says so of its status."""
    wait_for(lambda: server.job(job_id)["status_message"] == message, f"the message '{message}'")


def test_an_image_is_fetched_when_its_policy_says_so(container_server: ContainerServer, registry: Registry) -> None:
    server = container_server
    image = registry.put("greeter", "one")
    assert said(server, image, "IfNotPresent") == ["one"]
    registry.put("greeter", "two")
    before = registry.asked("greeter")
    assert said(server, image, "IfNotPresent") == ["one"]
    assert registry.asked("greeter") == before > 0
    assert said(server, image, "Always") == ["two"]
    assert registry.asked("greeter") > before


def test_an_image_that_will_never_be_had_ends_the_job_and_says_what_to_do(
    container_server: ContainerServer, registry: Registry
) -> None:
    server = container_server
    registry.refusals = {"private": (401, "UNAUTHORIZED"), "guarded": (403, "DENIED")}
    wishes = [("unasked", "Never"), ("absent", "IfNotPresent"), ("private", "Always"), ("guarded", "IfNotPresent")]
    jobs = [(submit(server, f"{registry.host}/{name}:1", policy), name, policy) for name, policy in wishes]
    for job_id, name, policy in jobs:
        error = server.until(job_id)["error"]
        assert error["error_type"] == "LAUNCH_REFUSED"
        for words in (f"{registry.host}/{name}:1", policy, "podman build", "podman login"):
            assert words in error["error_message"]
    assert not registry.asked("unasked")


@pytest.mark.long  # tests/unit/backends/test_container_pulling.py breaks pulls off
def test_a_pull_that_breaks_off_is_tried_again_at_no_cost_to_the_job(
    container_server: ContainerServer, registry: Registry
) -> None:
    server = container_server
    image = registry.put("cut-off", "at last")
    registry.cut = {"cut-off"}
    job_id = submit(server, image, "IfNotPresent")
    problem = f"image {image} could not be fetched from its registry yet"
    wait_for(lambda: problem in (server.job(job_id)["pending_reason"] or ""), "the reason why it waits")
    job = server.job(job_id)
    assert job["status"] == "QUEUED"
    assert job["attempts"][-1]["reason"] == "ENGINE_UNAVAILABLE"
    registry.cut = set()
    job = server.until(job_id)
    assert (job["status"], job["retries_used"]) == ("COMPLETED", 0)
    assert server.lines(job_id) == ["at last"]


def test_jobs_that_wait_for_one_image_share_its_pull_and_hold_up_nobody(
    container_server: ContainerServer, registry: Registry
) -> None:
    server = container_server
    image = registry.put("shared", "for all")
    registry.open.clear()
    try:
        first, second, given_up = (submit(server, image, policy) for policy in ("IfNotPresent", "Always", "Always"))
        for job_id in (first, second, given_up):
            wait_until_told(server, job_id, f"pulling {image}: 1 of 3 layers")  # the base is here already
            assert server.job(job_id)["status"] == "SCHEDULING"
        server.data("POST", f"/v1/jobs/{given_up}/cancel")
        assert server.until(given_up)["status"] == "CANCELLED"
        other = server.run("true")
        assert server.until(other)["status"] == "COMPLETED"
        assert registry.asked("shared") == 1
        # The next server begins it again, once.
        server.kill()
        server.start()
        wait_for(lambda: registry.asked("shared") == 2, "another pull")
    finally:
        registry.open.set()
    for job_id in (first, second):
        assert server.until(job_id)["status"] == "COMPLETED"
        assert server.lines(job_id) == ["for all"]
        assert len(server.job(job_id)["attempts"]) == 1
    assert registry.asked("shared") == 2
    told = [event["message"] for event in server.data("GET", f"/v1/jobs/{first}/events")["events"]]
    assert f"pulling {image}: 1 of 3 layers" in told
