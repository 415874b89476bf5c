"""What Ray's words for a job and for its parts mean: one table for each kind of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainmaster.backends.base import Loss
from trainmaster.backends.cluster.engine import EnginePhase
from trainmaster.backends.cluster.worker_start import MESSAGES, REASONS
from trainmaster.backends.ray.render import NO_PACKAGE, NO_RAY, REFUSED
from trainmaster.protocol.reasons import Reason

RESULT = "trainmaster-result: "
"""Begins the last line that a driver writes."""

PHASES: Mapping[str, EnginePhase] = {
    "PENDING": EnginePhase.QUEUED,
    "RUNNING": EnginePhase.RUNNING,  # of its driver, which may still wait for nodes
    "STOPPED": EnginePhase.ENDED,
    "SUCCEEDED": EnginePhase.ENDED,
    "FAILED": EnginePhase.ENDED,
}

_HEAD = "its driver on the head node of the Ray cluster ended"
ERROR_TYPES: Mapping[str, tuple[Reason, str]] = {
    "RUNTIME_ENV_SETUP_FAILURE": (Reason.ENGINE_UNAVAILABLE, "Ray could not prepare its driver"),
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT": (
        Reason.ENGINE_UNAVAILABLE,
        "Ray did not start its driver in time; does the head node have memory and processes left?",
    ),
    "JOB_SUPERVISOR_ACTOR_START_FAILURE": (Reason.ENGINE_UNAVAILABLE, "Ray could not start its driver"),
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE": (Reason.ENGINE_UNAVAILABLE, "Ray found no node for its driver"),
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE": (Reason.NODE_LOST, _HEAD),
    "JOB_SUPERVISOR_ACTOR_DIED": (Reason.NODE_LOST, _HEAD),
    "JOB_ENTRYPOINT_COMMAND_START_ERROR": (Reason.ENGINE_UNAVAILABLE, "Ray could not start its driver"),
}
"""Ray's `error_type` of a job that FAILED -> what that means. A driver that ended by itself says more."""

DRIVER_EXITS: Mapping[int, tuple[Reason, str]] = {
    NO_PACKAGE: (
        Reason.ENGINE_UNAVAILABLE,
        "its driver started more than 10 minutes after it was submitted, and Ray had dropped its package by then",
    ),
    NO_RAY: (
        Reason.LAUNCH_REFUSED,
        "the Python of its driver has no Ray; name that of the Ray cluster with the option driver_python",
    ),
    REFUSED: (Reason.LAUNCH_REFUSED, "Ray refused what it asks for"),
    126: (
        Reason.LAUNCH_REFUSED,
        "the Python of the option driver_python cannot be executed on the head node of the Ray cluster",
    ),
    127: (
        Reason.LAUNCH_REFUSED,
        "the head node of the Ray cluster has no such Python as the option driver_python names",
    ),
}
"""Exit codes of a driver that reports no node."""

LOST_KINDS: Mapping[str, tuple[Reason, str]] = {
    "node": (Reason.NODE_LOST, "the Ray node of the worker is gone"),
    "preempted": (Reason.EVICTED, "the Ray node of the worker was taken away"),
    "memory": (Reason.OUT_OF_MEMORY, "Ray killed the worker because its node ran out of memory"),
    "worker": (Reason.WORKER_LOST, "the Ray process of the worker ended"),
}
"""What a driver says of an actor that is gone."""

DEATHS: Mapping[str, str] = {
    "NODE_DIED": "node",
    "AUTOSCALER_DRAIN_PREEMPTED": "preempted",
    "AUTOSCALER_DRAIN_IDLE": "preempted",
}
"""Why an actor or its node died, in the state API's words -> a key of LOST_KINDS; others are `worker`."""

WAITS: Mapping[str, str] = {
    "INFEASIBLE": "no nodes of the Ray cluster have that much, not even empty",
    "NO_RESOURCES": "the nodes of the Ray cluster that have that much are in use",
    "FAILED_TO_COMMIT_RESOURCES": "a node was taken while Ray reserved it; it tries again",
}
"""The scheduling state of a placement group that waits; others say nothing."""


