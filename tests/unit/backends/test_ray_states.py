"""What the driver says of attempts, and what that means."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.backends.cluster.worker_start import MESSAGES, REASONS
from trainmaster.backends.ray import states
from trainmaster.backends.ray.render import NO_PACKAGE, NO_RAY
from trainmaster.protocol.reasons import Reason


def ended(results: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"attempt": "job-1.1", "nodes": 2, "phase": "ended", "results": results or {}, **more}


@pytest.mark.parametrize("how", ["stopped", "removed"])
def test_attempt_that_was_stopped_was_cancelled_on_the_cluster(how: str) -> None:
    loss, _ = states.ended(ended(**{how: True}))
    assert (loss.reason, loss.message) == (Reason.ENGINE_CANCELLED, "it was stopped on the Ray cluster")


def test_attempt_that_ended_well_leaves_workers_without_a_report() -> None:
    loss, losses = states.ended(ended())
    assert (loss.reason, losses) == (Reason.WORKER_LOST, {})


@pytest.mark.parametrize("code", list(MESSAGES))
def test_worker_that_did_not_start_says_what_to_do(code: int) -> None:
    loss, losses = states.ended(ended({"1": {"exit": code, "tail": "trainmaster: this and that\n"}}))
    assert loss.reason is REASONS[code]
    assert loss.message == f"{MESSAGES[code]}: trainmaster: this and that"
    assert losses == {1: loss}


@pytest.mark.parametrize(("code", "how"), [(7, "exit code 7"), (-9, "signal 9")])
def test_worker_that_ended_otherwise_says_how(code: int, how: str) -> None:
    loss, _ = states.ended(ended({"0": {"exit": code, "tail": ""}}))
    assert (loss.reason, loss.message) == (Reason.WORKER_LOST, f"its worker ended by {how}")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("node", Reason.NODE_LOST),
        ("preempted", Reason.EVICTED),
        ("memory", Reason.OUT_OF_MEMORY),
        ("removed", Reason.ENGINE_CANCELLED),
        ("worker", Reason.WORKER_LOST),
        ("from the future", Reason.WORKER_LOST),
    ],
)
def test_lost_node_explains_the_end_of_the_others(kind: str, reason: Reason) -> None:
    results = {"0": {"exit": 85, "tail": ""}, "1": {"lost": kind, "message": "in Ray's words"}}
    loss, losses = states.ended(ended(results))
    assert loss.reason is reason
    assert loss.message.endswith(": in Ray's words")
    assert losses[0].reason is Reason.WORKER_LOST
    assert losses[1] == loss


def test_nodes_that_ended_badly_while_others_run_are_lost() -> None:
    results = {"0": {"exit": 0, "tail": ""}, "2": {"lost": "node", "message": ""}}
    assert {number: loss.reason for number, loss in states.losses({"results": results}).items()} == {
        2: Reason.NODE_LOST
    }


def test_what_ray_refuses_is_refused_in_its_words() -> None:
    loss, _ = states.ended(ended(refused="no such label"))
    assert (loss.reason, loss.message) == (Reason.LAUNCH_REFUSED, "Ray refused what it asks for: no such label")


def test_launch_that_ray_lost_is_tried_again() -> None:
    loss, _ = states.ended(ended(lost_launch=True))
    assert loss.reason is Reason.ENGINE_UNAVAILABLE


@pytest.mark.parametrize("code", [NO_RAY, 126, 127])
def test_driver_that_can_never_begin_says_what_to_do(code: int) -> None:
    assert "driver_python" in states.never_begins({"status": "FAILED", "driver_exit_code": code})


@pytest.mark.parametrize("code", [NO_PACKAGE, -9, 1, None])
def test_driver_that_ended_otherwise_is_started_again(code: int | None) -> None:
    assert not states.never_begins({"status": "FAILED", "driver_exit_code": code})
    assert not states.never_begins({"status": "SUCCEEDED"})


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("INFEASIBLE", ": no nodes of the Ray cluster have that much, not even empty"),
        ("NO_RESOURCES", ": the nodes of the Ray cluster that have that much are in use"),
        ("QUEUED", ""),
    ],
)
def test_attempt_says_what_it_waits_for(state: str, why: str) -> None:
    bundle = {"CPU": 1.0, "GPU": 2.0, "accelerator_type:H100": 0.001}
    known = {"phase": "waiting", "nodes": 2, "bundle": bundle, "why": state}
    assert states.waiting(known) == f"waits for 2 times (1 CPU, 2 GPU, accelerator_type:H100){why}"
    assert states.waiting({"phase": "waiting", "nodes": 1}) == "the Ray cluster prepares it"
    assert states.waiting({"phase": "starting", "nodes": 2, "addresses": {"0": "a"}}) == "1 of 2 workers have started"
