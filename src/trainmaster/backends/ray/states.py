"""What the driver's words for an attempt mean, and Ray's for the driver: one table for each kind of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmaster.backends.base import Loss
from trainmaster.backends.cluster.engine import EnginePhase
from trainmaster.backends.cluster.worker_start import MESSAGES, REASONS
from trainmaster.backends.ray.render import NO_RAY
from trainmaster.protocol.reasons import Reason

PHASES: Mapping[str, EnginePhase] = {
    "waiting": EnginePhase.QUEUED,  # for its placement group
    "starting": EnginePhase.QUEUED,  # its actors
    "running": EnginePhase.RUNNING,
    "ended": EnginePhase.ENDED,
}

OVER = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
"""The states of a Ray job that has ended; others are PENDING and RUNNING."""

DRIVER_EXITS: Mapping[int, str] = {
    NO_RAY: "the Python of its driver has no Ray; name that of the Ray cluster with the option driver_python",
    126: "the Python of the option driver_python cannot be executed on the head node of the Ray cluster",
    127: "the head node of the Ray cluster has no such Python as the option driver_python names",
}
"""Exit codes of a driver that will never begin. With any other, another is started."""

LOST_KINDS: Mapping[str, tuple[Reason, str]] = {
    "node": (Reason.NODE_LOST, "the Ray node of the worker is gone"),
    "preempted": (Reason.EVICTED, "the Ray node of the worker was taken away"),
    "memory": (Reason.OUT_OF_MEMORY, "Ray killed the worker because its node ran out of memory"),
    "removed": (Reason.ENGINE_CANCELLED, "somebody removed the worker from the Ray cluster"),
    "worker": (Reason.WORKER_LOST, "the Ray process of the worker ended"),
}
"""What the driver says of an actor that is gone."""

WAITS: Mapping[str, str] = {
    "INFEASIBLE": "no nodes of the Ray cluster have that much, not even empty",
    "NO_RESOURCES": "the nodes of the Ray cluster that have that much are in use",
    "FAILED_TO_COMMIT_RESOURCES": "a node was taken while Ray reserved it; it tries again",
}
"""The scheduling state of a placement group that waits; others say nothing."""


def never_begins(details: Mapping[str, Any]) -> str:
    """Why the driver cannot begin, by its entry in the dashboard; empty: it can, or ended later."""
    code = details.get("driver_exit_code")
    return DRIVER_EXITS.get(code, "") if details["status"] == "FAILED" and isinstance(code, int) else ""


def ended(known: Mapping[str, Any]) -> tuple[Loss, Mapping[int, Loss]]:
    """What the end of an attempt means for nodes that did not report; those of which the driver knows more apart."""
    nodes = losses(known)
    if known.get("refused"):
        message = _joined("Ray refused what it asks for", known["refused"])
        return Loss(reason=Reason.LAUNCH_REFUSED, message=message), nodes
    if known.get("lost_launch"):
        message = "Ray lost what it was to run before it was started"
        return Loss(reason=Reason.ENGINE_UNAVAILABLE, message=message), nodes
    if known.get("stopped") or known.get("removed"):
        return Loss(reason=Reason.ENGINE_CANCELLED, message="it was stopped on the Ray cluster"), nodes
    # Others ended because of the one that was lost.
    gone = [number for number, entry in sorted(known["results"].items()) if "lost" in entry]
    if gone or nodes:
        return nodes[int(gone[0])] if gone else next(iter(nodes.values())), nodes
    return Loss(reason=Reason.WORKER_LOST, message="its worker ended on Ray without a report"), nodes


def losses(known: Mapping[str, Any]) -> dict[int, Loss]:
    """Of the nodes that ended badly."""
    found = sorted((int(number), entry) for number, entry in (known.get("results") or {}).items())
    return {number: _of_node(entry) for number, entry in found if entry.get("exit") != 0}


def waiting(known: Mapping[str, Any]) -> str:
    """What an attempt waits for."""
    if known["phase"] == "starting":
        return f"{len(known['addresses'])} of {known['nodes']} workers have started"
    if "bundle" not in known:
        return "the Ray cluster prepares it"
    wanted = ", ".join(_amount(name, value) for name, value in sorted(known["bundle"].items()))
    if known["nodes"] > 1:
        wanted = f"{known['nodes']} times ({wanted})"
    return f"waits for {wanted or 'nodes'}" + (f": {WAITS[known['why']]}" if known.get("why") in WAITS else "")


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


def _joined(text: str, detail: str) -> str:
    return f"{text}: {detail}" if detail else text


def _short(text: str) -> str:
    """The last words of a longer text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= 500 else f"...{line[-500:]}"
