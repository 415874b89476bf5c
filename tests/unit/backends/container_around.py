"""A server around the containers of tests that need no engine."""

from __future__ import annotations

from pathlib import Path

from trainmaster.backends.container.container_spec import ContainerContext

AROUND = ContainerContext(
    runs=Path("/srv/runs"),
    run_dir=Path("/srv/runs/job-1/2"),
    worker=Path("/srv/workers/worker.pyz"),
    secrets=Path("/dev/shm/trainmaster-0"),
    user="0:0",
    machine_memory_mb=4096,
    passes_gpus=True,
)
