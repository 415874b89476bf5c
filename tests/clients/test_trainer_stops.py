"""Trainers that are stopped with models in them: for want of use, for a job that matters more, and by hand.

What was trained goes on from there to the same losses as if nobody had stopped it, gradients that wait for their step
included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_model import FIREWORKS_NAME, HUB_NAME
from client_programs import Client, facts

from patience import PATIENCE_S
from real_server import RealServer, running, wait_for

TWO_GPUS = """
versions:
  - version: 1
    accelerator_type: NVIDIA_H100_80GB
    accelerator_count: 2
    max_context_length: 512
"""


@pytest.fixture(scope="module")
def service_server(ground: Path) -> Iterator[RealServer]:
    """A server of two simulated GPUs: their trainers run two processes, on the CPU."""
    shapes = ground / "shapes"
    shapes.mkdir(exist_ok=True)
    (shapes / "two-gpus.yaml").write_text(TWO_GPUS)
    flags = ["--simulated-gpus", "H100-80GB:2", "--shapes-dir", str(shapes)]
    for name in (FIREWORKS_NAME, HUB_NAME):
        flags += ["--model-alias", f"{name}={ground / 'model'}"]
    with running(ground / "data", *flags, TRAINMASTER_TINKER_SHAPE="cpu") as started:
        yield started
        assert "Traceback" not in started.log_text(), started.log_text()[-4000:]


@pytest.fixture(scope="module")
def two_ranks(service_server: RealServer) -> str:
    """A trainer of two ranks that is never parked, which the public client asks for in no account but one."""
    account = service_server.ask("GET", "/v1/accounts").json()["accounts"][0]["name"]
    shape = "accounts/fireworks/trainingShapes/two-gpus/versions/1"
    body = {
        "serviceMode": True,
        "trainingConfig": {"baseModel": FIREWORKS_NAME, "loraRank": 8},
        "preemptible": True,
        "inactivityTimeout": "1s",
        "disableInactivityCleanup": True,
    }
    query = {"rlorTrainerJobId": "two-ranks", "trainingShape": shape}
    made = service_server.ask("POST", f"/v1/{account}/rlorTrainerJobs", body, params=query)
    assert made.is_success, made.text
    return "two-ranks"


@pytest.fixture(scope="module")
def results(client: Callable[[str], Client], service_server: RealServer, two_ranks: str) -> dict[str, Any]:
    """What the scenarios of `fireworks-ai` have to say."""

    def parked(said: dict[str, Any]) -> Any:
        return service_server.until(said["job"], "PAUSED")

    def take_gpus(said: dict[str, Any]) -> None:
        more = {"resource_config": {"gpu_count": 2}, "scheduling_config": {"priority": 9}}
        other = service_server.submit("sleep", "2", **more)
        service_server.until(said["job"], "PREEMPTED")
        wait_for(lambda: service_server.job(other)["attempt"] == 1, "the other job to have the GPUs")

    asked = {"wait until it is parked": parked, "take its GPUs": take_gpus}
    return client("fireworks").scenarios("trainer_stops.py", asked=asked, timeout_s=PATIENCE_S)


@pytest.fixture(scope="module")
def paused(client: Callable[[str], Client], service_server: RealServer) -> dict[str, Any]:
    """What the scenario of `tinker` has to say."""

    def job_id() -> str:
        listed = service_server.data("GET", "/v1/jobs")["jobs"]
        [found] = [job["job_id"] for job in listed if job["name"].startswith("Tinker trainer")]
        return str(found)

    asked = {
        "pause the trainer": lambda _: service_server.data("POST", f"/v1/jobs/{job_id()}/pause")["status"],
        "wait until it is paused": lambda _: service_server.until(job_id(), "PAUSED")["status"],
        "resume the trainer": lambda _: service_server.data("POST", f"/v1/jobs/{job_id()}/resume")["status"],
    }
    return facts(client("tinker").scenarios("tinker_pause.py", asked=asked), "paused")


def test_trainer_that_is_used_stays(results: dict[str, Any]) -> None:
    assert facts(results, "unused")["in_use"] == "JOB_STATE_RUNNING"


def test_unused_trainer_is_parked_with_everything_saved(results: dict[str, Any]) -> None:
    found = facts(results, "unused")
    assert (found["parked"]["status_reason"], found["parked"]["attempt"]) == ("INACTIVE", 1)
    assert found["state"] == "JOB_STATE_PAUSED"
    for error, saved in zip(found["errors"], found["saved"], strict=True):
        assert error["category"].lower().endswith("server")
        assert saved in error["message"]


def test_resumed_trainer_goes_on_to_the_bit(results: dict[str, Any]) -> None:
    found = facts(results, "unused")
    assert found["interrupted"] == found["uninterrupted"]
    assert found["other_interrupted"] == found["other_uninterrupted"]
    assert len(set(found["uninterrupted"])) > 3


def test_trainer_without_cleanup_is_not_parked(
    results: dict[str, Any], service_server: RealServer, two_ranks: str
) -> None:
    facts(results, "preempted")
    kinds = {event["type"] for event in service_server.events(two_ranks)}
    assert "inactive" not in kinds, kinds


def test_preempted_trainer_saves_and_says_what_to_do(results: dict[str, Any]) -> None:
    found = facts(results, "preempted")
    assert found["job"]["state"] == "JOB_STATE_FAILED"
    assert "resume" in found["job"]["status"]["message"]
    assert "retry" not in found["job"]["status"]["message"]
    assert found["saved"] in found["error"]["message"]
    assert found["error"]["category"].lower().endswith("server")


def test_preempted_trainer_of_two_ranks_goes_on_when_it_is_resumed(
    results: dict[str, Any], service_server: RealServer, two_ranks: str
) -> None:
    found = facts(results, "preempted")
    # What waited was summed over the ranks when it was saved, earlier than without a stop: the last bits differ.
    assert found["interrupted"] == pytest.approx(found["uninterrupted"], rel=2e-6)
    assert len(set(found["uninterrupted"])) == 6
    attempts = service_server.job(two_ranks)["attempts"]
    assert [attempt["reason"] for attempt in attempts] == ["PREEMPTED", None]
    # Within its grace: nobody killed it.
    assert "grace_missed" not in {event["type"] for event in service_server.events(two_ranks)}


@pytest.mark.long
def test_pass_is_done_or_fails_when_its_trainer_is_paused(paused: dict[str, Any]) -> None:
    errors = paused["errors"]
    assert 0 < len(errors) < paused["passes"]
    for error in (*errors, paused["later"]):
        assert error["category"].lower().endswith("server"), error
        assert paused["path"] in error["message"]


@pytest.mark.long
def test_paused_trainer_is_resumed_by_hand_alone(paused: dict[str, Any]) -> None:
    assert "trainmaster resume" in paused["waiting"]["message"]


@pytest.mark.long
def test_paused_trainer_goes_on_to_the_bit(paused: dict[str, Any]) -> None:
    assert paused["interrupted"] == paused["uninterrupted"]
