"""Why a job waits, and what would let it run."""

from __future__ import annotations

from trainmaster.schema.jobs import MOST_BLOCKERS, BlockerResource, PendingResource
from trainmaster.server.scheduling.explain import Blocker, Explanation


def pending_resource(explanation: Explanation) -> PendingResource:
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


def _blocker(blocker: Blocker) -> BlockerResource:
    ends_in_s = blocker.ends_in_s
    return {
        "job_id": blocker.job_id,
        "queued": blocker.queued,
        "gpus": blocker.gpus,
        "ends_in_seconds": None if ends_in_s is None else round(ends_in_s, 3),
    }
