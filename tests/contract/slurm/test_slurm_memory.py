"""Jobs over their memory on a cluster that limits it by cgroups, as most do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_servers import quiet_port
from slurm_cluster import SlurmCluster, missing, running_cluster
from slurm_servers import SlurmServer

pytestmark = pytest.mark.long
"""It needs a cluster of its own."""

MEMORY = Path("/sys/fs/cgroup/memory")
EATS = "held = bytearray(600 << 20); import time; time.sleep(600)"


@pytest.fixture(scope="module")
def limited() -> Iterator[SlurmCluster]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    if not os.access(MEMORY / "cgroup.procs", os.W_OK):
        pytest.skip(f"{MEMORY} is not there, or cannot be written")
    with running_cluster(_limit) as started:
        yield started


def _limit(cluster: SlurmCluster) -> None:
    conf = cluster.conf.read_text().replace("TaskPlugin=task/none", "TaskPlugin=task/cgroup")
    cluster.conf.write_text(conf.replace("JobAcctGatherParams=OverMemoryKill\n", ""))
    (cluster.directory / "cgroup.conf").write_text(
        "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\nConstrainSwapSpace=no\n"
    )


def test_rank_over_the_memory_of_its_job_ends_it_out_of_memory_with_the_limit(
    limited: SlurmCluster, tmp_path: Path
) -> None:
    server = SlurmServer(tmp_path / "data", limited, quiet_port())
    try:
        server.start()
        workload = {"kind": "command", "argv": ["python3", "-c", EATS]}
        asked = {"name": "n", "workload": workload, "resource_config": {"gpu_count": 0, "ram_min_mb": 300}}
        job = server.until(server.data("POST", "/v1/jobs", asked)["job_id"])
        attempt = job["attempts"][-1]
        assert attempt["reason"] == "OUT_OF_MEMORY", job
        assert "300" in attempt["message"]
    finally:
        server.clean_up()
