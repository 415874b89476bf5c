"""Docker's own engine for tests, beside podman: behind a socket of its own, and with the images that podman has."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import container_engine
from patience import PATIENCE_S


@dataclass(slots=True, kw_only=True)
class DockerEngine(container_engine.Engine):
    """A docker engine that answers."""

    @property
    def host(self) -> str:
        """Where it answers."""
        return f"unix://{self.directory}/docker.sock"

    def start(self) -> None:
        """Have it answer; it changes nothing of this machine's firewall."""
        places = [f"--{name}={self.directory}/{name}" for name in ("data-root", "exec-root", "pidfile")]
        apart = ["--iptables=false", "--ip6tables=false", "--bridge=none"]
        with open(self.directory / "log", "a") as log:
            command = ["dockerd", "--host", self.host, *places, *apart]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)
        deadline = time.monotonic() + PATIENCE_S
        while subprocess.run(["docker", "--host", self.host, "info"], capture_output=True, check=False).returncode:
            assert self.process.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < deadline, "docker does not answer"
            time.sleep(0.2)

    def podman(self, *arguments: str) -> str:
        """What docker says to a command that both have."""
        command = ["docker", "--host", self.host, *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def take(self, image: str, other: container_engine.Engine) -> None:
        """Have an image that another engine has."""
        with tempfile.NamedTemporaryFile() as archive:
            other.podman("save", "--output", archive.name, image)
            self.podman("load", "--quiet", "--input", archive.name)


def missing() -> str | None:
    """Why docker is not tested here; None where it is."""
    absent = [name for name in ("dockerd", "docker", "containerd") if shutil.which(name) is None]
    return f"{', '.join(absent)} is not installed; `scripts/containers.sh docker` does that" if absent else None


@contextlib.contextmanager
def running_docker() -> Iterator[DockerEngine]:
    """The engine, for the length of a block."""
    with tempfile.TemporaryDirectory(prefix="tm-docker-", dir="/tmp") as place:
        engine = DockerEngine(directory=Path(place), environment=dict(os.environ))
        try:
            engine.start()
            yield engine
        finally:
            engine.stop()
