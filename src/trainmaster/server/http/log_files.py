"""One log file: its lines, their times, and where its last lines or those since a time begin.

The file has the output as the rank wrote it. Beside it, `.times` has its size over time, one `<time> <size>` a line; a
line is as old as the first entry that covers its end. A log that reached its cap has a gap in the middle, which one
line explains. Of a line that was overwritten with `\\r`, as progress bars do, the last state is shown.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainmaster.server.storage import Streams

BLOCK = 1 << 16
MAX_LINE_BYTES = 1 << 16
"""A longer line is shown as several, to bound memory."""
MAX_TAIL_BYTES = 16 << 20
"""How much of a file is searched for its last lines."""

_NAME = re.compile(r"nodes/(\d+)/logs/([a-z0-9-]+)\.(\d+)\.(out|err)")
Stream = Literal["stdout", "stderr"]
STREAMS: dict[str, Stream] = {"out": "stdout", "err": "stderr"}
_INDEX_ENTRY_BYTES = 64
"""The most that an entry of the index can have."""


class Run(NamedTuple):
    """Adjacent lines of one time, with the offsets of the first line and of the next after them."""

    at: float
    start: int
    end: int
    data: bytes
    """The lines, separated by single line ends, as in the file, with none after the last."""

    @property
    def line_count(self) -> int:
        return self.data.count(b"\n") + 1

    def first(self, count: int) -> Run:
        data = b"\n".join(self.data.split(b"\n", count)[:count])
        return self if len(data) == len(self.data) else self._replace(data=data, end=self.start + len(data) + 1)

    def without_first(self, count: int) -> Run:
        data = self.data.split(b"\n", count)[count]
        return self._replace(data=data, start=self.start + len(self.data) - len(data))

    def shown(self) -> str:
        """The lines as text, each in its newest state."""
        if b"\r" not in self.data:
            return self.data.decode("utf-8", "replace")
        return b"\n".join(map(newest_state, self.data.split(b"\n"))).decode("utf-8", "replace")


def newest_state(line: bytes) -> bytes:
    """What a terminal finally shows of a line that was overwritten.

    >>> newest_state(b"10%\\r20%\\r"), newest_state(b"\\r10%\\r20%"), newest_state(b"plain\\r")
    (b'20%', b'20%', b'plain')
    """
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """The output of one rank of one step on one channel, up to the size that was seen."""

    name: str
    node: int
    step: str
    rank: int
    channel: str
    size: int

    @property
    def stream(self) -> Stream:
        return STREAMS[self.channel]


def log_files(directory: Streams) -> Iterator[LogFile]:
    """The log files of an attempt, in a fixed order."""
    for name, size in directory.streams():
        if match := _NAME.fullmatch(name):
            node, step, rank, channel = match.groups()
            yield LogFile(name=name, node=int(node), step=step, rank=int(rank), channel=channel, size=size)


def is_log_file(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def runs(directory: Streams, file: LogFile, start: int, *, ended: bool) -> Iterator[Run]:
    """The lines of a file from `start`, a line's, to its known size; text without a line end only once `ended`."""
    if start >= file.size:
        return
    times = _Times(directory, file.name, start)
    for begin, end, data in _split(directory, file, start, ended):
        done = 0  # bytes of `data`
        while True:
            line_end = data.find(b"\n", done) + 1
            at, covered = times.of(begin + line_end if line_end else end)
            if covered >= end:
                yield Run(at, begin + done, end, data[done:])
                break
            cut = data.rfind(b"\n", done, int(covered) - begin)  # the last line end that the entry covers
            yield Run(at, begin + done, begin + cut + 1, data[done:cut])
            done = cut + 1


def start_of_last(directory: Streams, file: LogFile, count: int, *, ended: bool) -> int:
    """Where the last `count` lines of a file begin; they never reach back over a gap."""
    if count == 0:
        return file.size if ended else _line_start(directory, file, file.size)
    gap = directory.gap(file.name)
    first = max(0, file.size - MAX_TAIL_BYTES, gap.end if gap else 0)
    position = file.size
    wanted = count
    trailing = True
    while position > first:
        size = min(BLOCK, position - first)
        block = directory.read(file.name, position - size, size)
        position -= size
        end = len(block)
        if trailing:
            # The final line end belongs to the last line; an open line counts only when it will not change.
            trailing = False
            if block.endswith(b"\n"):
                end -= 1
            elif not ended:
                end = block.rfind(b"\n")
                if end < 0:
                    trailing = True
                    continue
        while (end := block.rfind(b"\n", 0, end)) >= 0:
            wanted -= 1
            if wanted == 0:
                return position + end + 1
    return _line_start(directory, file, position)


