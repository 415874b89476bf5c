"""A job that has reported more than the server can read at once gives way to others all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Cluster

from scripted_backend import Act
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import events_stream
from trainmaster.server.coordinator.observation import READS_AFTER_END
from trainmaster.server.core.states import JobStatus
from trainmaster.server.storage import ARTIFACTS

IN_TICKS = READS_AFTER_END + 12
"""For the stop, the looks at what is left, and the start of the other job. All of the flood takes 200 and more."""


def reports_of(cluster: Cluster, request: AttemptRequest, count: int) -> bytes:
    home = cluster.roots.path(ARTIFACTS, f"{request.job_id}/checkpoints")
    lines = [
        {"type": "checkpoint", "checkpoint_id": f"{request.attempt_id}-{n}", "step": n, "path": f"{home}/{n}"}
        for n in range(count)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.mark.parametrize("reports", [50, 50_000])
def test_preemptor_of_a_job_starts_soon_however_much_that_has_reported(tmp_path: Path, reports: int) -> None:
    def script(request: AttemptRequest, node: int) -> Iterator[Act]:
        yield {"type": "started", "ranks": []}
        directory = cluster.world.run_directory(request)
        directory.append(events_stream(node, 0), 0, reports_of(cluster, request, reports))
        while True:
            yield {}

    cluster = Cluster(tmp_path, script, gpus=1)
    low = cluster.submit(scheduling_config={"priority": 1, "preemptible": True})
    cluster.until(lambda: cluster.job(low.job_id).latest_checkpoint_id is not None)
    high = cluster.submit(scheduling_config={"priority": 9})
    cluster.until(lambda: cluster.job(high.job_id).status is JobStatus.TRAINING, ticks=IN_TICKS)
    assert cluster.job(low.job_id).latest_checkpoint_id == f"{low.job_id}.1-{reports - 1}"
    told = [event.message for event in cluster.events(low.job_id) if event.type == "reports_cut"]
    assert ["were skipped" in message for message in told] == ([True] if reports > 2500 else [])
    cluster.database.close()
