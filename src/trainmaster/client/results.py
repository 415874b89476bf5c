"""What jobs leave and what they used: artifacts, checkpoints, usage, and collecting what nobody keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast
from urllib.parse import quote

from trainmaster.client.connection import job_path
from trainmaster.client.download import DownloadTarget, checkpoint_problems, download, targets
from trainmaster.client.errors import DownloadError
from trainmaster.client.route_groups import RouteGroup
from trainmaster.client.types import Artifact, Collection, JobCheckpoints, Tombstone, Usage

PAGE_SIZE = 1000
LATEST, BEST = "latest", "best"


class Results(RouteGroup):
    """Files of jobs, their checkpoints, and their usage. A job is named by its id or its handle.

    Files and checkpoints of a deleted job are there until it is purged; of several that had a handle, the last.
    """

    def artifacts(
        self, job: str, *, kind: str | None = None, checkpoint_id: str | None = None, page_size: int = PAGE_SIZE
    ) -> Iterator[Artifact]:
        """The files that a job left: `kind` is "output" or "checkpoint"."""
        path = job_path(job, "artifacts")
        for page in self._connection.pages(path, kind=kind, checkpoint_id=checkpoint_id, page_size=page_size):
            yield from page["artifacts"]

    def download(
        self,
        job: str,
        directory: str | Path,
        *,
        patterns: Sequence[str] = (),
        checkpoint: str | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Path]:
        """Fetch the output of a job, or a checkpoint of it, into a directory; returns where the files are.

        Args:
            job: which one.
            directory: where to; it is made. What is there whole is left as it is; an interrupted download continues.
            patterns: only these, such as `*.safetensors` or a directory.
            checkpoint: an id, `latest` or `best`.
            progress: called with the number of bytes that came in addition, from any thread.

        Raises:
            DownloadError: a file cannot be written, or is not what it should be.
        """
        wanted = self.targets(job, directory, patterns=patterns, checkpoint=checkpoint)
        self.fetch(job, wanted, directory, progress=progress)
        return [target.path for target in wanted]

    def targets(
        self, job: str, directory: str | Path, *, patterns: Sequence[str] = (), checkpoint: str | None = None
    ) -> list[DownloadTarget]:
        """What `download` would fetch."""
        chosen = None if checkpoint is None else self.checkpoint_id(job, checkpoint)
        kind = "output" if checkpoint is None else None
        return targets(self.artifacts(job, kind=kind, checkpoint_id=chosen), Path(directory), patterns)

    def fetch(
        self, job: str, wanted: Sequence[DownloadTarget], directory: str | Path, *, progress: Callable[[int], None]
    ) -> None:
        """Fetch what `targets` has found."""
        download(self._connection, job, wanted, Path(directory), progress=progress)

    def checkpoint_id(self, job: str, name: str) -> str:
        """The id of a checkpoint that is named by its id, or as `latest` or `best`.

        Raises:
            DownloadError: the job has none.
        """
        if name not in (LATEST, BEST):
            return name
        page = self._first_checkpoint(job)
        found = page["latest_checkpoint_id"] if name == LATEST else page["best_checkpoint_id"]
        if found is None:
            raise DownloadError(f"the job has no {name} checkpoint")
        return str(found)

    def verify_checkpoint(
        self, job: str, checkpoint_id: str, *, progress: Callable[[int], None] = lambda _: None
    ) -> list[str]:
        """Read every file of a checkpoint; returns what is wrong, a line for each file.

        `progress` is called with the number of bytes that were read in addition, from any thread.
        """
        artifacts = self.artifacts(job, checkpoint_id=checkpoint_id)
        return checkpoint_problems(self._connection, job, checkpoint_id, artifacts, progress=progress)

    def checkpoints(self, job: str, *, checkpoint_id: str | None = None, page_size: int = PAGE_SIZE) -> JobCheckpoints:
        """The committed checkpoints of a job, all of them, the oldest first; with `checkpoint_id`, only that one."""
        path = job_path(job, "checkpoints")
        pages: list[JobCheckpoints] = list(
            self._connection.pages(path, checkpoint_id=checkpoint_id, page_size=page_size)
        )
        return {**pages[-1], "checkpoints": [each for page in pages for each in page["checkpoints"]]}

    def has_checkpoints(self, job: str) -> bool:
        """Whether a job has committed checkpoints."""
        return bool(self._first_checkpoint(job)["checkpoints"])

    def tombstones(self, *, job: str | None = None, page_size: int = 100) -> Iterator[Tombstone]:
        """Deleted jobs whose files are still there, the last deleted first.

        With `job`, only those that had this handle, or whose id begins so.
        """
        for page in self._connection.pages("/v1/tombstones", job=job, page_size=page_size):
            yield from page["tombstones"]

    def pin(self, job: str, checkpoint_id: str) -> JobCheckpoints:
        """Keep a checkpoint until it is unpinned; returns the first page of the job's checkpoints."""
        return self._change("POST", job, checkpoint_id, "/pin")

    def unpin(self, job: str, checkpoint_id: str) -> JobCheckpoints:
        """Treat a checkpoint like all others again; returns the first page of the job's checkpoints."""
        return self._change("POST", job, checkpoint_id, "/unpin")

    def delete_checkpoint(self, job: str, checkpoint_id: str) -> JobCheckpoints:
        """Delete a checkpoint that is not pinned and that no job needs; returns the first page of those left."""
        return self._change("DELETE", job, checkpoint_id)

    def usage(
        self,
        *,
        since: str | None = None,
        until: str | None = None,
        group_by: str = "queue",
        all_accounts: bool = False,
        limit: int | None = None,
    ) -> Usage:
        """What attempts used in an interval, by `job`, `attempt`, `queue`, `account`, `day` or `label:KEY`."""
        every = "true" if all_accounts else None
        params = {"group_by": group_by, "from": since, "to": until, "limit": limit, "all_accounts": every}
        return cast(Usage, self._connection.call("GET", "/v1/usage", params=params))

    def collect(self, *, dry_run: bool = False, orphans: bool = False) -> Collection:
        """Remove what the server's settings do not keep any longer, or only tell what would go."""
        body = {"dry_run": dry_run, "orphans": orphans}
        return cast(Collection, self._connection.call("POST", "/v1/gc", json=body))

    def _first_checkpoint(self, job: str) -> JobCheckpoints:
        return cast(JobCheckpoints, next(self._connection.pages(job_path(job, "checkpoints"), page_size=1)))

    def _change(self, method: str, job: str, checkpoint_id: str, command: str = "") -> JobCheckpoints:
        path = job_path(job, f"checkpoints/{quote(checkpoint_id, safe='')}{command}")
        return cast(JobCheckpoints, self._connection.change(method, path))
