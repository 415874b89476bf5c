"""Trainer jobs in the JSON of the Fireworks API: `rlorTrainerJobs`, and their JOB_STATE.

Public clients wait for JOB_STATE_RUNNING alone; they resume a job that is FAILED, CANCELLED, PAUSED or COMPLETED.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from trainmaster.protocol.trainer_requests import ModelMode
from trainmaster.server.core.fields import MAX_INTEGER, MAX_NODES, RuleViolation, refuse
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import REGION
from trainmaster.server.core.spec.documents import load_stored
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.states import ACTIVE, CONSEQUENCES, RUNNING, Desired, Fault, JobStatus
from trainmaster.server.core.trainer_request import MANAGED_BY, PURPOSE, WantedTrainer
from trainmaster.server.core.workloads.programs import MAX_TIMEOUT_S
from trainmaster.server.core.workloads.trainer_service import MAX_LORA_RANK, TrainerServiceSpec
from trainmaster.server.doors.fireworks.resources import (
    ONE_LINE,
    Choice,
    Duration,
    FireworksBody,
    Line,
    MaybeLine,
    Number,
    Whole,
    duration,
    present,
    words,
)
from trainmaster.server.http.envelope import clean, instant
from trainmaster.server.store.queues import DEFAULT

STATES: Mapping[JobStatus, str] = {
    JobStatus.PENDING: "JOB_STATE_PENDING",
    JobStatus.QUEUED: "JOB_STATE_PENDING",
    JobStatus.SCHEDULING: "JOB_STATE_CREATING",
    JobStatus.PREPARING: "JOB_STATE_CREATING",
    JobStatus.TRAINING: "JOB_STATE_RUNNING",
    JobStatus.CHECKPOINTING: "JOB_STATE_RUNNING",
    JobStatus.EVALUATING: "JOB_STATE_RUNNING",
    JobStatus.EXPORTING: "JOB_STATE_RUNNING",
    JobStatus.PAUSED: "JOB_STATE_PAUSED",
    JobStatus.COMPLETED: "JOB_STATE_COMPLETED",
    JobStatus.FAILED: "JOB_STATE_FAILED",
    JobStatus.CANCELLED: "JOB_STATE_CANCELLED",
    JobStatus.PREEMPTED: "JOB_STATE_FAILED",
}
"""While nothing else is wanted of the job."""
STOPPING: Mapping[Desired, str] = {Desired.STOP: "JOB_STATE_CANCELLING", Desired.DELETE: "JOB_STATE_DELETING"}
"""While it is being stopped for good."""
DELETED = "JOB_STATE_DELETED"
IDLE = "JOB_STATE_IDLE"
SAVING = "JOB_STATE_WRITING_RESULTS"
"""While it is being stopped and can be resumed: a pause, a preemption, inactivity."""
NOT_YET = "JOB_STATE_CREATING"
RUNS = STATES[JobStatus.TRAINING]

IDLE_AFTER_S = 60.0
"""Without use. Clients that hold a session say every ten seconds that they are there."""

_CODES: Mapping[Fault, str] = {
    Fault.NONE: "ABORTED",  # preempted
    Fault.USER: "FAILED_PRECONDITION",
    Fault.INFRASTRUCTURE: "UNAVAILABLE",
    Fault.PLATFORM: "INTERNAL",
}


def state_of(job: Job, *, idle: bool = False, answers: bool = True) -> str:
    """`idle`: nobody used it for a while, which only lists tell; `answers`: its trainer does, as far as is known."""
    if job.deleted_at is not None:
        return DELETED
    if job.status in ACTIVE and job.attempt is not None:
        if job.desired in STOPPING:
            return STOPPING[job.desired]
        if job.attempt.stop is not None:
            return SAVING
    if job.status in RUNNING and (job.endpoint is None or not answers):
        return NOT_YET
    return IDLE if idle and job.status in RUNNING else STATES[job.status]


def code_of(job: Job) -> str:
    if STATES[job.status] != STATES[JobStatus.FAILED] or job.deleted_at is not None:
        return "OK"
    return _CODES[CONSEQUENCES[job.reason].fault] if job.reason is not None else "UNKNOWN"


MEMBERS = words("""
    name displayName createTime updateTime completedTime createdBy state status.code status.message statusMessage
    serviceMode keepAlive dataset forwardOnly nodeCount trainingShape preemptible purpose managedBy reservationTarget
    inactivityTimeout disableInactivityCleanup acceleratorSeconds directRouteHandle
    trainingConfig.baseModel trainingConfig.loraRank trainingConfig.learningRate
    trainingConfig.gradientAccumulationSteps trainingConfig.maxContextLength trainingConfig.region
    trainingConfig.acceleratorType trainingConfig.acceleratorCount trainingConfig.customImageTag
    trainingConfig.extraArgs
