"""`TrainerJobManager`: trainer jobs from their creation to their deletion, and waiting for them in between."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import httpx

from trainmaster.client.errors import ClientError, UnreachableError
from trainmaster.client.fireworks.platform import (
    PASSING,
    FireworksClient,
    ResumeRefusedError,
    TrainerStoppedError,
    TrainerTimeoutError,
    TrainingAPIError,
    opened,
)
from trainmaster.client.fireworks.records import CreatedTrainerJob, TrainerJobConfig, TrainerServiceEndpoint

logger = logging.getLogger(__name__)

RUNNING = "JOB_STATE_RUNNING"
FAILED = "JOB_STATE_FAILED"
GONE = frozenset({"JOB_STATE_DELETED", "JOB_STATE_ARCHIVED"})
RESUMABLE = frozenset({FAILED, "JOB_STATE_CANCELLED", "JOB_STATE_PAUSED", "JOB_STATE_COMPLETED"})
STOPPED = frozenset(
    {
        "JOB_STATE_CANCELLING",
        "JOB_STATE_CANCELLED",
        "JOB_STATE_COMPLETED",
        "JOB_STATE_DELETING",
        "JOB_STATE_EARLY_STOPPED",
        "JOB_STATE_PAUSED",
    }
)
"""States that a job does not leave by itself."""
STOPPED_FOR_GOOD_S = 30.0
"""So long a job that is waited for may be stopped: another client may be about to resume it."""
HEALTH_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 5.0
READY_TIMEOUT_S = 900.0
RECONNECT_TIMEOUT_S = 600.0
RESUMABLE_TIMEOUT_S = 120.0


class TrainerJobManager(FireworksClient):
    """Trainer jobs: services that hold a model and train it as a client's loop asks.

    Example:
        manager = TrainerJobManager()
        endpoint = manager.create_and_wait(TrainerJobConfig(base_model="Qwen/Qwen3-8B", lora_rank=16))
        ...  # connect a training client to endpoint.base_url, with manager.api_key
        manager.delete(endpoint.job_id)
    """

    def create(self, config: TrainerJobConfig) -> CreatedTrainerJob:
        """Create a trainer job, and don't wait for it. One that has the requested id already is returned as it is.

        Raises:
            ValueError: the config makes no sense.
            TrainingAPIError: the server does not want it.
            TrainerStoppedError: a job of that id was deleted.
        """
        config.validate()
        job_id = config.requested_job_id or f"trainer-{uuid.uuid4().hex[:12]}"
        response = self._call("POST", self._path(), params=config.query(job_id), json=config.body())
        job = self.try_get(job_id) if response.status_code == httpx.codes.CONFLICT else None
        if job is None:
            job = opened("the trainer job cannot be created", response)
        elif _state(job) in GONE:
            raise TrainerStoppedError(
                f"a trainer job {job_id} was deleted; its checkpoints are kept, and a new job needs another id",
                state=_state(job),
            )
        message = _said(job)
        if message.startswith("Warning:"):
            logger.warning("%s", message)
        name = str(job["name"])
        return CreatedTrainerJob(job_name=name, job_id=name.rpartition("/")[2])

    def create_and_wait(
        self, config: TrainerJobConfig, poll_interval_s: float = POLL_INTERVAL_S, timeout_s: float = READY_TIMEOUT_S
    ) -> TrainerServiceEndpoint:
        """Create a trainer job and wait until it answers. Raises what `create` and `wait_for_ready` do."""
        created = self.create(config)
        return self.wait_for_ready(created.job_id, created.job_name, poll_interval_s, timeout_s)

    def wait_for_ready(
        self,
        job_id: str,
        job_name: str | None = None,
        poll_interval_s: float = POLL_INTERVAL_S,
        timeout_s: float = READY_TIMEOUT_S,
    ) -> TrainerServiceEndpoint:
        """Wait until a trainer job runs and answers; `timeout_s` counts everything, its time in the queue too.

        Raises:
            TrainerStoppedError: it failed, or is stopped or deleted.
            TrainerTimeoutError: it is not ready in time.
            TrainingAPIError: there is no such job.
        """
        started = self._clock.monotonic()
        deadline = started + timeout_s
        while True:
            job = self._looked_up(job_id)
            state = _state(job)
            if state == RUNNING and self._is_healthy(job_id):
                return self._endpoint(job_id, job, job_name)
            now = self._clock.monotonic()
            if state == FAILED or state in GONE or (state in STOPPED and now - started >= STOPPED_FOR_GOOD_S):
                raise TrainerStoppedError(f"trainer job {job_id} is {state}{_because(job)}", state=state)
            if now >= deadline:
                where = state or "no server answers"
                raise TrainerTimeoutError(
                    f"trainer job {job_id} is not ready after {timeout_s:g} s: {where}{_because(job)}"
                )
            self._clock.sleep(min(poll_interval_s, deadline - now))

    def wait_for_existing(
        self, job_id: str, poll_interval_s: float = POLL_INTERVAL_S, timeout_s: float = READY_TIMEOUT_S
    ) -> TrainerServiceEndpoint:
        """Wait until a trainer job that exists answers. Raises what `wait_for_ready` does."""
        return self.wait_for_ready(job_id, None, poll_interval_s, timeout_s)

    def resume_and_wait(
        self, job_id: str, poll_interval_s: float = POLL_INTERVAL_S, timeout_s: float = READY_TIMEOUT_S
    ) -> TrainerServiceEndpoint:
        """Let a job that failed, was cancelled or is paused go on, and wait until it answers.

        Raises:
            ResumeRefusedError: the server does not let it.
            TrainerStoppedError, TrainerTimeoutError: as `wait_for_ready` does.
        """
        deadline = self._clock.monotonic() + timeout_s
        self._resume(job_id)
        return self.wait_for_existing(job_id, poll_interval_s, deadline - self._clock.monotonic())

    def reconnect_and_wait(
        self,
        job_id: str,
        poll_interval_s: float = POLL_INTERVAL_S,
        timeout_s: float = RECONNECT_TIMEOUT_S,
        max_wait_for_resumable_s: float = RESUMABLE_TIMEOUT_S,
    ) -> TrainerServiceEndpoint:
        """Come back to a trainer job whose trainer may be gone: preempted, killed, its server restarted.

        A job that runs is waited for. One that is on its way somewhere, such as down, is watched until it can be
        resumed, for `max_wait_for_resumable_s` at most. `timeout_s` counts everything.

        Raises:
            TrainerStoppedError: it was deleted, or neither runs nor can be resumed in time.
            TrainerTimeoutError: it is not ready in time.
            TrainingAPIError: there is no such job.
        """
        started = self._clock.monotonic()
        deadline = started + timeout_s
        resumable_by = min(started + max_wait_for_resumable_s, deadline)
        while True:
            job = self._looked_up(job_id)
            state = _state(job)
            if state == RUNNING and self._is_healthy(job_id):
                return self._endpoint(job_id, job)
            if state in RESUMABLE and self._resumed(job_id):
                return self.wait_for_existing(job_id, poll_interval_s, deadline - self._clock.monotonic())
            now = self._clock.monotonic()
            if state in GONE or (state != RUNNING and now >= resumable_by):
                raise TrainerStoppedError(
                    f"trainer job {job_id} is {state or 'out of reach'}, and cannot be resumed{_because(job)}",
                    state=state,
                )
            if now >= deadline:
                raise TrainerTimeoutError(f"trainer job {job_id} is not ready after {timeout_s:g} s{_because(job)}")
            self._clock.sleep(min(poll_interval_s, deadline - now))

    def get(self, job_id: str) -> dict[str, Any]:
        """A trainer job as the server describes it; `state` is one of JOB_STATE_*.

        Raises:
            TrainingAPIError: there is none.
        """
        return self._document(f"trainer job {job_id} cannot be read", "GET", self._path(job_id))

    def try_get(self, job_id: str) -> dict[str, Any] | None:
        """A trainer job as `get` returns it, or None when there is none."""
        try:
            return self.get(job_id)
        except TrainingAPIError as error:
            if error.status_code == httpx.codes.NOT_FOUND:
                return None
            raise

    def delete(self, job_id: str) -> None:
        """Stop a trainer job and give its resources back; its checkpoints stay. Fine when there is none."""
        response = self._call("DELETE", self._path(job_id))
        if response.status_code != httpx.codes.NOT_FOUND:
            opened(f"trainer job {job_id} cannot be deleted", response)

    def _resume(self, job_id: str) -> None:
        response = self._call("POST", f"{self._path(job_id)}:resume")
        if not response.is_success:
            raise ResumeRefusedError(f"trainer job {job_id} cannot be resumed", response)

    def _resumed(self, job_id: str) -> bool:
        """Whether it goes on now; not while the server still works on how it ended."""
        try:
            self._resume(job_id)
        except ResumeRefusedError as error:
            if error.status_code != httpx.codes.CONFLICT:
                raise
            return False
        return True

    def _looked_up(self, job_id: str) -> dict[str, Any]:
        """The job; empty while the server cannot be asked, which whoever waits for a job waits for as well."""
        try:
            response = self._call_once("GET", self._path(job_id))
        except UnreachableError as error:
            logger.warning("%s; asking again", error)
            self._connection.find_again()
            return {}
        if response.status_code in PASSING:
            return {}
        return opened(f"trainer job {job_id} cannot be read", response)

    def _is_healthy(self, job_id: str) -> bool:
        try:
            path = f"{self._trainer_path(job_id)}/api/v1/healthz"
            return self._call_once("GET", path, patience_s=HEALTH_TIMEOUT_S).status_code == httpx.codes.OK
        except ClientError:
            return False

    def _endpoint(self, job_id: str, job: dict[str, Any], job_name: str | None = None) -> TrainerServiceEndpoint:
        length = (job.get("trainingConfig") or {}).get("maxContextLength")
        return TrainerServiceEndpoint(
            job_name=job_name or f"accounts/{self.account_id}/rlorTrainerJobs/{job_id}",
            job_id=job_id,
            base_url=self.base_url + self._trainer_path(job_id),
            max_context_length=length or None,
        )

    def _path(self, job_id: str = "") -> str:
        return f"/v1/accounts/{self.account_id}/rlorTrainerJobs" + (f"/{job_id}" if job_id else "")

    def _trainer_path(self, job_id: str) -> str:
        return f"/training/v1/rlorTrainerJobs/{self.account_id}/{job_id}"


def _state(job: dict[str, Any]) -> str:
    return str(job.get("state") or "")


def _said(job: dict[str, Any]) -> str:
    """What the server has to say about the job, if anything."""
    status = job.get("status")
    return str(job.get("statusMessage") or (status.get("message") if isinstance(status, dict) else "") or "")


def _because(job: dict[str, Any]) -> str:
    message = _said(job)
    return f": {message}" if message else ""
