"""Training shapes on the wire of the Fireworks door."""

from __future__ import annotations

from typing import Any

from trainmaster.server.core.shapes import Shape, ShapeVersion
from trainmaster.server.doors.fireworks.wire.base import present

_SNAPSHOT = frozenset(
    {
        "trainerMode",
        "baseModels",
        "region",
        "acceleratorType",
        "acceleratorCount",
        "nodeCount",
        "trainerImageTag",
        "maxSupportedContextLength",
        "baseModelWeightPrecision",
        "trainerShardingScheme.pipelineParallelism",
        "trainerShardingScheme.tensorParallelism",
        "trainerShardingScheme.contextParallelism",
        "trainerShardingScheme.expertParallelism",
        "deploymentShapeVersion",
        "deploymentImageTag",
    }
)
SHAPE_MEMBERS = _SNAPSHOT | {"name", "displayName", "description"}
"""What a shape may show."""
VERSION_MEMBERS = frozenset({f"snapshot.{member}" for member in _SNAPSHOT}) | {
    "name",
    "validated",
    "latestValidated",
    "statusMessage",
}
"""What a version of a shape may show."""


def shape_name(account_id: str, shape: str) -> str:
    """What clients call a shape."""
    return f"accounts/{account_id}/trainingShapes/{shape}"


def shape_document(account_id: str, shape: Shape) -> dict[str, Any]:
    """A shape as it is shown: its latest version that can be launched, where there is one."""
    latest = shape.latest
    about = {"name": shape_name(account_id, shape.name), "displayName": shape.name, "description": shape.description}
    return present({**about, **(_snapshot(latest) if latest is not None else {})})


def version_document(account_id: str, shape: Shape, version: ShapeVersion) -> dict[str, Any]:
    """A version of a shape as it is shown."""
    return present(
        {
            "name": f"{shape_name(account_id, shape.name)}/versions/{version.version}",
            "snapshot": _snapshot(version),
            "validated": version.validated and version.unusable is None,
            "latestValidated": version == shape.latest,
            "statusMessage": version.unusable,
        }
    )


def _snapshot(version: ShapeVersion) -> dict[str, Any]:
    sharding = version.sharding
    return present(
        {
            "trainerMode": version.trainer_mode,
            "baseModels": list(version.base_models) or None,
            "region": version.region,
            "acceleratorType": version.accelerator_type or "",
            "acceleratorCount": version.accelerator_count,
            "nodeCount": version.node_count,
            "trainerImageTag": version.image_tag or "",
            "maxSupportedContextLength": version.max_context_length,
            "baseModelWeightPrecision": version.precision,
            "trainerShardingScheme": {
                "pipelineParallelism": sharding.pipeline_parallelism,
                "tensorParallelism": sharding.tensor_parallelism,
                "contextParallelism": sharding.context_parallelism,
                "expertParallelism": sharding.expert_parallelism,
            },
            "deploymentShapeVersion": version.deployment_shape or "",
            "deploymentImageTag": version.deployment_image_tag or "",
        }
    )