""")
NO_DEPLOYMENTS = "is not available: this server has no deployments; leave it out, and sample through the trainer"
_NOT_IN_SERVICE_MODE = "is for managed training jobs; here the client's own loop says what is trained"
_MANAGED = words("""
    dataset evaluation_dataset eval_auto_carveout loss_config reward_weights wandb_config aws_s3_config
    azure_blob_storage_config
""")
_MANAGED_CONFIG = words("""
    batch_size batch_size_samples epochs jinja_template learning_rate_warmup_steps optimizer_weight_decay
    sampler_checkpoint_save_interval_steps
""")

Count = Annotated[Whole, Field(ge=0, le=MAX_INTEGER), AfterValidator(lambda value: value or None)]
"""A number that at 0 is not set."""


DisplayName = Annotated[Annotated[Line, Field(max_length=63)] | None, AfterValidator(lambda value: value or None)]
"""An empty one is as good as none."""


class TrainingConfigBody(FireworksBody):
    base_model: Annotated[str, Field(min_length=1, max_length=1024), ONE_LINE]
    lora_rank: Annotated[Whole, Field(ge=0, le=MAX_LORA_RANK)] = 0
    learning_rate: Annotated[Number, Field(ge=0)] | None = None
    gradient_accumulation_steps: Count | None = None
    max_context_length: Count | None = None
    region: Choice = None
    accelerator_type: Choice = None
    accelerator_count: Count | None = None
    custom_image_tag: MaybeLine = None
    extra_args: Annotated[tuple[str, ...], Field(max_length=256)] = ()

    refused: ClassVar[Mapping[str, str]] = {
        "projection_head_dim": "is not available: trainers here have no projection head",
        "warm_start_from": "is not available: make a trainer of the base model, then load_adapter or load_state",
        "output_model": "is not available: promote a checkpoint that was saved for sampling",
        **dict.fromkeys(_MANAGED_CONFIG, _NOT_IN_SERVICE_MODE),
    }


class CreateJobBody(FireworksBody):
    service_mode: bool = False
    training_config: TrainingConfigBody
    display_name: DisplayName = None
    node_count: Annotated[Whole, Field(ge=0, le=MAX_NODES), AfterValidator(lambda value: value or None)] | None = None
    trainer_replica_count: Annotated[Whole, Field(ge=0, le=MAX_NODES)] | None = None
    forward_only: bool = False
    extra_values: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    purpose: MaybeLine = None
    preemptible: bool = False
    managed_by: MaybeLine = None
    use_reservation: bool = True
    reservation_target: MaybeLine = None
    inactivity_timeout: Annotated[Duration, Field(ge=0, le=MAX_TIMEOUT_S)] | None = None
    disable_inactivity_cleanup: bool = False

    refused: ClassVar[Mapping[str, str]] = {
        "keep_alive": "has no meaning for a trainer in service mode; it runs until its inactivity timeout",
        "use_purpose": "is not available: there are no dedicated resources; use a queue (reservationTarget)",
        "rollout_deployment_name": NO_DEPLOYMENTS,
        "hot_load_deployment_id": NO_DEPLOYMENTS,
        **dict.fromkeys(_MANAGED, _NOT_IN_SERVICE_MODE),
    }

    @model_validator(mode="after")
    def _without_reservations(self) -> Self:
        # Beside a target the public client always sends false.
        if not self.use_reservation and self.reservation_target is None:
            reason = "false has no effect: accounts have no reservations here, and share what is free; leave it out"
            refuse([RuleViolation(("useReservation",), reason)])
        return self

    def wanted(self, job_id: str) -> WantedTrainer:
        config = self.training_config
        overrides = (f"--{name.replace('_', '-')}={value}" for name, value in self.extra_values.items())
        return WantedTrainer(
            job_id=job_id,
            base_model=config.base_model,
            lora_rank=config.lora_rank,
            learning_rate=config.learning_rate or None,
            gradient_accumulation_steps=config.gradient_accumulation_steps or 1,
            max_context_length=config.max_context_length,
            forward_only=self.forward_only,
            extra_args=(*config.extra_args, *overrides),
            display_name=self.display_name,
            inactivity_timeout_s=self.inactivity_timeout or 0.0,
            disable_inactivity_cleanup=self.disable_inactivity_cleanup,
            preemptible=self.preemptible,
            purpose=self.purpose,
            managed_by=self.managed_by,
            # Its last part is the name of a queue, whose quota is what was reserved.
            reservation_target=(self.reservation_target or "").rpartition("/")[2] or None,
            replica_count=self.trainer_replica_count or 1,
            region=config.region,
            accelerator_type=config.accelerator_type,
            accelerator_count=config.accelerator_count,
            node_count=self.node_count,
            custom_image_tag=config.custom_image_tag,
        )


def job_name(job: Job) -> str:
    return f"accounts/{job.account_id}/rlorTrainerJobs/{job.handle or job.job_id}"


def job_document(job: Job, *, waits_for: str | None = None, idle: bool = False, answers: bool = True) -> dict[str, Any]:
    """`waits_for` is why the job waits, where that is known; for the others see `state_of`."""
    request = load_stored(job.spec_version, job.spec)
    spec = request.workload
    if not isinstance(spec, TrainerServiceSpec):
        raise TypeError(f"job {job.job_id} is no trainer service")
    code, message = code_of(job), clean(_message(job, waits_for))
    return present(
        name=job_name(job),
        displayName=job.name if job.name != job.handle else None,
        createTime=instant(job.created_at),
        updateTime=instant(job.updated_at),
        completedTime=instant(job.finished_at),
        createdBy=job.created_by,
        state=state_of(job, idle=idle, answers=answers),
        status={"code": code, "message": message},
        statusMessage=message or None,
        serviceMode=True,
        keepAlive=False,
        dataset="",
        forwardOnly=spec.mode is ModelMode.FORWARD_ONLY,
        nodeCount=job.needs.node_count,
        trainingShape=spec.training_shape,
        preemptible=job.preemptible,
        purpose=job.labels.get(PURPOSE),
        managedBy=job.labels.get(MANAGED_BY),
        reservationTarget=job.queue if job.queue != DEFAULT else None,
        inactivityTimeout=None if job.inactivity_timeout_s is None else duration(job.inactivity_timeout_s),
        disableInactivityCleanup=spec.disable_inactivity_cleanup,
        acceleratorSeconds={job.needs.gpu_type or "GPU": str(round(job.gpu_s))} if job.gpu_s else None,
        directRouteHandle=f"training/v1/rlorTrainerJobs/{job.account_id}/{job.handle or job.job_id}",
        trainingConfig=_training_config(job, request, spec),
    )


def _training_config(job: Job, request: SubmitJobRequest, spec: TrainerServiceSpec) -> dict[str, Any]:
    capabilities = request.scheduling_config.required_capabilities
    return present(
        baseModel=spec.base_model,
        loraRank=spec.lora_rank,
        learningRate=spec.learning_rate,
        gradientAccumulationSteps=spec.gradient_accumulation_steps,
        maxContextLength=spec.max_context_length,
        region=next((each.removeprefix(REGION) for each in capabilities if each.startswith(REGION)), None),
        acceleratorType=spec.accelerator_type,
        acceleratorCount=job.needs.gpus_per_node,
        extraArgs=list(spec.extra_args) or None,
    )


def _message(job: Job, waits_for: str | None) -> str:
    if waits_for is not None:
        return waits_for
    if code_of(job) != "OK":
        advice = CONSEQUENCES[job.reason].advice_for(service=True) if job.reason is not None else ""
        return "; ".join(part for part in (job.message, advice) if part)
    return job.message or ""
