"""The types of the server's answers, by the names that the client's users import, and the request of a shown job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmaster.schema import accounts, cluster, data, jobs, reports

Account = accounts.AccountResource
CreatedWebhook = accounts.CreatedWebhook
Key = accounts.KeyResource
NewKey = accounts.NewKey
Trial = accounts.Trial
Webhook = accounts.WebhookResource

Amount = cluster.Amount
Backend = cluster.BackendResource
BackendSummary = cluster.BackendSummary
Engine = cluster.EngineResource
Gpu = cluster.GpuResource
GpuType = cluster.GpuTypeResource
Leader = cluster.LeaderResource
Node = cluster.NodeResource
NodeEvent = cluster.ClusterEventResource
Queue = cluster.QueueResource
QueueEntry = cluster.EntryResource
RuntimeDocument = cluster.RuntimeResource
ForeignJob = cluster.ForeignJobResource
ForeignLog = cluster.ForeignLog
RuntimeList = cluster.RuntimeList
RuntimeProblem = cluster.RuntimeProblem
Summary = cluster.ClusterResource

CheckedData = data.CheckedData
CheckedSource = data.CheckedSource
DataProblem = data.DataProblem
DataSample = data.DataSample
TokenCounts = data.TokenCounts
TokenSegment = data.TokenSegment

STATUSES = jobs.STATUSES
TERMINAL = jobs.TERMINAL
Attempt = jobs.AttemptResource
BestNode = jobs.BestNodeResource
Blocker = jobs.BlockerResource
CheckedJob = jobs.CheckedJob
Checkpoint = jobs.CheckpointResource
ControlledJob = jobs.ControlledJob
Endpoint = jobs.Endpoint
Failure = jobs.FailureResource
GpuUse = jobs.GpuUse
Job = jobs.JobResource
JobCheckpoints = jobs.JobCheckpoints
JobSummary = jobs.JobSummary
Output = jobs.Output
Pending = jobs.PendingResource
Placement = jobs.PlacementResource
Progress = jobs.ProgressResource
Status = jobs.Status
Submitted = jobs.SubmittedJob
Tombstone = jobs.TombstoneResource

Artifact = reports.ArtifactResource
CollectedKind = reports.CollectedKind
Collection = reports.Collection
Event = reports.EventResource
EventPage = reports.EventPage
LogLine = reports.LogLine
LogPage = reports.LogPage
Metrics = reports.JobMetrics
MetricsReport = reports.MetricsReport
Series = reports.MetricSeries
Usage = reports.Usage
UsageRow = reports.UsageRow

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
