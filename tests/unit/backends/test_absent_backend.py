"""Jobs of a backend that the server does not have: what is known of them, and that nobody waits for them for ever."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainmaster.backends import BACKENDS
from trainmaster.backends.base import LaunchError
from trainmaster.backends.stand_ins import UnavailableBackend
from trainmaster.protocol.launch import CONTAINER, Launch, LaunchStep
from trainmaster.protocol.processes import boot_id
from trainmaster.protocol.request import AttemptRequest, NodeAssignment
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.server.core.reports import Liveness

WHY = "it is not installed"


def test_reboot_ends_what_an_absent_backend_ran_and_force_is_only_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = AttemptRequest(
        job_id="job-1",
        attempt=1,
        token="",
        rank_token="",
        launch=Launch(kind="command", steps=(LaunchStep(name="main", argv=("true",)),)),
        nodes=tuple(NodeAssignment(node_id=name) for name in "abcd"),
        checkpoint_dir="",
        output_dir="",
        owner_file="",
    )
    directory = RunDirectory(tmp_path / "run")
    directory.create(request, with_ranks=True)
    directory.claim(0, {"nonce": "0", "boot_id": boot_id()})
    directory.claim(1, {"nonce": "1", "boot_id": "of another day"})
    directory.claim(2, {"nonce": "2", "revoked": True})
    backend = UnavailableBackend(CONTAINER, BACKENDS[CONTAINER].capabilities, lambda _: directory, why=WHY)
    seen = [Liveness.UNKNOWN, Liveness.REBOOTED, Liveness.REVOKED, Liveness.UNCLAIMED]
    assert list(backend.observe(request)) == seen
    elsewhere = replace(BACKENDS[CONTAINER].capabilities, runs_here=False)  # a boot of this machine says nothing
    remote = UnavailableBackend(CONTAINER, elsewhere, lambda _: directory, why=WHY)
    assert list(remote.observe(request))[:2] == [Liveness.UNKNOWN, Liveness.UNKNOWN]
    backend.sweep(request, 1)
    with pytest.raises(LaunchError, match=WHY):
        backend.sweep(request, 0)
    backend.kill(request)
    assert [(record.exc_info, record.getMessage()) for record in caplog.records] == [
        (None, f"job-1.1 cannot be ended by force: {WHY}")
    ]