def start_since(directory: Streams, file: LogFile, since: float, *, ended: bool) -> int:
    before, _ = _bisect(directory, f"{file.name}.times", lambda entry: entry.at < since)
    if before is None:
        return 0
    covered = before.size
    return file.size if covered >= file.size and ended else _line_start(directory, file, min(covered, file.size))


def _split(directory: Streams, file: LogFile, start: int, ended: bool) -> Iterator[tuple[int, int, bytes]]:
    """Blocks of whole lines with their offsets; a piece of a long line or the note on a gap is a block by itself."""
    position, rest = start, b""
    while (begin := position + len(rest)) < file.size:
        if not (block := directory.read(file.name, begin, min(BLOCK, file.size - begin))):
            return  # the directory was removed meanwhile
        gap = directory.gap(file.name)
        if gap is not None and not (begin < gap.end and gap.start < begin + len(block)):
            gap = None
        if gap is not None:
            block = block[: max(0, gap.start - begin)]
        whole, line_end, rest = (rest + block).rpartition(b"\n")
        if line_end:
            # Only the first line may have begun in an earlier block, and so be longer than one.
            first = whole.find(b"\n") if b"\n" in whole else len(whole)
            while first > MAX_LINE_BYTES:
                piece = _piece(whole)
                yield position, position + len(piece), piece
                position, whole, first = position + len(piece), whole[len(piece) :], first - len(piece)
            yield position, position + len(whole) + 1, whole
            position += len(whole) + 1
        while len(rest) > MAX_LINE_BYTES:
            piece = _piece(rest)
            yield position, position + len(piece), piece
            position, rest = position + len(piece), rest[len(piece) :]
        if gap is not None:
            if rest:
                yield position, position + len(rest), rest
                position += len(rest)
            cap = f"{gap.cap_bytes / (1 << 20):g} MiB"
            removed = f"[… {gap.end - position:,} bytes removed: the log reached its cap of {cap} …]"
            yield position, gap.end, removed.encode()
            position, rest = gap.end, b""
    if rest and ended:
        yield position, position + len(rest), rest


def _piece(line: bytes) -> bytes:
    """The beginning of a line that is too long, up to the last carriage return if it has one."""
    return line[: line.rfind(b"\r", 0, MAX_LINE_BYTES) + 1 or MAX_LINE_BYTES]


def _line_start(directory: Streams, file: LogFile, position: int) -> int:
    gap = directory.gap(file.name)
    first = gap.end if gap and gap.end < position else 0
    if gap and gap.start < position <= gap.end:
        return gap.start
    size = min(MAX_LINE_BYTES, position - first)
    found = directory.read(file.name, position - size, size).rfind(b"\n")
    return position - size + found + 1 if found >= 0 else position - size


class _Grown(NamedTuple):
    """An entry of an index: the size of the file at a time."""

    at: float
    size: int


class _Times:
    """Times of lines, which must be asked for in order."""

    def __init__(self, directory: Streams, name: str, start: int) -> None:
        _, self._entries = _bisect(directory, f"{name}.times", lambda entry: entry.size <= start)
        self._at = 0.0
        self._size: float = -1
        self._directory, self._name = directory, name

    def of(self, end: int) -> tuple[float, float]:
        """The time of a line that ends at `end`, and the offset up to which lines have that time."""
        while self._size < end:
            if (entry := next(self._entries, None)) is not None:
                self._at, self._size = entry
                continue
            # Not in the index yet: use the file's modification time.
            self._size = math.inf
            if (status := self._directory.status(self._name)) is not None:
                self._at = max(self._at, status.st_mtime)
        return self._at, self._size


def _bisect(directory: Streams, name: str, before: Callable[[_Grown], bool]) -> tuple[_Grown | None, Iterator[_Grown]]:
    """The last entry of an index for which `before` holds, and an iterator over those after it."""
    if (status := directory.status(name)) is None:
        return None, iter(())
    low, high = 0, status.st_size
    while high - low > BLOCK:
        middle = (low + high) // 2
        text = directory.read(name, middle, 2 * _INDEX_ENTRY_BYTES)
        line_end = text.find(b"\n") + 1
        if (entry := _entry(text[line_end:].partition(b"\n")[0])) is not None and before(entry):
            low = middle + line_end
        else:
            high = middle
    last: _Grown | None = None
    entries = _entries(directory, name, low)
    for entry in entries:
        if not before(entry):
            return last, itertools.chain((entry,), entries)
        last = entry
    return last, iter(())


def _entries(directory: Streams, name: str, position: int) -> Iterator[_Grown]:
    rest = b""
    while block := directory.read(name, position, BLOCK):
        position += len(block)
        *whole, rest = (rest + block).split(b"\n")
        yield from filter(None, map(_entry, whole))


def _entry(text: bytes) -> _Grown | None:
    at, _, size = text.partition(b" ")
    try:
        return _Grown(float(at), int(size))
    except ValueError:
        return None  # a torn write on a full disk
