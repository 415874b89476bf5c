"""Why a job waits, and what would let it run."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trainmaster.server.http.envelope import Wire
from trainmaster.server.scheduling.explain import Blocker, Explanation, PendingCode

MOST_BLOCKERS = 20


class BestNodeResource(Wire):
    """The node that lacks the least."""

    id: str
    gpus_free: int = Field(description="Of those that are good enough for the job.")
    cpu_cores_free: int
    ram_mb_free: int
    storage_mb_free: int
    slots_free: int


class BlockerResource(Wire):
    """A job that is in the way."""

    job_id: str | None = Field(description="Null: another account's.")
    queued: bool = Field(description="It waits too, and comes first; otherwise it holds what is needed.")
    gpus: int = Field(description="What it holds, or asks for.")
    ends_in_seconds: float | None = Field(description="As far as it is known; 0: it should have ended by now.")


class PendingResource(Wire):
    """Why a job waits, and what would let it run."""

    code: PendingCode
    message: str = Field(description="Goes on from: the job ...")
    needs: str
    best_node: BestNodeResource | None
    blockers: list[BlockerResource] = Field(
        description=f"When all of these are gone, it starts; the first {MOST_BLOCKERS}."
    )
    blocker_count: int = Field(description="How many there are.")
    would_start_if: str = Field(description="Goes on from: it would start if ...")
    max_runtime_seconds: int | None = Field(description="With a limit no longer than this it would start now.")


def pending_document(explanation: Explanation) -> dict[str, Any]:
    """An explanation on the wire: a `PendingResource`."""
    best = explanation.best_node
    return {
        "code": explanation.code,
        "message": explanation.message,
        "needs": explanation.needs,
        "best_node": None
        if best is None
        else {
            "id": best.node_id,
            "gpus_free": best.gpus_free,
            "cpu_cores_free": best.cpu_cores_free,
            "ram_mb_free": best.ram_mb_free,
            "storage_mb_free": best.storage_mb_free,
            "slots_free": best.slots_free,
        },
        "blockers": [_blocker(blocker) for blocker in explanation.blockers[:MOST_BLOCKERS]],
        "blocker_count": len(explanation.blockers),
        "would_start_if": explanation.would_start_if,
        "max_runtime_seconds": explanation.runtime_s,
    }


def _blocker(blocker: Blocker) -> dict[str, Any]:
    ends_in_s = blocker.ends_in_s
    return {
        "job_id": blocker.job_id,
        "queued": blocker.queued,
        "gpus": blocker.gpus,
        "ends_in_seconds": None if ends_in_s is None else round(ends_in_s, 3),
    }
