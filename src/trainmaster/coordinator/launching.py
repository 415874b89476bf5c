"""From a placed job to the request that its workers get."""

from __future__ import annotations

from collections.abc import Mapping

from trainmaster.core.job import Checkpoint, Job
from trainmaster.core.resources import Node
from trainmaster.core.spec import load_stored
from trainmaster.core.workloads import compile_launch
from trainmaster.protocol.request import AttemptRequest, NodeAssignment
from trainmaster.protocol.rundir import OWNER, RANKS_OWNER
from trainmaster.storage import ARTIFACTS, BLOBS, RUNS, Roots, checkpoints_path


def attempt_request(
    job: Job,
    *,
    nodes: Mapping[str, Node],
    roots: Roots,
    resume: Checkpoint | None,
    hint_socket: str | None,
    server_url: str | None,
    uid: int | None = None,
    log_cap_bytes: int = 0,
) -> AttemptRequest:
    """What the workers of the current attempt are told; `uid` is as whom they run its ranks."""
    attempt = job.live
    shared = server_url is None
    return AttemptRequest(
        job_id=job.job_id,
        attempt=attempt.number,
        token=attempt.token,
        rank_token=attempt.rank_token,
        launch=compile_launch(load_stored(job.spec_version, job.spec)),
        nodes=tuple(
            NodeAssignment(
                node_id=share.node_id,
                address=nodes[share.node_id].address if share.node_id in nodes else "127.0.0.1",
                gpus=_devices(nodes.get(share.node_id), share.gpus),
            )
            for share in attempt.shares
        ),
        checkpoint_dir=str(roots.path(ARTIFACTS, checkpoints_path(job.job_id))),
        output_dir=str(roots.path(ARTIFACTS, f"{job.job_id}/output")),
        owner_file=str(roots.path(RUNS, f"{job.job_id}/{OWNER if uid is None else RANKS_OWNER}")),
        resume_from=str(roots.path(resume.root, resume.path)) if resume else None,
        max_runtime_s=job.max_runtime_s,
        hint_socket=hint_socket if shared else None,
        server_url=server_url,
        blob_dir=str(roots.path(BLOBS, job.account_id)) if shared else None,
        uid=uid,
        log_cap_bytes=log_cap_bytes,
    )


def _devices(node: Node | None, indexes: tuple[int, ...]) -> tuple[str, ...]:
    if node is None:
        return tuple(map(str, indexes))
    by_index = {gpu.index: gpu.device for gpu in node.gpus}
    return tuple(by_index.get(index, str(index)) for index in indexes)
