"""What jobs wrote and used: log lines, events, metrics, files, usage, and what retention removed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from trainmaster.schema import Doc, Timestamp
from trainmaster.schema.jobs import CheckpointResource


class LogLine(TypedDict):
    """One line that a job wrote."""

    ts: Annotated[Timestamp | None, Doc("When the worker read it, to about a tenth of a second.")]
    attempt: int
    node: int
    rank: int
    step: Annotated[str, Doc("The step of the workload that wrote it.")]
    stream: Literal["stdout", "stderr"]
    message: Annotated[
        str, Doc("Without its line end, as a terminal shows it at last. Bytes that are not UTF-8 are replaced.")
    ]


class OpenLine(LogLine):
    """The newest state of a line that is still being overwritten, such as a progress bar."""

    open: Literal[True]


class LogPage(TypedDict):
    """Lines in the order in which they were written, as far as that is known."""

    lines: list[LogLine]
    open_lines: Annotated[
        list[OpenLine],
        Doc(
            "At the end of the log of a running job: lines that end in a carriage return so far, in their "
            "newest state. `next_cursor` is before them."
        ),
    ]
    next_cursor: Annotated[str, Doc("Send it as `cursor` to read on after the last line; it never expires.")]
    complete: Annotated[bool, Doc("There are no more lines, and there will be none.")]
    notice: Annotated[str | None, Doc("Why lines that existed are missing.")]


_Transition = TypedDict(
    "_Transition", {"from": Annotated[str | None, Doc("The status before, where it changed.")], "to": str | None}
)


class EventResource(_Transition):
    """Something that happened to a job."""

    job_id: str
    seq: Annotated[int, Doc("Numbers the events of a job, without gaps.")]
    ts: Timestamp
    type: str
    actor: str
    reason: str | None
    attempt: int
    message: str
    data: dict[str, Any]


class EventPage(TypedDict):
    """Events in order."""

    events: list[EventResource]
    next_cursor: Annotated[int, Doc("Send it as `after` to read on.")]


class FeedEvent(EventResource):
    """Something that happened, in the feed of all jobs."""

    id: Annotated[int, Doc("The feed's cursor.")]


class FeedPage(TypedDict):
    """Events of all jobs in order."""

    events: list[FeedEvent]
    next_cursor: Annotated[int, Doc("Send it as `after` to read on.")]


class MetricSeries(TypedDict):
    """One metric over time."""

    name: str
    points: Annotated[
        list[tuple[int | None, Timestamp | None, float | None]],
        Doc("[step, time, value], by step. A value that is not a finite number is null."),
    ]


class JobMetrics(TypedDict):
    """A job's progress and metrics."""

    job_id: str
    status: str
    step: int | None
    epoch: float | None
    latest: Annotated[dict[str, float | None], Doc("The last value of each metric.")]
    series: list[MetricSeries]
    checkpoints: list[CheckpointResource]
    best_checkpoint_id: str | None
    notice: Annotated[str | None, Doc("Why series that existed are missing.")]


class MetricsReport(TypedDict):
    """What a job reported at one moment."""

    ts: Timestamp | None
    attempt: int
    step: int | None
    total_steps: int | None
    epoch: float | None
    percent: float | None
    eta_seconds: float | None
    values: dict[str, float | None]


class ArtifactResource(TypedDict):
    """A file that a job left."""

    path: Annotated[str, Doc("`output/...` or `checkpoints/<checkpoint_id>/...`; fetch the file by this.")]
    kind: Literal["output", "checkpoint"]
    checkpoint_id: Annotated[str | None, Doc("The checkpoint that the file is a part of.")]
    size_bytes: int
    modified_at: Timestamp
    etag: Annotated[str, Doc("Changes with the content; the header `ETag` of its download.")]
    sha256: Annotated[str | None, Doc("From the checkpoint's manifest; null where it is not known.")]


class ArtifactPage(TypedDict):
    """Files by their paths."""

    artifacts: list[ArtifactResource]
    next_page_token: str | None


class BlobResource(TypedDict):
    """An uploaded file, named by its content."""

    sha256: str
    size_bytes: int


class UsageRow(TypedDict):
    """What a group of attempts used."""

    key: Annotated[str, Doc("The group; empty for jobs that lack the label, and for the total.")]
    jobs: int
    attempts: int
    gpu_seconds: float
    cpu_seconds: Annotated[float, Doc("Allocated cores x time, however busy they were.")]
    wall_seconds: float


_Interval = TypedDict("_Interval", {"from": Annotated[Timestamp | None, Doc("Null: all time.")], "to": Timestamp})


class Usage(_Interval):
    """What was used in an interval."""

    group_by: str
    rows: list[UsageRow]
    total: UsageRow
    truncated: Annotated[bool, Doc("There are more groups than `limit`.")]


class CollectedKind(TypedDict):
    """Things of one kind that retention removed, or would remove."""

    what: Annotated[
        str,
        Doc(
            "`run directory`, `checkpoint`, `deleted job`, `cache`, `blob`, `orphan`, the record of a"
            " `session`, of a `training run` or of a `sampler`; or `failed`, with what could not be removed and why."
        ),
    ]
    count: int
    size_bytes: Annotated[int, Doc("The disk space that they take, as far as it is known.")]
    names: Annotated[list[str], Doc("The first hundred.")]
    removed: Annotated[bool, Doc("Whether they were removed; orphans are kept unless the request names them.")]


class Collection(TypedDict):
    """What retention removed, or would remove."""

    dry_run: bool
    kinds: list[CollectedKind]
