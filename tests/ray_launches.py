"""Launches for the tests of the Ray client."""

from __future__ import annotations

import uuid
from typing import Any

from trainmaster.backends.cluster.engine import EngineLaunch, engine_name
from trainmaster.backends.ray.render import NODE_VARIABLE
from trainmaster.protocol.launch import Launch, LaunchStep
from trainmaster.protocol.request import AttemptRequest, EngineNeeds, NodeAssignment

__all__ = ["NODE_VARIABLE", "launch_of"]


def launch_of(
    *command: str, instance: str = "k3f9", job_id: str = "", node_count: int = 1, grace_s: float = 30.0, **needs: Any
) -> EngineLaunch:
    job_id = job_id or f"job-{uuid.uuid4().hex[:12]}"
    request = AttemptRequest(
        job_id=job_id,
        attempt=1,
        token="secret-token",
        rank_token="rank-token",
        launch=Launch(kind="command", steps=(LaunchStep(name="main", argv=("train",)),)),
        nodes=(NodeAssignment(node_id="ray"),) * node_count,
        checkpoint_dir="/srv/checkpoints",
        output_dir="/srv/output",
        owner_file="/srv/owner.json",
        engine_needs=EngineNeeds(**{"account": "team", "job_name": "answers; rm -rf $HOME", **needs}),
    )
    return EngineLaunch(
        name=engine_name(instance, request.attempt_id),
        instance=instance,
        request=request,
        grace_s=grace_s,
        command=command or ("sh", "-c", "exec true"),
        environment={"TRAINMASTER_WORKER": '{"attempt_id": "' + request.attempt_id + '"}'},
        secrets={"TRAINMASTER_WORKER_TOKEN": "secret-token"},
    )