def ended(details: Mapping[str, Any]) -> tuple[str, Loss, Mapping[int, Loss]]:
    """What a job that has ended says, and means for nodes that did not report; those that its driver reports apart."""
    status, message = details["status"], str(details.get("message") or "")
    if status == "SUCCEEDED":
        text = "its worker ended on Ray without a report"
        return message, Loss(reason=Reason.WORKER_LOST, message=text), {}
    if status == "STOPPED":
        return message, Loss(reason=Reason.ENGINE_CANCELLED, message="it was stopped on the Ray cluster"), {}
    code, result = details.get("driver_exit_code"), _result(message)
    known = DRIVER_EXITS.get(code) if isinstance(code, int) else None
    nodes = {int(number): _of_node(entry) for number, entry in result.get("nodes", {}).items()}
    if nodes:
        # Others ended because of the one that was lost.
        first = next((nodes[int(n)] for n, entry in result["nodes"].items() if "lost" in entry), None)
        loss = first or next(iter(nodes.values()))
    elif known is not None:
        reason, text = known
        loss = Loss(reason=reason, message=_joined(text, result.get("refused", "")))
    elif (kind := str(details.get("error_type") or "")) in ERROR_TYPES:
        reason, text = ERROR_TYPES[kind]
        if "running low on memory" in message or "OutOfMemory" in message:
            reason = Reason.OUT_OF_MEMORY
        loss = Loss(reason=reason, message=_joined(text, _short(message)))
    elif isinstance(code, int) and code < 0:
        text = f"{_HEAD} by signal {-code}; does the head node have enough memory?"
        loss = Loss(reason=Reason.ENGINE_UNAVAILABLE, message=text)
    else:
        loss = Loss(reason=Reason.ENGINE_UNAVAILABLE, message=_joined(_HEAD, _short(message)))
    return loss.message, loss, nodes


def death(cause: Mapping[str, Any]) -> Loss:
    """Why an actor is dead, by its entry in the state API."""
    if "oom_context" in cause:
        return _lost("memory", str(cause["oom_context"].get("error_message", "")))
    context = next((each for each in cause.values() if isinstance(each, Mapping)), {})
    of_node = context.get("node_death_info") or {}
    words = (str(of_node.get("reason", "")), str(context.get("reason", "")))
    kind = next((DEATHS[word] for word in words if word in DEATHS), "worker")
    text = str(context.get("error_message", ""))
    if kind == "worker" and "running low on memory" in text:
        kind = "memory"
    return _lost(kind, str(of_node.get("reason_message") or text))


def waiting(group: Mapping[str, Any]) -> str:
    """What a placement group waits for."""
    bundles = [bundle.get("unit_resources") or {} for bundle in group.get("bundles") or []]
    wanted = ", ".join(f"{_amount(name, value)}" for name, value in sorted(bundles[0].items())) if bundles else ""
    if len(bundles) > 1:
        wanted = f"{len(bundles)} times ({wanted})"
    state = str((group.get("stats") or {}).get("scheduling_state", ""))
    return f"waits for {wanted or 'nodes'}" + (f": {WAITS[state]}" if state in WAITS else "")


def _amount(name: str, value: float) -> str:
    """
    >>> _amount("GPU", 2.0), _amount("memory", float(3 << 30)), _amount("accelerator_type:H100", 0.001)
    ('2 GPU', '3072 MB of memory', 'accelerator_type:H100')
    """
    if name == "memory":
        return f"{int(value) >> 20} MB of memory"
    return name if value < 0.01 else f"{value:g} {name}"


def _of_node(entry: Mapping[str, Any]) -> Loss:
    if "lost" in entry:
        return _lost(str(entry["lost"]), str(entry.get("message", "")))
    code, tail = int(entry.get("exit", 1)), str(entry.get("tail", "")).strip()
    if code in REASONS:
        return Loss(reason=REASONS[code], message=_joined(MESSAGES[code], _short(tail)))
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return Loss(reason=Reason.WORKER_LOST, message=_joined(f"its worker ended by {how}", _short(tail)))


def _lost(kind: str, text: str) -> Loss:
    reason, meaning = LOST_KINDS.get(kind, LOST_KINDS["worker"])
    return Loss(reason=reason, message=_joined(meaning, _short(text)))


def _result(message: str) -> dict[str, Any]:
    _, found, line = message.rpartition(RESULT)
    try:
        result = json.loads(line.split("\n", 1)[0]) if found else {}
    except ValueError:
        return {}
    return result if isinstance(result, dict) else {}


def _joined(text: str, detail: str) -> str:
    return f"{text}: {detail}" if detail else text


def _short(text: str) -> str:
    """The last words of a longer text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= 500 else f"...{line[-500:]}"
