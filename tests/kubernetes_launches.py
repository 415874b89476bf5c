"""Attempts for the tests of the Kubernetes client, whose workers are shell scripts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trainmaster.backends.cluster.engine import EngineLaunch, engine_name
from trainmaster.protocol.launch import ContainerRequest, Launch, LaunchStep
from trainmaster.protocol.request import AttemptRequest, EngineNeeds, NodeAssignment

INSTANCE = "k3f9"
IMAGE, BARE = os.environ.get("TRAINMASTER_TEST_IMAGE", "localhost/python:test"), "localhost/bare:test"
"""The test server takes any name for this machine, and hides its programs from containers of the second; a real cluster
has to have them."""


def kubernetes_launch(
    script: str = "exec worker",
    *,
    instance: str = INSTANCE,
    job_id: str = "job-wk96lltjcfl9",
    nodes: int = 1,
    grace_s: float = 20.0,
    max_runtime_s: float | None = None,
    image: str | None = None,
    container: ContainerRequest | None = None,
    environment: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    **needs: Any,
) -> EngineLaunch:
    step = LaunchStep(name="main", argv=("true",))
    request = AttemptRequest(
        job_id=job_id,
        attempt=1,
        token="",
        rank_token="",
        launch=Launch(kind="command", steps=(step,), image=image, container=container or ContainerRequest()),
        nodes=tuple(NodeAssignment(node_id="") for _ in range(nodes)),
        checkpoint_dir="",
        output_dir="",
        owner_file="",
        max_runtime_s=max_runtime_s,
        engine_needs=EngineNeeds(**{"account": "default", "job_name": "a job", **needs}),
    )
    return EngineLaunch(
        name=engine_name(instance, request.attempt_id),
        instance=instance,
        request=request,
        grace_s=grace_s,
        command=("sh", "-c", script),
        environment=environment or {},
        secrets=secrets or {},
    )
