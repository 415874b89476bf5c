"""What root of a container leaves on the machine, and whether users of the machine can reach it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainmaster.protocol.request import AttemptRequest
from trainmaster.server.coordinator.launch import attempt_request
from trainmaster.server.core.commands import submit
from trainmaster.server.core.observations import admit, place
from trainmaster.server.core.resources import Share
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots, run_directory
from trainmaster.worker.staging import stage
from trainmaster.worker.users import acting_as, user_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

UID = 61001
WORKLOADS = (
    {"kind": "command", "argv": ["x"]},
    {"kind": "trainer_service", "base_model": "m", "model_path": "/m"},
    {"kind": "job_class", "target": "module:Class", "project": "p", "group": "g", "name": "n"},
)


@pytest.fixture
def ground() -> Iterator[Path]:
    """A directory that every user may pass through, and the umask of a server."""
    before = os.umask(0o077)
    directory = Path(tempfile.mkdtemp(prefix="trainmaster-confined-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory)
    os.umask(before)


def request_of(
    ground: Path, account: str, workload: dict[str, Any], *, uid: int | None = None, confined: bool = False
) -> AttemptRequest:
    roots = Roots({name: ground / name for name in (RUNS, ARTIFACTS, BLOBS)})
    document = {"name": "j", "workload": workload, "resource_config": {"gpu_count": 0}}
    job_id = f"job-{account}{workload['kind'].replace('_', '')}"
    compiled = compile_job(parse_submit(document))
    made = submit(
        compiled,
        account_id=account,
        job_id=job_id,
        created_by="t",
        now=1.0,
        default_backend="local",
    )
    admitted = admit(made.job, now=1.0)
    assert admitted is not None
    placed = place(admitted.job, now=1.0, shares=[Share(node_id="n")], token="t")
    assert placed is not None
    cache = ground / "cache"
    request = attempt_request(
        placed.job,
        compiled.launch,
        nodes={},
        roots=roots,
        resume=None,
        hint_socket=None,
        server_url=None,
        uid=uid,
        confined=confined,
        cache=cache,
    )
    run_directory(roots, job_id, 1).create(request)
    for path in (*(ground / name for name in (RUNS, ARTIFACTS)), cache):
        path.mkdir(exist_ok=True)
        path.chmod(0o711)  # as the local backend opens them
    return request


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload["kind"])
def test_logins_cannot_reach_a_setuid_program_that_root_of_a_container_left(
    ground: Path, workload: dict[str, Any]
) -> None:
    of_login = request_of(ground, "login", workload, uid=UID)
    confined = request_of(ground, "vision", workload, confined=True)
    user = user_of(UID)
    stage(of_login, ground / "runs" / of_login.job_id / "1", 0, lambda: None, user)
    run = ground / "runs" / confined.job_id / "1"
    mounted = [confined.checkpoint_dir, confined.output_dir, str(confined.cache_dir), *map(str, (run, run / "work"))]
    for directory in map(Path, mounted):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # as the container backend makes them
        shutil.copy("/bin/true", directory / "program")
        (directory / "program").chmod(0o4755)
        if directory != run:  # which is mounted to be read
            directory.chmod(0o755)
    for directory in mounted:
        with acting_as(user), pytest.raises(PermissionError):
            os.stat(f"{directory}/program")
    with acting_as(user):
        assert os.listdir(of_login.checkpoint_dir) == []
