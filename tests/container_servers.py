"""A real server whose jobs run in containers."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from container_engine import Engine
from job_server import JobServer
from real_server import ENDED, wait_for

SECRETS = Path("/dev/shm/trainmaster-0")
PACKAGES = next(Path(path) for path in sys.path if (Path(path) / "torch").is_dir())
"""What is installed on this machine, for containers to have mounted."""


class ContainerServer(JobServer):
    """A server with the backends `container` and `local`, and an image for jobs that name none."""

    def __init__(self, home: Path, engine: Engine, image: str, **settings: str) -> None:
        directory = home / "data"
        directory.mkdir()
        self.home = home
        self.engine = engine
        self.image = image
        values = {"container_host": engine.host, "container_image": image, "container_pull_policy": "Never", **settings}
        lines = [
            'backends = ["container", "local"]',
            f'data_roots = ["{home}", "{PACKAGES}", "{sys.prefix}"]',
            *(f'{name} = "{value}"' for name, value in values.items()),
        ]
        (directory / "config.toml").write_text("\n".join(lines))
        super().__init__(directory)

    def run(self, *argv: str, workload: Any = None, resources: Any = None, **document: Any) -> str:
        """Submit a command to run in a container; the job's id."""
        return self.submit(
            workload={"kind": "command", "argv": list(argv), **(workload or {})},
            resource_config={"gpu_count": 0, **(resources or {})},
            **document,
        )

    def containers(self, job_id: str = "") -> list[str]:
        """The names of what the engine has of this server, or of one of its jobs."""
        label = f"trainmaster.job={job_id}" if job_id else f"trainmaster.runs={self.directory / 'runs'}"
        return self.engine.labelled(label)

    def wait_until_cleared(self, job_id: str = "") -> None:
        """Wait until nothing is left of a job, or of any: containers, networks, secrets."""
        wait_for(lambda: not self.containers(job_id), f"the removal of what the engine has of {job_id or 'all jobs'}")
        left = [path.name for path in SECRETS.glob(f"tm-{job_id or 'job-'}*")] if job_id else []
        assert not left, left

    def end_all_jobs(self) -> None:
        """Cancel what still runs; nothing may be left of any job, and nothing booked."""
        listed = self.data("GET", "/v1/jobs?page_size=100")["jobs"]
        live = [job["job_id"] for job in listed if job["status"] not in ENDED]
        for job_id in live:
            self.ask("POST", f"/v1/jobs/{job_id}/cancel")
        for job_id in live:
            self.until(job_id)
        self.wait_until_cleared()
        for node in self.data("GET", "/v1/nodes")["nodes"]:
            assert node["slots"]["free"] == node["slots"]["total"]

    def clean_up(self) -> None:
        """End the server, and remove what a failed test left."""
        super().clean_up()
        with contextlib.suppress(AssertionError):
            for name in self.containers():
                self.engine.podman("rm", "--force", "--ignore", name)
            for name in self.containers():
                self.engine.podman("network", "rm", "--force", name)
