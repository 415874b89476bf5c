"""What the server answers with, as it comes over the wire.

Plain dictionaries with known keys: a newer server may send more, and nothing is lost on the way to a user's JSON.
Timestamps are ISO 8601 in UTC.
"""

from __future__ import annotations

from trainmaster.sdk.types.cluster import (
    Amount,
    Artifact,
    CollectedKind,
    Collection,
    Gpu,
    Interval,
    JobCheckpoints,
    Node,
    Tombstone,
    Usage,
    UsageRow,
)
from trainmaster.sdk.types.jobs import (
    TERMINAL,
    Attempt,
    BestNode,
    Blocker,
    CheckedJob,
    Checkpoint,
    ControlledJob,
    Endpoint,
    Failure,
    GpuUse,
    Job,
    JobSummary,
    Output,
    Pending,
    Placement,
    Progress,
    Status,
    Submitted,
)
from trainmaster.sdk.types.reports import Event, EventPage, LogLine, LogPage, Metrics, MetricsReport, Series, Transition

__all__ = [
    "TERMINAL",
    "Amount",
    "Artifact",
    "Attempt",
    "BestNode",
    "Blocker",
    "CheckedJob",
    "Checkpoint",
    "CollectedKind",
    "Collection",
    "ControlledJob",
    "Endpoint",
    "Event",
    "EventPage",
    "Failure",
    "Gpu",
    "GpuUse",
    "Interval",
    "Job",
    "JobCheckpoints",
    "JobSummary",
    "LogLine",
    "LogPage",
    "Metrics",
    "MetricsReport",
    "Node",
    "Output",
    "Pending",
    "Placement",
    "Progress",
    "Series",
    "Status",
    "Submitted",
    "Tombstone",
    "Transition",
    "Usage",
    "UsageRow",
]
