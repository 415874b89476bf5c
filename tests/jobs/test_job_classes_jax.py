"""Job classes with JAX, in a process of its own: who has used JAX cannot fork any more, and other tests do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INNER = Path(__file__).with_name("jax_job_classes.py")


def test_job_classes_with_jax_keep_every_promise(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n0",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            tmp_path / "inner",
            INNER,
        ],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            "JAX_PLATFORMS": "cpu",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
