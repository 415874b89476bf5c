"""`TrainerJobManager`: trainer jobs from their creation to their deletion, and waiting for them in between."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx

from trainmaster.client.connection import given
from trainmaster.client.errors import ClientError, UnreachableError
from trainmaster.client.fireworks.platform import (
    PASSING,
    SHAPE_NAME,
    FireworksClient,
    ResumeRefusedError,
    TrainerStoppedError,
    TrainerTimeoutError,
    TrainingAPIError,
    opened,
)

logger = logging.getLogger(__name__)

RUNNING = "JOB_STATE_RUNNING"
FAILED = "JOB_STATE_FAILED"
GONE = frozenset({"JOB_STATE_DELETED", "JOB_STATE_ARCHIVED"})
RESUMABLE = frozenset({FAILED, "JOB_STATE_CANCELLED", "JOB_STATE_PAUSED", "JOB_STATE_COMPLETED"})
STOPPED = frozenset(
    f"JOB_STATE_{name}" for name in ("CANCELLING", "CANCELLED", "COMPLETED", "DELETING", "EARLY_STOPPED", "PAUSED")
)
"""States that a job does not leave by itself."""
STOPPED_FOR_GOOD_S = 30.0
"""How long a job that is waited for may be stopped: another client may be about to resume it."""
HEALTH_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 5.0
READY_TIMEOUT_S = 900.0
RECONNECT_TIMEOUT_S = 600.0
RESUMABLE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class CreatedTrainerJob:
    job_name: str
    """accounts/ACCOUNT/rlorTrainerJobs/JOB"""
    job_id: str


@dataclass(frozen=True, slots=True)
class TrainerServiceEndpoint:
    """A trainer that answers."""

    job_name: str
    job_id: str
    base_url: str
    """Where a training client connects."""
    max_context_length: int | None = None


DURATION = re.compile(r"\d+(\.\d{1,9})?s")
"""A protobuf duration as JSON, such as 1800s."""
OWNED_BY_SHAPES = ("accelerator_type", "accelerator_count", "node_count", "custom_image_tag")
LONGEST_DISPLAY_NAME = 63


@dataclass(slots=True)
class TrainerJobConfig:
    """A trainer job, on a training shape (`training_shape_ref`) or, without one, on what its own fields say."""

    base_model: str
    lora_rank: int = 0
    """0 trains all parameters, a positive rank an adapter."""
    max_context_length: int | None = None
    learning_rate: float = 1e-5
    """What an optimizer step uses when it names none."""
    gradient_accumulation_steps: int | None = None
    """So many optimizer steps are taken as one."""
    node_count: int | None = None
    display_name: str | None = None
    hot_load_deployment_id: str | None = None
    region: str | None = None
    custom_image_tag: str | None = None
    extra_args: list[str] | None = None
    accelerator_type: str | None = None
    accelerator_count: int | None = None
    training_shape_ref: str | None = None
    """The full name of a training shape or a version of one; `resolve_training_profile` tells it."""
    forward_only: bool = False
    """A frozen model, such as a reference."""
    inactivity_timeout: timedelta | str | None = None
    """After so long without a request or a heartbeat the trainer saves and stops; unset or 0 means an hour."""
    disable_inactivity_cleanup: bool = False
    skip_validations: bool = False
    requested_job_id: str | None = None
    """The id that the job gets. Creating it again returns the one that is there."""

    def validate(self) -> None:
        """Raise a ValueError that says everything that is wrong, as far as that can be seen from here."""
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))

    def query(self, job_id: str) -> dict[str, str]:
        query = {"rlorTrainerJobId": job_id}
        if self.training_shape_ref:
            query["trainingShape"] = self.training_shape_ref
        if self.hot_load_deployment_id:
            query["deploymentId"] = self.hot_load_deployment_id
        # Without a shape there is nothing to check the fields against; asking for neither lets the server choose one.
        if self.skip_validations or not self.training_shape_ref:
            query["skipValidations"] = "true"
        return query

    def body(self) -> dict[str, Any]:
        training = {
            "baseModel": self.base_model,
            "loraRank": self.lora_rank,
            "learningRate": self.learning_rate,
            "maxContextLength": self.max_context_length,
            "gradientAccumulationSteps": self.gradient_accumulation_steps,
            "customImageTag": self.custom_image_tag,
            "acceleratorType": self.accelerator_type,
            "acceleratorCount": self.accelerator_count,
            "region": self.region,
            "extraArgs": self.extra_args,
        }
        body = {
            "serviceMode": True,
            "trainingConfig": given(**training),
            "nodeCount": self.node_count or (None if self.training_shape_ref else 1),
            "displayName": self.display_name,
            "hotLoadDeploymentId": self.hot_load_deployment_id,
            "forwardOnly": self.forward_only or None,
            "inactivityTimeout": None if self.inactivity_timeout is None else _duration(self.inactivity_timeout),
            "disableInactivityCleanup": self.disable_inactivity_cleanup or None,
        }
        return given(**body)

    def _problems(self) -> Iterator[str]:
        if not self.base_model:
            yield "base_model is required"
        if self.lora_rank < 0:
            yield "lora_rank must be 0, for all parameters, or more"
        if self.gradient_accumulation_steps is not None and self.gradient_accumulation_steps < 1:
            yield "gradient_accumulation_steps must be 1 or more"
        if self.display_name is not None and len(self.display_name) > LONGEST_DISPLAY_NAME:
            yield f"display_name must have at most {LONGEST_DISPLAY_NAME} characters"
        if self.inactivity_timeout is not None:
            try:
                _duration(self.inactivity_timeout)
            except ValueError as error:
                yield f"inactivity_timeout {error}"
        if self.training_shape_ref:
            if not SHAPE_NAME.fullmatch(self.training_shape_ref):
                yield (
                    f"training_shape_ref {self.training_shape_ref!r} is not the full name of a training shape "
                    "(accounts/ACCOUNT/trainingShapes/SHAPE[/versions/VERSION]); resolve_training_profile tells it"
                )
            for field in OWNED_BY_SHAPES:
                if getattr(self, field):
                    yield f"{field} is the training shape's to say, and cannot be set beside training_shape_ref"


def _duration(value: timedelta | str) -> str:
    if isinstance(value, timedelta):
        value = f"{value.total_seconds():f}".rstrip("0").rstrip(".") + "s"
    if not DURATION.fullmatch(value):
        raise ValueError(f"must be a timedelta of 0 or more, or a number of seconds such as '1800s', not {value!r}")
    return value


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

        Raises ValueError if the config makes no sense, and TrainerStoppedError if a job of that id was deleted.
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
        if (message := _because(job).removeprefix(": ")).startswith("Warning:"):
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

        Raises TrainerStoppedError if it failed, is stopped or deleted, and TrainerTimeoutError if it takes longer.
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
        """Resume a job that failed, was cancelled or is paused, and wait until it answers.

        Raises ResumeRefusedError if the server does not let it, and what `wait_for_ready` does.
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
        resumed, for `max_wait_for_resumable_s` at most. `timeout_s` counts everything. Raises TrainerStoppedError if it
        was deleted, or neither runs nor can be resumed in time, and TrainerTimeoutError if it is not ready in time.
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
        """A trainer job as the server describes it; `state` is one of JOB_STATE_*."""
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
        """Whether it was resumed; not while the server still handles its end."""
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
            response = self._connection.send("GET", self._path(job_id))
        except UnreachableError as error:
            logger.warning("%s; asking again", error)
            self._connection.find_again()
            return {}
        return {} if response.status_code in PASSING else opened(f"trainer job {job_id} cannot be read", response)

    def _is_healthy(self, job_id: str) -> bool:
        try:
            path = f"{self._trainer_path(job_id)}/api/v1/healthz"
            return self._connection.send("GET", path, patience_s=HEALTH_TIMEOUT_S).status_code == httpx.codes.OK
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


def _because(job: dict[str, Any]) -> str:
    """The server's message about the job as the end of a sentence; empty if it has none."""
    status = job.get("status")
    message = job.get("statusMessage") or (status.get("message") if isinstance(status, dict) else "")
    return f": {message}" if message else ""
