"""Checkpoints, promoted models and operations on the wire of the Fireworks door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from trainmaster.server.coordinator.base_models import BaseModel
from trainmaster.server.coordinator.promotion import BASE_MODEL, DELTA, EXTERNAL, PEFT_ADDON, SAMPLER, why_not
from trainmaster.server.core.fields import Matches
from trainmaster.server.core.job import Checkpoint, Job
from trainmaster.server.doors.fireworks.wire.base import ONE_LINE, Body, moment, present
from trainmaster.server.doors.fireworks.wire.jobs import NO_DEPLOYMENTS, job_name
from trainmaster.server.http.wire.reported import clean
from trainmaster.server.store.promoted import Operation, PromotedModel

READY = "READY"
CHECKPOINT_MEMBERS = frozenset(
    {
        "name",
        "createTime",
        "updateTime",
        "expireTime",
        "checkpointType",
        "promotable",
        "sizeBytes",
        "step",
        "baseModel",
        "loraRank",
    }
)
"""What a checkpoint may show."""
MODEL_MEMBERS = frozenset(
    {
        "name",
        "displayName",
        "createTime",
        "state",
        "status.code",
        "status.message",
        "kind",
        "public",
        "importedFrom",
        "fineTuningJob",
        "sizeBytes",
        "contextLength",
        "peftDetails.baseModel",
        "peftDetails.r",
        "peftDetails.targetModules",
        "baseModelDetails.moe",
        "baseModelDetails.checkpointFormat",
        "baseModelDetails.huggingfaceModelType",
        "baseModelDetails.supportsFireattention",
    }
)
"""What a model may show."""
MODEL_TYPE = "type.googleapis.com/gateway.Model"
_TINKER = "tinker"
_MODEL_NAME = Matches(
    r"accounts/[^/]{1,63}/models/[a-z0-9-]{1,63}",
    "is like accounts/ACCOUNT/models/MODEL, with 1 to 63 lower-case letters, digits and dashes at the end",
)
_JOB_NAME = Matches(r"accounts/[^/]{1,63}/rlorTrainerJobs/[^/]{1,128}", "is like accounts/ACCOUNT/rlorTrainerJobs/JOB")


class PromoteBody(Body):
    """A checkpoint to promote."""

    output_model: Annotated[str, _MODEL_NAME]
    trainer_job_id: Annotated[str, _JOB_NAME]
    base_model: Annotated[str, Field(min_length=1, max_length=1024), ONE_LINE]
    async_promotion: bool = False

    refused: ClassVar[Mapping[str, str]] = {"hot_load_deployment_id": NO_DEPLOYMENTS}


def checkpoint_id(checkpoint: Checkpoint) -> str:
    """What clients call a checkpoint within its job: its name, where that is one of the job's."""
    return checkpoint.checkpoint_id if checkpoint.attributes.get("door") == _TINKER else checkpoint.name


def checkpoint_document(job: Job, checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint of a trainer as it is shown."""
    said: Mapping[str, Any] = checkpoint.attributes
    return present(
        {
            "name": clean(f"{job_name(job)}/checkpoints/{checkpoint_id(checkpoint)}"),
            "createTime": moment(checkpoint.created_at),
            "updateTime": moment(checkpoint.created_at),
            "expireTime": moment(checkpoint.expires_at),
            "checkpointType": checkpoint_type(checkpoint),
            "promotable": why_not(checkpoint) is None,
            "sizeBytes": str(checkpoint.size_bytes),
            "step": checkpoint.step,
            "baseModel": clean(said.get("base_model")),
            "loraRank": said.get("lora_rank"),
        }
    )


def checkpoint_type(checkpoint: Checkpoint) -> str:
    """What a checkpoint is for, and what it holds."""
    said = checkpoint.attributes
    if checkpoint.kind not in (SAMPLER, EXTERNAL):
        return "CHECKPOINT_TYPE_TRAINING_LORA" if said.get("is_lora") else "CHECKPOINT_TYPE_TRAINING"
    if said.get("sampler_kind") == DELTA:
        return "CHECKPOINT_TYPE_INFERENCE_ARC_V2"
    adapter = said.get("is_lora") and said.get("sampler_kind") != "merged"
    return "CHECKPOINT_TYPE_INFERENCE_LORA" if adapter else "CHECKPOINT_TYPE_INFERENCE_BASE"


def promoted_document(model: PromotedModel, job: Job | None) -> dict[str, Any]:
    """A promoted model as it is shown."""
    details = model.details
    return present(
        {
            "name": f"accounts/{model.account_id}/models/{model.model_id}",
            "displayName": model.model_id,
            "createTime": moment(model.created_at),
            "state": READY,
            "status": {"code": "OK", "message": ""},
            "kind": model.kind,
            "public": False,
            "importedFrom": None if job is None else job_name(job),
            "fineTuningJob": None if job is None else job_name(job),
            "sizeBytes": str(model.size_bytes),
            "peftDetails": {
                "baseModel": model.base_model,
                "r": details.get("r"),
                "targetModules": clean(details.get("target_modules")),
            }
            if model.kind == PEFT_ADDON
            else None,
            "baseModelDetails": {"moe": False, "checkpointFormat": "HUGGINGFACE"} if model.kind == BASE_MODEL else None,
        }
    )


def base_model_document(model: BaseModel) -> dict[str, Any]:
    """A base model that the operator named, as it is shown."""
    config = model.config()
    return present(
        {
            "name": model.name,
            "displayName": model.path.name,
            "state": READY,
            "status": {"code": "OK", "message": ""},
            "kind": BASE_MODEL,
            "public": True,
            "contextLength": model.context_length,
            "baseModelDetails": present(
                {
                    "moe": model.is_moe,
                    "checkpointFormat": "HUGGINGFACE",
                    "huggingfaceModelType": clean(config.get("model_type")),
                    "supportsFireattention": False,
                }
            ),
        }
    )


def operation_document(operation: Operation, model: dict[str, Any] | None) -> dict[str, Any]:
    """An operation as it is shown; once it is done well, with its model."""
    said = {"statusMessage": "done" if operation.done else "the files are being put in place"}
    document: dict[str, Any] = {
        "name": f"accounts/{operation.account_id}/operations/{operation.operation_id}",
        "metadata": {**said, "createTime": moment(operation.created_at)},
        "done": operation.done,
    }
    if operation.done and operation.error:
        document["error"] = {"code": 9, "message": clean(operation.error)}
    elif operation.done and model is not None:
        document["response"] = {"@type": MODEL_TYPE, **model}
    elif operation.done:
        document["error"] = {"code": 5, "message": "the model was deleted since"}
    return document
