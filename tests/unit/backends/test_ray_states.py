"""What Ray's words for jobs, actors and placement groups mean for an attempt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainmaster.backends.cluster.engine import EnginePhase
from trainmaster.backends.cluster.worker_start import MESSAGES, REASONS
from trainmaster.backends.ray import states
from trainmaster.backends.ray.render import LOST, NO_PACKAGE, NO_RAY, REFUSED
from trainmaster.protocol.reasons import Reason

PREFIX = "Job entrypoint command failed with exit code 1, last available logs (truncated to 20,000 chars):\nnoise\n"


def failed(code: int | None = None, result: dict[str, Any] | None = None, **details: Any) -> dict[str, Any]:
    message = PREFIX if result is None else f"{PREFIX}{states.RESULT}{json.dumps(result)}\n"
    kind = "JOB_ENTRYPOINT_COMMAND_ERROR" if code is not None else None
    return {"status": "FAILED", "driver_exit_code": code, "message": message, "error_type": kind, **details}


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ("PENDING", EnginePhase.QUEUED),
        ("RUNNING", EnginePhase.RUNNING),
        ("STOPPED", EnginePhase.ENDED),
        ("SUCCEEDED", EnginePhase.ENDED),
        ("FAILED", EnginePhase.ENDED),
    ],
)
def test_every_status_of_a_ray_job_is_a_phase(status: str, phase: EnginePhase) -> None:
    assert states.PHASES[status] is phase


def test_job_that_was_stopped_was_cancelled_on_the_cluster() -> None:
    _, loss, _ = states.ended({"status": "STOPPED", "message": "Job was intentionally stopped."})
    assert (loss.reason, loss.message) == (Reason.ENGINE_CANCELLED, "it was stopped on the Ray cluster")


def test_job_that_succeeded_leaves_workers_without_a_report() -> None:
    _, loss, losses = states.ended({"status": "SUCCEEDED", "message": None})
    assert (loss.reason, losses) == (Reason.WORKER_LOST, {})


@pytest.mark.parametrize("code", list(MESSAGES))
def test_worker_that_did_not_start_says_what_to_do(code: int) -> None:
    result = {"nodes": {"1": {"exit": code, "tail": "trainmaster: this and that\n"}}}
    message, loss, losses = states.ended(failed(code, result))
    assert loss.reason is REASONS[code]
    assert message == loss.message == f"{MESSAGES[code]}: trainmaster: this and that"
    assert losses == {1: loss}


@pytest.mark.parametrize(("code", "how"), [(7, "exit code 7"), (-9, "signal 9")])
def test_worker_that_ended_otherwise_says_how(code: int, how: str) -> None:
    _, loss, _ = states.ended(failed(1, {"nodes": {"0": {"exit": code, "tail": ""}}}))
    assert (loss.reason, loss.message) == (Reason.WORKER_LOST, f"its worker ended by {how}")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("node", Reason.NODE_LOST),
        ("preempted", Reason.EVICTED),
        ("memory", Reason.OUT_OF_MEMORY),
        ("worker", Reason.WORKER_LOST),
        ("from the future", Reason.WORKER_LOST),
    ],
)
def test_lost_node_explains_the_end_of_the_others(kind: str, reason: Reason) -> None:
    result = {"nodes": {"0": {"exit": 85, "tail": ""}, "1": {"lost": kind, "message": "in Ray's words"}}}
    _, loss, losses = states.ended(failed(LOST, result))
    assert loss.reason is reason
    assert loss.message.endswith(": in Ray's words")
    assert losses[0].reason is Reason.WORKER_LOST
    assert losses[1] == loss


@pytest.mark.parametrize(
    ("code", "reason", "option"),
    [
        (NO_PACKAGE, Reason.ENGINE_UNAVAILABLE, "10 minutes"),
        (NO_RAY, Reason.LAUNCH_REFUSED, "driver_python"),
        (126, Reason.LAUNCH_REFUSED, "driver_python"),
        (127, Reason.LAUNCH_REFUSED, "driver_python"),
    ],
)
def test_driver_that_did_not_start_says_what_to_do(code: int, reason: Reason, option: str) -> None:
    message, loss, _ = states.ended(failed(code))
    assert loss.reason is reason
    assert option in message


def test_what_ray_refuses_is_refused_in_its_words() -> None:
    message, loss, _ = states.ended(failed(REFUSED, {"refused": "no such label"}))
    assert (loss.reason, message) == (Reason.LAUNCH_REFUSED, "Ray refused what it asks for: no such label")


@pytest.mark.parametrize("kind", list(states.ERROR_TYPES))
def test_failure_of_ray_itself_is_transient(kind: str) -> None:
    _, loss, _ = states.ended(failed(error_type=kind, message="the words\nof Ray"))
    assert loss.reason in (Reason.ENGINE_UNAVAILABLE, Reason.NODE_LOST)
    assert loss.message.endswith(": the words of Ray")


def test_driver_that_ray_killed_for_memory_was_out_of_memory() -> None:
    message = "Job supervisor actor died: Task was killed due to the node running low on memory."
    _, loss, _ = states.ended(failed(error_type="JOB_SUPERVISOR_ACTOR_DIED", message=message))
    assert loss.reason is Reason.OUT_OF_MEMORY


@pytest.mark.parametrize("details", [failed(-9), failed(1), failed(), failed(1, message=f"{states.RESULT}[]")])
def test_driver_that_says_nothing_may_be_tried_again(details: dict[str, Any]) -> None:
    _, loss, losses = states.ended(details)
    assert (loss.reason, losses) == (Reason.ENGINE_UNAVAILABLE, {})
    assert loss.message


@pytest.mark.parametrize(
    ("cause", "reason", "text"),
    [
        (
            {"actor_died_error_context": {"reason": "NODE_DIED", "error_message": "its node has died"}},
            Reason.NODE_LOST,
            "its node has died",
        ),
        (
            {
                "actor_died_error_context": {
                    "reason": "NODE_DIED",
                    "error_message": "long",
                    "node_death_info": {"reason": "AUTOSCALER_DRAIN_PREEMPTED", "reason_message": "spot"},
                }
            },
            Reason.EVICTED,
            "spot",
        ),
        ({"oom_context": {"error_message": "too much"}}, Reason.OUT_OF_MEMORY, "too much"),
        (
            {"actor_died_error_context": {"reason": "WORKER_DIED", "error_message": "it exited"}},
            Reason.WORKER_LOST,
            "it exited",
        ),
        ({"runtime_env_failed_context": {"error_message": "no such package"}}, Reason.WORKER_LOST, "no such package"),
        ({}, Reason.WORKER_LOST, ""),
    ],
)
def test_dead_actor_says_what_it_died_of(cause: dict[str, Any], reason: Reason, text: str) -> None:
    loss = states.death(cause)
    assert loss.reason is reason
    assert loss.message.endswith(text)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("INFEASIBLE", ": no nodes of the Ray cluster have that much, not even empty"),
        ("NO_RESOURCES", ": the nodes of the Ray cluster that have that much are in use"),
        ("QUEUED", ""),
    ],
)
def test_placement_group_says_what_it_waits_for(state: str, why: str) -> None:
    bundle = {"unit_resources": {"CPU": 1.0, "GPU": 2.0, "accelerator_type:H100": 0.001}}
    group = {"bundles": [bundle, bundle], "stats": {"scheduling_state": state}}
    assert states.waiting(group) == f"waits for 2 times (1 CPU, 2 GPU, accelerator_type:H100){why}"
    assert states.waiting({}) == "waits for nodes"
