"""The run directory, version 1: the files of an attempt: its request, claims, streams and exits.

    <runs_root>/<job_id>/owner.json          the attempt that owns the job now
    <runs_root>/<job_id>/owner.ranks.json    the same for ranks that run as a user of their own
    <runs_root>/<job_id>/<attempt>/
        request.json                         immutable
        control.json                         what the server wants; replaced as a whole, `seq` rises
        closed                               the server is done with it; for attempts that must stay in containers
        claims/<node>.json                   who runs this node; exists at most once
        nodes/<node>/worker.jsonl            stream: what the worker did and saw
        nodes/<node>/rank-<rank>.events.jsonl    stream: what a rank reported
        nodes/<node>/rank-<rank>.metrics.jsonl   stream: its metrics
        nodes/<node>/logs/<step>.<rank>.out|err  stream: raw output
        nodes/<node>/logs/<step>.<rank>.out.times|err.times  stream: `<unix time> <offset>` a line
        nodes/<node>/logs/<step>.<rank>.out.gap.json|err.gap.json  which bytes were removed from the middle of a log
        nodes/0/rendezvous.json              where the ranks meet; written by node 0's worker
        nodes/<node>/beat.json               the worker's heartbeat
        nodes/<node>/endpoint.json           where a service answers
        nodes/<node>/exit.json               how it ended; written last
        work/                                the default working directory

A stream only ever grows, by `append(name, offset, data) -> next offset`; sending the same bytes twice changes nothing.
A document is replaced as a whole. The same methods serve a worker on shared files and the server's replica of a remote
worker's files.

Of a log that reaches its cap, the middle is removed; the gap is recorded before the bytes go. Offsets on both sides
stay the same: the middle becomes a hole in the file. Where the file system has no holes, the log is truncated after its
head and extended to its old length: its tail is then what was written after the last cut.

A job may have written anything below claims/, nodes/ and work/: nothing there is read through a link. If jobs run as
their account's user, only a group that the processes of that attempt have can enter an attempt's directory, and the
streams belong to that group: no other job of the account can report in its name. Everything above is the server's own:
a job in a container can only read it, and a job with a user of its own can neither read nor change it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from trainmaster.protocol.account_files import (
    closing,
    directories_in,
    directory_below,
    exists,
    make_directories,
    open_below,
    status_below,
)
from trainmaster.protocol.documents import (
    JsonRecord,
    decoded,
    fields_of,
    read_document,
    replace_document,
    write_document,
    write_new,
)
from trainmaster.protocol.request import AttemptRequest

REQUEST = "request.json"
CONTROL = "control.json"
RENDEZVOUS = "nodes/0/rendezvous.json"
CLOSED = "closed"
OWNER = "owner.json"
RANKS_OWNER = "owner.ranks.json"
"""A copy for the ranks alone: whoever can read a file as its owner can also change it."""

PREPARED = "prepared"
"""Below a node's directory: what preparing steps leave for the ranks."""

SEARCH_ONLY = 0o711
"""The mode of a directory that others may pass through, but neither list nor change."""
_SEARCH_BY_GROUP = 0o710

_LOG_NAME = r"nodes/\d{1,6}/logs/[a-z0-9-]{1,64}\.\d{1,6}\.(out|err)"
_LOG = re.compile(_LOG_NAME)
_STREAM = re.compile(rf"nodes/\d{{1,6}}/(worker\.jsonl|rank-\d{{1,6}}\.(events|metrics)\.jsonl)|{_LOG_NAME}(\.times)?")
_GAP = re.compile(rf"(?P<log>{_LOG_NAME})\.gap\.json")
_DOCUMENT = re.compile(r"nodes/0/rendezvous\.json|nodes/\d{1,6}/(beat|endpoint|exit)\.json")
MOST_DOCUMENT_BYTES = 256 << 10
"""Limit for documents that a job may have written; a longer one counts as absent."""
MOST_CLAIM_BYTES = 4 << 10

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01
_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS)
_UNSEEN_BYTES = 64 << 20
"""More than a process writes between the look at a log's size and the cut; takes no disk space."""
_MAX_OFFSET = 1 << 62


def worker_stream(node: int) -> str:
    return f"nodes/{node}/worker.jsonl"


def events_stream(node: int, rank: int) -> str:
    return f"nodes/{node}/rank-{rank}.events.jsonl"


def metrics_stream(node: int, rank: int) -> str:
    return f"nodes/{node}/rank-{rank}.metrics.jsonl"


def log_stream(node: int, step: str, rank: int, channel: str) -> str:
    """`channel` is `out` or `err`."""
    return f"nodes/{node}/logs/{step}.{rank}.{channel}"


def gap_document(log: str) -> str:
    return f"{log}.gap.json"


def beat_document(node: int) -> str:
    return f"nodes/{node}/beat.json"


