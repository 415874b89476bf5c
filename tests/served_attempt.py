"""An attempt at a served API whose files a test reads and writes over HTTP, as its ranks would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from api_world import COMMAND, Served, World

from patience import PATIENCE_S
from trainmaster.protocol import environment
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Share
from trainmaster.server.storage import ARTIFACTS


@dataclass(frozen=True, kw_only=True)
class ServedAttempt:
    world: World
    job: Job
    url: str
    token_file: Path

    @property
    def attempt_id(self) -> str:
        return f"{self.job.job_id}.{self.job.live.number}"

    @property
    def files_url(self) -> str:
        return f"{self.url}/v1/worker/attempts/{self.attempt_id}/files"

    @property
    def checkpoints(self) -> str:
        """The URI of its root for checkpoints."""
        return f"{self.files_url}/checkpoints"

    @property
    def artifacts(self) -> Path:
        return self.world.roots.path(ARTIFACTS, "")

    @property
    def home(self) -> Path:
        """The job's directory for checkpoints on the server."""
        return self.artifacts / self.job.job_id / "checkpoints"

    @property
    def uploads(self) -> Path:
        """What has arrived and is not committed."""
        return self.artifacts / ".uploads" / self.attempt_id

    @property
    def environment(self) -> dict[str, str]:
        """What a rank has to know."""
        return {environment.TOKEN_FILE: str(self.token_file)}

    def ask(self, method: str, path: str, *, token: str | None = None, **options: Any) -> httpx.Response:
        """One request with the ranks' token, or another."""
        headers = {"Authorization": f"Bearer {token or self.job.live.rank_token}", **options.pop("headers", {})}
        url = f"{self.files_url}/{path}"
        return httpx.request(method, url, headers=headers, timeout=PATIENCE_S, verify=False, trust_env=False, **options)


def submit(world: World, served: Served, account_id: str = "default", **fields: Any) -> str:
    """Submit a job of an account; its id."""
    headers = {"Authorization": f"Bearer {world.key(account_id)}"}
    document = {**COMMAND, "scheduling_config": {"max_retries": 3}, **fields}
    answer = httpx.post(f"{served.url}/v1/jobs", json=document, headers=headers, verify=False, trust_env=False)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["data"]["job_id"])


def open_attempt(
    world: World, served: Served, directory: Path, job_id: str | None = None, nodes: int = 1
) -> ServedAttempt:
    """The next attempt of a job, by default of a new one."""
    job_id = job_id or submit(world, served)
    world.queue(job_id)
    job = world.place(job_id, *(Share(node_id=f"node-{node}") for node in range(nodes)))
    token_file = directory / f"token-{job_id}-{job.live.number}"
    token_file.write_text(job.live.rank_token)
    return ServedAttempt(world=world, job=job, url=served.url, token_file=token_file)


@contextlib.contextmanager
def served_attempt(directory: Path) -> Iterator[ServedAttempt]:
    """A new attempt at a server of its own."""
    with World.open(directory) as world, Served.serve(world.context()) as served:
        yield open_attempt(world, served, directory)
