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

# In tests/contract, services that are used stay, others are parked, and jobs are preempted and go on; in
# tests/trainer_service/test_service_resuming.py trainers that stop save all that they have and go on to the bit. In
# test_fireworks_control.py one is paused, and in test_fireworks_client.py and test_tinker_client.py one is killed.
pytestmark = pytest.mark.long

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
def unused(client: Callable[[str], Client], service_server: RealServer) -> dict[str, Any]:
    """What `fireworks-ai` has to say of a trainer that nobody uses."""

    def parked(said: dict[str, Any]) -> Any:
        return service_server.until(said["job"], "PAUSED")

    asked = {"wait until it is parked": parked}
    program = client("fireworks")
    return facts(program.scenarios("trainer_stops.py", "unused", asked=asked, timeout_s=PATIENCE_S), "unused")


@pytest.fixture(scope="module")
def preempted(client: Callable[[str], Client], service_server: RealServer, two_ranks: str) -> dict[str, Any]:
    """What it has to say of one whose GPUs another job takes."""

    def take_gpus(said: dict[str, Any]) -> None:
        more = {"resource_config": {"gpu_count": 2}, "scheduling_config": {"priority": 9}}
        other = service_server.submit("sleep", "2", **more)
        service_server.until(said["job"], "PREEMPTED")
        wait_for(lambda: service_server.job(other)["attempt"] == 1, "the other job to have the GPUs")

    asked = {"take its GPUs": take_gpus}
    program = client("fireworks")
    return facts(program.scenarios("trainer_stops.py", "preempted", asked=asked, timeout_s=PATIENCE_S), "preempted")


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


def test_trainer_that_is_used_stays(unused: dict[str, Any]) -> None:
    assert unused["in_use"] == "JOB_STATE_RUNNING"


def test_unused_trainer_is_parked_with_everything_saved(unused: dict[str, Any]) -> None:
    assert (unused["parked"]["status_reason"], unused["parked"]["attempt"]) == ("INACTIVE", 1)
    assert unused["state"] == "JOB_STATE_PAUSED"
    for error, saved in zip(unused["errors"], unused["saved"], strict=True):
        assert error["category"].lower().endswith("server")
        assert saved in error["message"]


def test_resumed_trainer_goes_on_to_the_bit(unused: dict[str, Any]) -> None:
    assert unused["interrupted"] == unused["uninterrupted"]
    assert unused["other_interrupted"] == unused["other_uninterrupted"]
    assert len(set(unused["uninterrupted"])) > 3


def test_trainer_without_cleanup_is_not_parked(
    preempted: dict[str, Any], service_server: RealServer, two_ranks: str
) -> None:
    kinds = {event["type"] for event in service_server.events(two_ranks)}
    assert "inactive" not in kinds, kinds


def test_preempted_trainer_saves_and_says_what_to_do(preempted: dict[str, Any]) -> None:
    assert preempted["job"]["state"] == "JOB_STATE_FAILED"
    assert "resume" in preempted["job"]["status"]["message"]
    assert "retry" not in preempted["job"]["status"]["message"]
    assert preempted["saved"] in preempted["error"]["message"]
    assert preempted["error"]["category"].lower().endswith("server")


def test_preempted_trainer_of_two_ranks_goes_on_when_it_is_resumed(
    preempted: dict[str, Any], service_server: RealServer, two_ranks: str
) -> None:
    # What waited was summed over the ranks when it was saved, earlier than without a stop: the last bits differ.
    assert preempted["interrupted"] == pytest.approx(preempted["uninterrupted"], rel=2e-6)
    assert len(set(preempted["uninterrupted"])) == 6
    attempts = service_server.job(two_ranks)["attempts"]
    assert [attempt["reason"] for attempt in attempts] == ["PREEMPTED", None]
    # Within its grace: nobody killed it.
    assert "grace_missed" not in {event["type"] for event in service_server.events(two_ranks)}


def test_pass_is_done_or_fails_when_its_trainer_is_paused(paused: dict[str, Any]) -> None:
    errors = paused["errors"]
    assert 0 < len(errors) < paused["passes"]
    for error in (*errors, paused["later"]):
        assert error["category"].lower().endswith("server"), error
        assert paused["path"] in error["message"]


def test_paused_trainer_is_resumed_by_hand_alone(paused: dict[str, Any]) -> None:
    assert "trainmaster resume" in paused["waiting"]["message"]


def test_paused_trainer_goes_on_to_the_bit(paused: dict[str, Any]) -> None:
    assert paused["interrupted"] == paused["uninterrupted"]
