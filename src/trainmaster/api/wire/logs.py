"""Lines of logs."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from trainmaster.api.envelope import Wire
from trainmaster.api.logs.files import Stream
from trainmaster.api.logs.reading import Entry
from trainmaster.api.wire.reported import reported_at


class LogLine(Wire):
    """One line that a job wrote."""

    ts: datetime | None = Field(description="When it was seen, to about a tenth of a second.")
    attempt: int
    node: int
    rank: int
    step: str = Field(description="The step of the workload that wrote it.")
    stream: Stream
    message: str = Field(description="Without its line end. What is not UTF-8 is replaced.")


class LogPage(Wire):
    """Lines in the order in which they were written, as far as that is known."""

    lines: list[LogLine]
    next_cursor: str = Field(description="Send it as `cursor` to go on after the last line; it never expires.")
    complete: bool = Field(description="There are no more lines, and there will be none.")
    notice: str | None = Field(description="Why there are no lines, where there were some.")


def log_line(entry: Entry) -> LogLine:
    """A line as it is shown."""
    file, line = entry.file, entry.line
    return LogLine.model_construct(
        ts=reported_at(line.at),
        attempt=entry.attempt,
        node=file.node,
        rank=file.rank,
        step=file.step,
        stream=file.stream,
        message=line.text.removesuffix(b"\r").decode("utf-8", "replace"),
    )
