"""From a job, as the server shows it, back to a request that can be submitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REQUEST_FIELDS = (
    "name",
    "labels",
    "workload",
    "backend",
    "training_config",
    "data_config",
    "resource_config",
    "output_config",
    "scheduling_config",
)
"""What a request has and a job shows. A handle stays with its job, as it is unique."""
RESERVED_LABEL, RESERVED_PREFIX = "type", "system/"
"""Labels that the server sets."""
SHARED_FIELDS = ("priority", "max_retries")
"""A job shows them in training_config and in scheduling_config; one place is enough, and easier to change."""


def is_job(document: Mapping[str, Any]) -> bool:
    """Whether a document is a job that a server has shown, and not a job file."""
    return isinstance(document.get("job_id"), str) and "status" in document


def request_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """The request of a job, in which `***` stands for the values of secrets."""
    request = {field: job[field] for field in REQUEST_FIELDS if job.get(field) is not None}
    request["labels"] = {
        key: value
        for key, value in request.get("labels", {}).items()
        if key != RESERVED_LABEL and not key.startswith(RESERVED_PREFIX)
    }
    if (training := request.get("training_config")) is not None:
        request["training_config"] = {key: value for key, value in training.items() if key not in SHARED_FIELDS}
    return request
