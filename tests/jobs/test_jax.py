"""Trees and job classes with JAX, in a process of their own: who has used JAX cannot fork, and other tests do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_S

INNER = ("jax_trees.py", "jax_job_classes.py", "jax_ambient_jobs.py")


def test_trees_and_job_classes_with_jax_keep_every_promise(tmp_path: Path) -> None:
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
            *(Path(__file__).with_name(name) for name in INNER),
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


@pytest.mark.long  # jax_trees.py saves and loads with several processes, and reshards arrays
def test_checkpoint_is_sharded_anew_over_another_number_of_processes(tmp_path: Path) -> None:
    ranks(1, tmp_path, 1)
    pair = ranks(2, tmp_path, 2)
    assert all(said["refused"] and (said["step"], said["scale"], said["hosts"]) == (1, 10.0, 2) for said in pair)
    assert [said["rows"] for said in pair] == [[[10.0, 11.0], [12.0, 13.0]], [[14.0, 15.0], [16.0, 17.0]]]
    (alone,) = ranks(1, tmp_path, 3)
    assert alone["refused"]
    assert (alone["step"], alone["scale"], alone["devices"], alone["hosts"]) == (2, 20.0, 2, 1)
    assert alone["rows"] == [[20.0, 21.0, 22.0, 23.0], [24.0, 25.0, 26.0, 27.0]]


def ranks(count: int, root: Path, step: int) -> list[dict[str, Any]]:
    """What each of so many JAX processes, with two devices each, has to say."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    environ = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("jax_elastic_rank.py")), str(root), str(step)],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    said = [rank.communicate(timeout=PATIENCE_S) for rank in started]
    assert [rank.returncode for rank in started] == [0] * count, said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]
