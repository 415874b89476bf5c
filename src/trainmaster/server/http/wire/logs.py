"""Lines of logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from json.encoder import encode_basestring
from typing import Literal

from pydantic import Field

from trainmaster.server.http.envelope import Wire
from trainmaster.server.http.logs.files import Stream
from trainmaster.server.http.logs.reader import Entry, Page
from trainmaster.server.http.wire.reported import reported_at


class LogLine(Wire):
    """One line that a job wrote."""

    ts: datetime | None = Field(description="When it was seen, to about a tenth of a second.")
    attempt: int
    node: int
    rank: int
    step: str = Field(description="The step of the workload that wrote it.")
    stream: Stream
    message: str = Field(
        description="Without its line end, as a terminal shows it at last. What is not UTF-8 is replaced."
    )


class OpenLine(LogLine):
    """The newest state of a line that is still being overwritten, such as a progress bar."""

    open: Literal[True] = True


class LogPage(Wire):
    """Lines in the order in which they were written, as far as that is known."""

    lines: list[LogLine]
    open_lines: list[OpenLine] = Field(
        description="At the end of the log of a job that runs: lines that end in a carriage return so far, in their "
        "newest state. `next_cursor` is before them."
    )
    next_cursor: str = Field(description="Send it as `cursor` to go on after the last line; it never expires.")
    complete: bool = Field(description="There are no more lines, and there will be none.")
    notice: str | None = Field(description="Why there are no lines, where there were some.")


def page_json(page: Page, notice: str | None) -> bytes:
    """A `LogPage`. Logs are long: the text is written here, without an object for each line."""
    lines = ",".join(text for entry in page.entries for text, _ in line_jsons(entry))
    open_lines = ",".join(map(open_line_json, page.open_lines))
    rest = {"next_cursor": page.cursor.encode(), "complete": page.complete, "notice": notice}
    return f'{{"lines":[{lines}],"open_lines":[{open_lines}],{json.dumps(rest)[1:]}'.encode()


def line_jsons(entry: Entry) -> Iterator[tuple[str, int]]:
    """Each line of an entry as a `LogLine`, and where the next one begins in the file."""
    head, run = _head(entry), entry.run
    if b"\n" not in run.data:
        yield f"{head}{encode_basestring(run.shown())}}}", run.end
        return
    end = run.start
    for written, message in zip(run.data.split(b"\n"), run.shown().split("\n"), strict=True):
        end += len(written) + 1
        yield f"{head}{encode_basestring(message)}}}", end


def open_line_json(entry: Entry) -> str:
    """An entry with an open line, as an `OpenLine`."""
    return f'{_head(entry)}{encode_basestring(entry.run.shown())},"open":true}}'


def page_text(page: Page, *, ranks: bool, times: bool) -> bytes:
    """The lines of a page as plain text, each with its rank or its time before it where that is wanted."""
    return "".join(_text(entry, ranks, times) for entry in (*page.entries, *page.open_lines)).encode()


def _text(entry: Entry, ranks: bool, times: bool) -> str:
    before = (f"{_moment(entry) or '?'} " if times else "") + (f"[rank {entry.file.rank}] " if ranks else "")
    shown = entry.run.shown()
    return before + (shown.replace("\n", f"\n{before}") if before else shown) + "\n"


def _head(entry: Entry) -> str:
    """A `LogLine` up to its message."""
    file = entry.file
    rest = {"attempt": entry.attempt, "node": file.node, "rank": file.rank, "step": file.step, "stream": file.stream}
    return f'{json.dumps({"ts": _moment(entry), **rest})[:-1]},"message":'


def _moment(entry: Entry) -> str | None:
    moment = reported_at(entry.run.at)
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")
