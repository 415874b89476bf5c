"""The types of the server's answers, by the names that the client's users import, and the request of a shown job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmaster.schema.accounts import AccountResource as Account
from trainmaster.schema.accounts import CreatedWebhook, NewKey, Trial
from trainmaster.schema.accounts import KeyResource as Key
from trainmaster.schema.accounts import WebhookResource as Webhook
from trainmaster.schema.cluster import Amount, BackendSummary, RuntimeList, RuntimeProblem
from trainmaster.schema.cluster import BackendResource as Backend
from trainmaster.schema.cluster import ClusterEventResource as NodeEvent
from trainmaster.schema.cluster import ClusterResource as Summary
from trainmaster.schema.cluster import EngineResource as Engine
from trainmaster.schema.cluster import EntryResource as QueueEntry
from trainmaster.schema.cluster import GpuResource as Gpu
from trainmaster.schema.cluster import GpuTypeResource as GpuType
from trainmaster.schema.cluster import LeaderResource as Leader
from trainmaster.schema.cluster import NodeResource as Node
from trainmaster.schema.cluster import QueueResource as Queue
from trainmaster.schema.cluster import RuntimeResource as RuntimeDocument
from trainmaster.schema.data import CheckedData, CheckedSource, DataProblem, DataSample, TokenCounts, TokenSegment
from trainmaster.schema.jobs import (
    STATUSES,
    TERMINAL,
    CheckedJob,
    ControlledJob,
    Endpoint,
    GpuUse,
    JobCheckpoints,
    JobSummary,
    Output,
    Placement,
    Status,
)
from trainmaster.schema.jobs import AttemptResource as Attempt
from trainmaster.schema.jobs import BestNodeResource as BestNode
from trainmaster.schema.jobs import BlockerResource as Blocker
from trainmaster.schema.jobs import CheckpointResource as Checkpoint
from trainmaster.schema.jobs import FailureResource as Failure
from trainmaster.schema.jobs import JobResource as Job
from trainmaster.schema.jobs import PendingResource as Pending
from trainmaster.schema.jobs import ProgressResource as Progress
from trainmaster.schema.jobs import SubmittedJob as Submitted
from trainmaster.schema.jobs import TombstoneResource as Tombstone
from trainmaster.schema.reports import ArtifactResource as Artifact
from trainmaster.schema.reports import (
    CollectedKind,
    Collection,
    EventPage,
    LogLine,
    LogPage,
    MetricsReport,
    Usage,
    UsageRow,
)
from trainmaster.schema.reports import EventResource as Event
from trainmaster.schema.reports import JobMetrics as Metrics
from trainmaster.schema.reports import MetricSeries as Series

__all__ = [
    "STATUSES",
    "TERMINAL",
    "Account",
    "Amount",
    "Artifact",
    "Attempt",
    "Backend",
    "BackendSummary",
    "BestNode",
    "Blocker",
    "CheckedData",
    "CheckedJob",
    "CheckedSource",
    "Checkpoint",
    "CollectedKind",
    "Collection",
    "ControlledJob",
    "CreatedWebhook",
    "DataProblem",
    "DataSample",
    "Endpoint",
    "Engine",
    "Event",
    "EventPage",
    "Failure",
    "Gpu",
    "GpuType",
    "GpuUse",
    "Job",
    "JobCheckpoints",
    "JobSummary",
    "Key",
    "Leader",
    "LogLine",
    "LogPage",
    "Metrics",
    "MetricsReport",
    "NewKey",
    "Node",
    "NodeEvent",
    "Output",
    "Pending",
    "Placement",
    "Progress",
    "Queue",
    "QueueEntry",
    "RuntimeDocument",
    "RuntimeList",
    "RuntimeProblem",
    "Series",
    "Status",
    "Submitted",
    "Summary",
    "TokenCounts",
    "TokenSegment",
    "Tombstone",
    "Trial",
    "Usage",
    "UsageRow",
    "Webhook",
    "is_job",
    "request_of",
]

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
