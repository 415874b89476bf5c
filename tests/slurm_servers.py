"""Servers whose default backend is a Slurm cluster."""

from __future__ import annotations

from pathlib import Path

from cluster_engines import SlurmUnderTest
from cluster_servers import ClusterServer
from slurm_cluster import SlurmCluster


class SlurmServer(ClusterServer):
    def __init__(
        self,
        directory: Path,
        cluster: SlurmCluster,
        port: int,
        *,
        partition: str = "low",
        under_test: type[SlurmUnderTest] = SlurmUnderTest,
    ) -> None:
        self.slurm = under_test(cluster)
        super().__init__(directory, port, {"hpc": self.slurm}, changes={"partition": partition})
        self.cluster = cluster

    def jobs_on_cluster(self, job_id: str = "") -> list[str]:
        """The names of jobs that wait or run on the cluster."""
        return self.slurm.left(job_id)