def endpoint_document(node: int) -> str:
    return f"nodes/{node}/endpoint.json"


def exit_document(node: int) -> str:
    return f"nodes/{node}/exit.json"


def is_stream(name: str) -> bool:
    return _STREAM.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap(JsonRecord):
    """The bytes from `start` up to `end` are gone."""

    start: int
    end: int
    cap_bytes: int

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError if the document is no gap."""
        values = [document.get(name) for name in ("start", "end", "cap_bytes")]
        start, end, cap_bytes = (value if type(value) is int else -1 for value in values)
        if not 0 <= start <= end < _MAX_OFFSET or cap_bytes < 0:
            raise ValueError("a gap has a start, an end and the cap that it is there for")
        return cls(start=start, end=end, cap_bytes=cap_bytes)


class StreamGapError(ValueError):
    """Bytes were offered beyond the end of the stream; `next_offset` says where to continue."""

    def __init__(self, next_offset: int) -> None:
        super().__init__(f"the stream ends at {next_offset}")
        self.next_offset = next_offset


class RunDirectory:
    """One attempt's directory. Creating the object touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, request: AttemptRequest, *, with_ranks: bool = True) -> None:
        """Lay the directory out and write the request; may be repeated.

        The owner is written first: from here on no older attempt can commit a checkpoint. `with_ranks`: the ranks will
        work in here, and not in a copy of their own.
        """
        logs = [self.path / "nodes" / str(node) / "logs" for node in range(len(request.nodes))]
        for directory in (*logs, self.path / "claims"):
            directory.mkdir(parents=True, exist_ok=True)
        os.chmod(self.path / "claims", 0o700)
        if with_ranks and request.uid is not None:
            # Search only: ranks get their files by name, and each of them belongs to the ranks alone.
            above = (self.path.parent, self.path / "nodes", *(log.parent for log in logs), *logs)
            for directory in above:
                os.chmod(directory, SEARCH_ONLY)
            if not (self.path / REQUEST).exists():
                # Impossible if the server is not root, or is root of a container with few group ids.
                with contextlib.suppress(OSError):
                    os.chown(self.path, -1, request.group)
            os.chmod(self.path, SEARCH_ONLY if self.ranks_group(request) is None else _SEARCH_BY_GROUP)
        else:
            os.chmod(self.path, 0o700)
        owner = read_document(self.path.parent / OWNER)
        # A leader that was frozen on its way here must not take the job back from a newer attempt.
        if owner is None or int(owner["attempt"]) < request.attempt:
            owner = {"attempt": request.attempt, "token": request.rank_token}
            write_document(self.path.parent / OWNER, owner)
            (self.path.parent / RANKS_OWNER).unlink(missing_ok=True)
        if with_ranks and request.uid is not None and owner["attempt"] == request.attempt:
            grouped = self.ranks_group(request) is not None
            readers = {"gid": request.group} if grouped else {"uid": request.uid}
            write_document(self.path.parent / RANKS_OWNER, owner, **readers)
        if read_document(self.path / REQUEST) is None:
            write_document(self.path / REQUEST, fields_of(request))

    def ranks_group(self, request: AttemptRequest) -> int | None:
        """The group that ranks need to enter the directory; None if it is open to their user."""
        return request.group if os.stat(self.path).st_gid == request.group else None

    def request(self) -> AttemptRequest:
        """Raises FileNotFoundError if the directory was never laid out, or is gone."""
        return AttemptRequest.from_json(json.loads((self.path / REQUEST).read_bytes()))

    def claim(self, node: int, claimant: Mapping[str, Any]) -> bool:
        """Claim one node of the attempt; False if somebody else has it. A claimant (by its `nonce`) may ask again."""
        with directory_below(self.path, "claims") as claims:
            temporary = write_new(claims, str(node), claimant)
            try:
                os.link(temporary, f"{node}.json", src_dir_fd=claims, dst_dir_fd=claims, follow_symlinks=False)
            except FileExistsError:
                holder = self.claimant(node)
                return holder is not None and holder.get("nonce") == claimant.get("nonce")
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=claims)
        return True

    def claimant(self, node: int) -> dict[str, Any] | None:
        """Who claimed the node; None if nobody has; empty if a power cut left nothing of the claim."""
        name = f"claims/{node}.json"
        claimant = self.document(name, MOST_CLAIM_BYTES)
        if claimant is None and exists(self.path, name):
            # Read again: a living worker may have made it since.
            claimant = self.document(name, MOST_CLAIM_BYTES) or {}
        return claimant

    def append(self, stream: str, offset: int, data: bytes) -> int:
        """Write `data` at `offset` of a stream, without what the stream has already; returns the stream's new end.

        Raises StreamGapError if `offset` lies beyond the end, and ValueError if no such stream can exist.
        """
        if not _STREAM.fullmatch(stream):
            raise ValueError(f"no such stream: {stream}")
        make_directories(self.path, stream.rpartition("/")[0])
        with closing(open_below(self.path, stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND)) as descriptor:
            # A worker that got no answer sends again, perhaps while its first request is still being written.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            end = os.fstat(descriptor).st_size
            if offset > end:
                raise StreamGapError(end)
            fresh = data[end - offset :]
            while fresh:
                written = os.write(descriptor, fresh)
                fresh = fresh[written:]
                end += written
        return end

    def read(self, stream: str, offset: int, limit: int = 1 << 20) -> bytes:
        """Bytes of a stream from `offset`; empty if there are none (yet)."""
        try:
            with open(open_below(self.path, stream), "rb", buffering=0) as file:
                file.seek(offset)
                return file.read(limit) or b""
        except FileNotFoundError:
            return b""

    def streams(self, node: int | None = None) -> Iterator[tuple[str, int]]:
        """Every existing stream of one node, or of all, with its size."""
        nodes = sorted(directories_in(self.path, "nodes")) if node is None else [str(node)]
        for directory in (f"nodes/{name}{logs}" for name in nodes for logs in ("", "/logs")):
            with contextlib.suppress(FileNotFoundError):
                yield from self._streams_in(directory)

    def _streams_in(self, directory: str) -> list[tuple[str, int]]:
        with directory_below(self.path, directory) as opened, os.scandir(opened) as entries:
            found = [(f"{directory}/{entry.name}", entry) for entry in entries]
            return sorted(
                (stream, entry.stat(follow_symlinks=False).st_size)
                for stream, entry in found
                if _STREAM.fullmatch(stream) and entry.is_file(follow_symlinks=False)
            )

    def status(self, stream: str) -> os.stat_result | None:
        return status_below(self.path, stream)

    def gap(self, stream: str) -> Gap | None:
        """What was removed of a log. Ask after reading from it: what lies in a gap is not what was written there."""
        if not _LOG.fullmatch(stream):
            return None
        try:
            return Gap.from_json(self.document(gap_document(stream)) or {})
        except ValueError:
            return None

    def remove(self, log: str, wanted: Gap, *, being_written: bool = False) -> Gap:
        """Remove bytes from a log, in addition to those removed before; returns all that is gone now.

        A log that is shorter than the gap's end becomes that long. `being_written`: others append without a lock.
        """
        with closing(open_below(self.path, log, os.O_WRONLY | os.O_CREAT)) as descriptor:
            if not being_written:
                # As `append` does. Ranks take no lock; one that took it must not block its worker.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            before = self.gap(log) or wanted
            start, end = min(wanted.start, before.start, size), max(wanted.end, before.end)
            gap = Gap(start=start, end=end, cap_bytes=wanted.cap_bytes)
            self._write(gap_document(log), gap.to_json())
            try:
                _punch(descriptor, start, end - start)
            except OSError as error:
                if error.errno not in _NO_HOLES:
                    raise
                # What is written between the look at the size and the cut is lost, too, and must lie in the gap.
                gap = replace(gap, end=max(end, size + _UNSEEN_BYTES if being_written else size))
                self._write(gap_document(log), gap.to_json())
                os.ftruncate(descriptor, start)
            if os.fstat(descriptor).st_size < gap.end:
                os.ftruncate(descriptor, gap.end)
            return gap

    def put_document(self, name: str, document: Mapping[str, Any]) -> None:
        """Replace one of the worker's documents; any other is a ValueError. The gap of a log also removes the bytes."""
        if gap := _GAP.fullmatch(name):
            make_directories(self.path, name.rpartition("/")[0])
            self.remove(gap["log"], Gap.from_json(document))
            return
        if not _DOCUMENT.fullmatch(name):
            raise ValueError(f"no such document: {name}")
        self._write(name, document)

    def document(self, name: str, most_bytes: int = MOST_DOCUMENT_BYTES) -> dict[str, Any] | None:
        """A document; None if it does not exist, or is longer than `most_bytes`."""
        try:
            with open(open_below(self.path, name), "rb") as file:
                data = file.read(most_bytes + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return decoded(data) if len(data) <= most_bytes else None

    def set_control(self, control: Mapping[str, Any]) -> None:
        self._write(CONTROL, control)

    def close(self) -> None:
        """Mark the attempt as over, in a place that its job cannot change; it can change an exit document."""
        with contextlib.suppress(FileNotFoundError):  # it is gone already
            (self.path / CLOSED).touch()

    @property
    def is_closed(self) -> bool:
        return (self.path / CLOSED).exists()

    def _write(self, name: str, document: Mapping[str, Any]) -> None:
        way, _, last = name.rpartition("/")
        with directory_below(self.path, way) as directory:
            replace_document(directory, last, document)


def _punch(descriptor: int, start: int, length: int) -> None:
    if length and _fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, start, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
