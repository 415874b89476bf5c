"""What backends and workers report of an attempt, and the checks that make it safe to store. Pure. Code inside a job
can write anything into its run directory: only values that are finite, bounded and plain text pass."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.server.core.job import JobProgress


class Liveness(StrEnum):
    """What a backend knows of one node's worker. Unknown is not gone."""

    UNCLAIMED = "unclaimed"
    ALIVE = "alive"
    GONE = "gone"
    REBOOTED = "rebooted"
    """Gone together with the whole machine."""
    REVOKED = "revoked"
    """The server took the claim itself: nobody will ever run it."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObservation:
    """What was seen of one node of an attempt since the last observation."""

    liveness: Liveness
    records: Sequence[Mapping[str, Any]] = ()
    """New records of its worker and its ranks, in order."""
    exit: Mapping[str, Any] | None = None
    endpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptObservation:
    attempt: int
    nodes: Sequence[NodeObservation]
    offsets: Mapping[str, int] = field(default_factory=dict)
    """How far each stream will have been read, and how many of its lines were taken."""
    progress: JobProgress | None = None
    behind: bool = False
    """The streams have more than this observation read."""
    unclaimed_launches: int = 0
    """How many launches of the job in a row, this one among them, no worker claimed in time."""

    def without_reports(self, note: str) -> AttemptObservation:
        """The same, with a note in place of everything that the attempt reported."""
        cut = [{"type": "reports_cut", "message": note}]
        nodes = [replace(node, records=cut if number == 0 else ()) for number, node in enumerate(self.nodes)]
        return replace(self, nodes=nodes, progress=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutage:
    """That the engine of a cluster does not answer."""

    since: float
    """When that was noticed first."""
    problem: str
    """What it, or the way to it, says instead, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What runs a backend's jobs, where that is not this server itself."""

    name: str = ""
    """Such as `podman`; empty: none answers."""
    host: str = ""
    problem: str = ""
    """Why none answers, and what was tried."""


MAX_TEXT = 2000
MAX_PATH = 4096
MAX_ID = 512
"""Of what code inside a job names; databases bound the size of a key."""
MAX_METRICS = 200
"""Names that are kept of a job's last values, or of a checkpoint's."""
MAX_NAME = 200
MAX_ATTRIBUTES = 64 * 1024
"""Of what a trainer says of a checkpoint, as JSON."""
MAX_DEPTH = 16
MAX_STACKS = 16
MAX_STACK = 20_000
MAX_LAST_LINES = 20
MAX_LAST_LINE = 500
_MAX_WHOLE = 2**63 - 1
"""No database takes a greater one."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
"""In a path, they would end a line of a log or of a header."""


def text(value: object, longest: int = MAX_TEXT) -> str | None:
    """Text that every database takes and JSON can carry; None when it is no text."""
    if not isinstance(value, str):
        return None
    return value[:longest].encode("utf-8", "replace").replace(b"\0", b"").decode()


def exact_text(value: object, longest: int = MAX_PATH) -> str:
    """Text that is of use only if nothing of it is changed: an id or a path; ValueError when it cannot be kept so."""
    if not isinstance(value, str) or not value or text(value, longest) != value or _CONTROL.search(value):
        raise ValueError(f"an id or a path is no text of 1 to {longest} plain characters")
    return value


def number(value: object, low: float = -sys.float_info.max, high: float = sys.float_info.max) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if low <= value <= high else None


def whole(value: object, low: int = 0, high: int = _MAX_WHOLE) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if low <= value <= high else None


def moment(value: object, *, since: float, now: float) -> float | None:
    """A time by another clock, limited to what is possible; None when it is no time."""
    told = number(value)
    return None if told is None else min(max(told, since), now)


def metrics(values: object) -> dict[str, float]:
    """The first named numbers, up to the limit."""
    found: dict[str, float] = {}
    for name, value in values.items() if isinstance(values, Mapping) else ():
        key, told = text(name, MAX_NAME), number(value)
        if key is not None and told is not None:
            found[key] = told
        if len(found) == MAX_METRICS:
            break
    return found


def attributes(value: object) -> dict[str, Any]:
    """A plain document that a trainer says of a checkpoint; an empty one when it is none, or too large."""
    cleaned = _plain(value, MAX_DEPTH) if isinstance(value, Mapping) else {}
    return cleaned if len(json.dumps(cleaned)) <= MAX_ATTRIBUTES else {}


def _plain(value: object, depth: int) -> Any:
    match value:
        case str():
            return text(value)
        case bool() | None:
            return value
        case int():
            return whole(value, low=-_MAX_WHOLE)
        case float():
            return number(value)
        case Mapping() if depth:
            return {text(str(name), MAX_NAME): _plain(item, depth - 1) for name, item in value.items()}
        case list() | tuple() if depth:
            return [_plain(item, depth - 1) for item in value]
        case _:
            return None


def stacks(value: object) -> dict[str, str]:
    told = list(value.items())[:MAX_STACKS] if isinstance(value, Mapping) else []
    return {
        rank: stack
        for name, dump in told
        if (rank := text(name, MAX_NAME)) is not None and (stack := text(dump, MAX_STACK)) is not None
    }


def ending(document: Mapping[str, Any], *, since: float, now: float) -> dict[str, Any]:
    """An exit document with what can be understood of it, field by field; it always has a reason and a time."""
    told = text(document.get("reason"), MAX_NAME)
    try:
        reason, message = Reason(told or ""), text(document.get("message")) or ""
    except ValueError:
        reason, message = Reason.WORKER_LOST, f"ended with an unknown reason: {told}"
    ended_at = moment(document.get("ended_at"), since=since, now=now)
    understood = {
        "reason": reason,
        "message": message,
        "exit_code": whole(document.get("exit_code"), low=-(2**31), high=2**32),
        "signal": text(document.get("signal"), MAX_NAME),
        "rank": whole(document.get("rank")),
        "step": text(document.get("step"), MAX_NAME),
        "stop_cause": next((cause for cause in StopCause if cause == text(document.get("stop_cause"), MAX_NAME)), None),
        "started_at": moment(document.get("started_at"), since=since, now=now),
        "ended_at": now if ended_at is None else ended_at,
        "evidence": _evidence(document.get("evidence")),
    }
    return {name: value for name, value in understood.items() if value is not None}


def _evidence(value: object) -> dict[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    lines = value.get("last_lines")
    told = lines[-MAX_LAST_LINES:] if isinstance(lines, list | tuple) else []
    understood = {
        "last_lines": [line for said in told if (line := text(said, MAX_LAST_LINE)) is not None],
        "frame": text(value.get("frame")),
        "oom_kills": whole(value.get("oom_kills")),
    }
    return {name: found for name, found in understood.items() if found is not None}
