"""`Client`: the server's routes as typed methods."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack, cast

import httpx

from trainmaster.client import types
from trainmaster.client.connection import Connection, given, job_path
from trainmaster.client.errors import ConflictError, NotFoundError
from trainmaster.client.event_stream import Following, LogLines, LogText, log_texts
from trainmaster.client.results import Results, digest_of
from trainmaster.client.route_groups import Admin, ClusterRoutes, Data, Runtimes, Webhooks
from trainmaster.client.server_lookup import find_server
from trainmaster.protocol.environment import TOKENS
from trainmaster.protocol.secrets import SCAIATLAS_TOKEN, SCAIDRIVE_TOKEN

TOKEN_HEADERS = {SCAIDRIVE_TOKEN: "X-ScaiDrive-Token", SCAIATLAS_TOKEN: "X-ScaiAtlas-Token"}
"""In which header each of the caller's tokens is passed on."""
PAGE_SIZE = 100


class Client:
    """A Trainmaster server.

    Without arguments: the server that TRAINMASTER_URL and TRAINMASTER_API_KEY name, else that of `trainmaster login`,
    else the local one, which is started when it does not run. `ca`, or TRAINMASTER_CA, names a file with certificates
    to trust instead of the system's. `scaidrive_token` and `scaiatlas_token`, or the variables
    TRAINMASTER_SCAIDRIVE_TOKEN and TRAINMASTER_SCAIATLAS_TOKEN, are passed on to the jobs that are submitted, resumed
    or retried, to fetch with.
    Methods raise `ApiError` when the server refuses and `UnreachableError` when it does not answer; both
    are `ClientError`. A job is named by its id or its handle.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        ca: str | Path | None = None,
        scaidrive_token: str | None = None,
        scaiatlas_token: str | None = None,
        transport: httpx.BaseTransport | None = None,
        timeout: float = 30.0,
    ) -> None:
        named = {SCAIDRIVE_TOKEN: scaidrive_token, SCAIATLAS_TOKEN: scaiatlas_token}
        self._tokens = {
            header: token
            for name, header in TOKEN_HEADERS.items()
            if (token := named[name] or os.environ.get(TOKENS[name]))
        }
        address, look_again = find_server(url, api_key, ca=ca)
        self._connection = Connection(address, look_again=look_again, transport=transport, timeout=timeout)
        self._change = self._connection.change
        self.cluster = ClusterRoutes(self._connection)
        self.admin = Admin(self._connection)
        self.webhooks = Webhooks(self._connection)
        self.runtimes = Runtimes(self._connection)
        self.data = Data(self._connection)
        self.results = Results(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._connection.url

    @property
    def api_key(self) -> str:
        """The key that requests are sent with."""
        return self._connection.api_key

    def close(self) -> None:
        self._connection.close()

    # Jobs

    def submit(self, document: Mapping[str, Any], *, idempotency_key: str | None = None) -> types.Submitted:
        """Submit a job. Sent again when the connection breaks, and still submitted once."""
        return cast(
            types.Submitted,
            self._change("POST", "/v1/jobs", document, headers=self._tokens, idempotency_key=idempotency_key),
        )

    def validate(self, document: Mapping[str, Any], *, render: bool = False) -> types.CheckedJob:
        """See whether `submit` would take a job, and which of its files have to be uploaded first; nothing is kept.

        With `render`, the answer also has what the backend would send to its engine.
        """
        path = "/v1/jobs/validate?render=true" if render else "/v1/jobs/validate"
        return cast(types.CheckedJob, self._change("POST", path, document, headers=self._tokens))

    def get(self, job: str) -> types.Job:
        """A job, with all that the server knows about it."""
        return cast(types.Job, self._connection.call("GET", job_path(job)))

    def cancel(self, job: str, *, reason: str = "", missing_ok: bool = False) -> types.Job:
        """End a job for good. With `missing_ok` it is fine when it has ended already."""
        try:
            return cast(types.Job, self._change("POST", job_path(job, "cancel"), {"reason": reason} if reason else {}))
        except ConflictError:
            if missing_ok:
                return self.get(job)
            raise

    def pause(self, job: str, *, save_checkpoint: bool = True) -> types.ControlledJob:
        """Park a running job; it is PAUSED once it has stopped."""
        return cast(
            types.ControlledJob, self._change("POST", job_path(job, "pause"), {"save_checkpoint": save_checkpoint})
        )

    def resume(self, job: str, *, checkpoint_id: str = "") -> types.ControlledJob:
        """Queue a parked job again, from a checkpoint or else from the latest."""
        body = {"checkpoint_id": checkpoint_id}
        return cast(types.ControlledJob, self._change("POST", job_path(job, "resume"), body, headers=self._tokens))

    def retry(
        self,
        job: str,
        *,
        checkpoint_id: str = "",
        new_resource_config: Mapping[str, Any] | None = None,
        handle: str | None = None,
    ) -> types.ControlledJob:
        """Make a child of a job that ended; it continues from the parent's checkpoint."""
        body = given(checkpoint_id=checkpoint_id, handle=handle, new_resource_config=new_resource_config)
        if new_resource_config is not None:
            body["modify_resources"] = True
        return cast(types.ControlledJob, self._change("POST", job_path(job, "retry"), body, headers=self._tokens))

    def clone(self, job: str, document: Mapping[str, Any] | None = None) -> types.Submitted:
        """Submit a job again, from the start, as a new job; it may be in any state.

        `document` is the request of the new job; without it, that of the old one. Values of secrets, which a job shows
        as `***`, are taken from the old job. `trainmaster.client.types.request_of` makes a document of a job.
        """
        return cast(types.Submitted, self._change("POST", job_path(job, "clone"), document, headers=self._tokens))

    def edit(
        self,
        job: str,
        *,
        priority: int | None = None,
        queue: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> types.Job:
        """Change priority, queue or labels (all of them) of a job that has not ended."""
        body = given(priority=priority, queue=queue, labels=labels)
        return cast(types.Job, self._change("PATCH", job_path(job), body))

    def delete(self, job: str, *, purge: bool = False) -> types.Job:
        """Stop a job and hide it; `purge` also removes its checkpoints."""
        return cast(types.Job, self._change("DELETE", job_path(job) + ("?purge=true" if purge else "")))

    # What jobs say

    def logs(
        self, job: str, *, cursor: str | None = None, limit: int | None = None, **lines: Unpack[LogLines]
    ) -> types.LogPage:
        """A page of a job's log: its last lines, those since a time, or those after a cursor."""
        params = {"cursor": cursor, "limit": limit, **lines}
        return cast(types.LogPage, self._connection.call("GET", job_path(job, "logs"), params=params))

    def log_texts(
        self, job: str, *, ranks: bool = False, times: bool = False, **lines: Unpack[LogLines]
    ) -> Iterator[LogText]:
        """A job's log up to its present end as plain text, megabytes at a time; much faster than `logs`.

        `ranks` and `times` put the rank and the time before each line.
        """
        return log_texts(self._connection, job_path(job, "logs"), {"ranks": ranks, "times": times, **lines})

    def follow_logs(
        self, job: str, *, cursor: str | None = None, **lines: Unpack[LogLines]
    ) -> Following[types.LogLine]:
        """Every line of a job's log as it is written, until the job has ended; over restarts of the server too."""
        return Following(self._connection, job_path(job, "logs"), lines, cursor=cursor)

    def events(self, job: str, *, after: int | None = None, limit: int | None = None) -> types.EventPage:
        """A page of what happened to a job."""
        params = {"after": after, "limit": limit}
        return cast(types.EventPage, self._connection.call("GET", job_path(job, "events"), params=params))

    def follow_events(self, job: str, *, after: int | None = None) -> Following[types.Event]:
        """What happens to a job, from the beginning or after an event, until it has ended."""
        return Following(self._connection, job_path(job, "events"), {}, cursor=None if after is None else str(after))

    def metrics(
        self,
        job: str,
        *,
        names: Sequence[str] = (),
        since_step: int | None = None,
        limit: int | None = None,
    ) -> types.Metrics:
        """A job's metrics: the latest values and their series."""
        params = {"names": [*names] or None, "since_step": since_step, "limit": limit}
        return cast(types.Metrics, self._connection.call("GET", job_path(job, "metrics"), params=params))

    def follow_metrics(self, job: str) -> Following[types.MetricsReport]:
        """Metrics as the job reports them, until it has ended."""
        return Following(self._connection, job_path(job, "metrics/stream"), {})

    # The cluster

    def nodes(self) -> Sequence[types.Node]:
        """Every node, and what is free on it."""
        return self.cluster.nodes()

    def health(self) -> Mapping[str, Any]:
        """Whether the server can work; raises UnavailableError, with the reason, when it cannot."""
        return cast(Mapping[str, Any], self._connection.call("GET", "/readyz") or {})

    def upload_blob(self, path: str | Path, *, sha256: str | None = None) -> str:
        """Send a file by its content, unless the server has it; returns its sha256, which the caller may know."""
        path = Path(path)
        digest = sha256 or digest_of(path)
        try:
            self._connection.call("HEAD", f"/v1/blobs/{digest}")
        except NotFoundError:
            self._connection.call("PUT", f"/v1/blobs/{digest}", body=lambda: path.open("rb"))
        return digest

    def list(
        self,
        *,
        statuses: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        queue: str | None = None,
        kinds: Sequence[str] = (),
        name: str | None = None,
        order_by: str | None = None,
        page_size: int = PAGE_SIZE,
    ) -> Iterator[types.JobSummary]:
        """Jobs, the newest first unless `order_by` says otherwise; pages are fetched as they are needed."""
        params = {
            "status": [*statuses] or None,
            "queue": queue,
            "kind": [*kinds] or None,
            "name": name,
            "order_by": order_by,
            "page_size": page_size,
            **{f"labels.{key}": value for key, value in (labels or {}).items()},
        }
        for page in self._connection.pages("/v1/jobs", **params):
            yield from page["jobs"]
