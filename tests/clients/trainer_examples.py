"""The examples of Kubeflow's reference of its client, as they stand there but for the import."""

from __future__ import annotations

import sys
from typing import Any

WATCHING = """\
from trainmaster.trainer import TrainerClient

for logline in TrainerClient().get_job_logs(name="s8d44aa4fb6d", follow=True):
    print(logline)
"""
GPUS = 'resources_per_node = {"gpu": 4, "cpu": 5, "memory": "10G"}'
SLICE = 'resources_per_node = {"mig-1g.5gb": 1}'

SIMULATED_GPUS = "H100-80GB:4,mig-1g.5gb:1"
LARGE_MACHINE = (
    sys.executable,
    "-c",
    "import os, sys; os.cpu_count = lambda: 8; from trainmaster.cli import main; sys.exit(main())",
)
"""The command of a server that finds as many cores as the examples want; with these GPUs, they have room."""


def run_example(text: str) -> dict[str, Any]:
    """The names that an example leaves."""
    names: dict[str, Any] = {}
    exec(text, names)
    return names
