"""Servers whose default backend is a Slurm cluster."""

from __future__ import annotations

from pathlib import Path

from job_server import JobServer
from real_server import ENDED, wait_for
from slurm_cluster import SlurmCluster


class SlurmServer(JobServer):
    """A server with a real cluster, which it declares in its settings file."""

    def __init__(self, directory: Path, cluster: SlurmCluster, port: int, *, partition: str = "low") -> None:
        directory.mkdir(parents=True)
        options = f"""
kind = "slurm"
partition = "{partition}"
conf = "{cluster.conf}"
output_dir = "{cluster.directory}/out"
work_dir = "{cluster.directory}/work"
poll_s = 0.2
"""
        settings = f"""
backends = ["hpc"]
[clusters.hpc]{options}
[clusters.people]{options}account_users = true
"""
        (directory / "config.toml").write_text(settings)
        for name in ("work", "out"):
            (cluster.directory / name).mkdir(exist_ok=True)
            (cluster.directory / name).chmod(0o1777)  # users of the cluster write there
        # Workers know one address: it has to stay the same when the server is started again.
        super().__init__(directory, "--port", str(port), environment={"PATH": cluster.environment["PATH"]})
        self.cluster = cluster

    def jobs_on_cluster(self, job_id: str = "") -> list[str]:
        """The names of jobs that wait or run on the cluster."""
        names = self.cluster.run("squeue", "--noheader", "--format=%j").split()
        return [name for name in names if job_id in name]

    def end_all_jobs(self) -> None:
        """Cancel what still runs; nothing of it may be left on the cluster."""
        listed = self.data("GET", "/v1/jobs?page_size=100")["jobs"]
        live = [job["job_id"] for job in listed if job["status"] not in (*ENDED, "PAUSED")]
        for job_id in live:
            self.ask("POST", f"/v1/jobs/{job_id}/cancel")
        for job_id in live:
            self.until(job_id, *ENDED, "PAUSED")
        wait_for(lambda: not self.jobs_on_cluster(), "the end of all jobs on the cluster")
