"""The object store of a server (setting `object_root`), to which the files of ended jobs move.

    <root>/runs/<job_id>/<attempt>/<stream>           logs, metrics and reports; committed by .index.json beside them
    <root>/artifacts/<job_id>/output/...              results; committed by artifacts/<job_id>/.index.json
    <root>/artifacts/<job_id>/checkpoints/<name>/...  a checkpoint, committed by its manifest (`jobs.object_root`)
    <root>/blobs/<account_id>/<sha256>                uploaded files

Paths are the same as below the server's own directories, with the name of the directory in front; a file of a unit with
a name that object stores refuse has its digest for a name there. A unit is everything that one index or manifest
commits. Without that, its files are not there for any reader.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainmaster.jobs import objects
from trainmaster.jobs.checkpoint import MANIFEST, CorruptCheckpointError, Manifest
from trainmaster.jobs.objects import ObjectPlace, ObjectStoreError
from trainmaster.protocol.run_directory import Gap, is_stream
from trainmaster.server.core.errors import StoreUnavailableError

INDEX = ".index.json"
PATIENCE_S = 10.0
"""How long a request is repeated. Users wait for some of them; what moves files tries again later anyway."""
AWAY_S = 3.0
"""For so long nothing is asked of a store that has just failed: those who wait for it would fill all threads."""
PIECE = 8 << 20
CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
)
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_VERSION = 1
_TAIL = ".tail"
_DIGESTS = ".named"
_LONGEST_NAME = 600
"""In bytes: a key has at most 1,024, the path of the unit and the root's own included."""
_MOST_INDEXES = 256
_BLOCK = 1 << 20
_MOST_BLOCKS = 32


class ObjectStoreAwayError(StoreUnavailableError):
    """The object store with the files of ended jobs cannot be used now; try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a committed unit."""

    key: str
    """Below the root."""
    size: int
    modified_at: float
    sha256: str | None = None
    gap: Gap | None = None
    """Of a log: bytes that were removed. What follows them is an object of its own."""
    content: bytes | None = None
    """Of a file that readers see otherwise than it is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredUnit:
    files: Mapping[str, StoredFile]
    """By their paths in the unit."""
    attempts: int = 0
    """How many attempts the job had when this was committed."""


class StreamStatus(NamedTuple):
    st_size: int
    st_mtime: float


class Archive:
    """Blocks, and raises ObjectStoreAwayError while the store does not answer or refuses."""

    def __init__(self, place: ObjectPlace) -> None:
        self.place = place
        self._indexes: OrderedDict[str, StoredUnit] = OrderedDict()
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        """Of logs and metrics, which are read in small pieces."""
        self._away: tuple[float, str] = (float("-inf"), "")
        """When it was last seen to be away, by the monotonic clock, and why."""
        self._lock = threading.Lock()

    @staticmethod
    def open(uri: str) -> Archive:
        return Archive(objects.open_place(uri, patience_s=PATIENCE_S))

    def uri(self, path: str) -> str:
        return self.place.locate(self.place.below(path))

    def credentials(self) -> dict[str, str]:
        """The variables of this process that make others reach the store as it does."""
        return {name: os.environ[name] for name in CREDENTIALS if os.environ.get(name)}

    def check(self) -> None:
        """Raise unless objects can be written and read."""
        with self._reached():
            self.place.put(self.place.below(".check"), b"")
            self.place.delete([self.place.below(".check")])

    def unit(self, path: str) -> StoredUnit | None:
        """What an index commits; None if nothing is committed there."""
        with self._lock:
            if (known := self._indexes.get(path)) is not None:
                self._indexes.move_to_end(path)
                return known
        try:
            with self._reached():
                data, _ = self.place.get(self.place.below(f"{path}/{INDEX}"))
        except FileNotFoundError:
            return None
        found = _unit_of(path, json.loads(data))
        self._remember(path, found)
        return found

    def commit(self, path: str, unit: StoredUnit) -> None:
        """Commit files that were sent, and remove those that an earlier commit had in addition."""
        before = self.unit(path)
        with self._reached():
            self.place.put(self.place.below(f"{path}/{INDEX}"), _document_of(unit))
        self._remember(path, unit)
        doomed = [file.key for name, file in before.files.items() if name not in unit.files] if before else []
        self._delete(doomed)

    def checkpoint(self, path: str) -> StoredUnit | None:
        """The files of a committed checkpoint, by its manifest; None if none is committed there."""
        try:
            with self._reached():
                data, _ = self.place.get(self.place.below(f"{path}/{MANIFEST}"))
        except FileNotFoundError:
            return None
        try:
            manifest = Manifest.from_bytes(data, self.uri(path))
        except CorruptCheckpointError:
            return None
        home, at = "/".join(filter(None, (path, manifest.data))), manifest.created_at
        files = {
            file.path: StoredFile(key=key_of(home, file.path), size=file.size, modified_at=at, sha256=file.sha256)
            for file in manifest.files
        }
        shown = replace(manifest, data="").to_bytes() if manifest.data else data
        key = f"{path}/{MANIFEST}"
        files[MANIFEST] = StoredFile(key=key, size=len(shown), modified_at=at, content=shown)
        return StoredUnit(files=files)

    def send(self, path: str, descriptor: int, *, gap: Gap | None = None) -> StoredFile:
        """Send a file, in place of any other. It is not there for readers before its unit is committed.

        Raises OSError if the file becomes shorter meanwhile.
        """
        status = os.fstat(descriptor)
        size = status.st_size
        if gap is not None and not gap.start <= gap.end <= size:
            gap = None
        with self._reached():
            self._put(path, descriptor, 0, size if gap is None else gap.start)
            if gap is not None:
                self._put(f"{path}{_TAIL}", descriptor, gap.end, size)
        return StoredFile(key=path, size=size, modified_at=status.st_mtime, gap=gap)

    def size_at(self, path: str) -> int | None:
        """The size of a file; None if there is none."""
        with self._reached():
            found = self.place.head(self.place.below(path))
        return found["size"] if found is not None else None

    def read(self, file: StoredFile, begin: int, end: int) -> bytes:
        """Bytes of a file; FileNotFoundError if it was removed meanwhile."""
        end = min(end, file.size)
        if begin >= end:
            return b""
        if file.content is not None:
            return file.content[begin:end]
        with self._reached():
            if file.gap is None:
                return self.place.read(self.place.below(file.key), begin, end)
            data = b""
            if begin < file.gap.start:
                data += self.place.read(self.place.below(file.key), begin, min(end, file.gap.start))
            data += bytes(max(0, min(end, file.gap.end) - max(begin, file.gap.start)))
            if end > file.gap.end:
                tail = self.place.below(f"{file.key}{_TAIL}")
                data += self.place.read(tail, max(begin, file.gap.end) - file.gap.end, end - file.gap.end)
            return data

    def read_block(self, file: StoredFile, begin: int, end: int) -> bytes:
        """The same, for small pieces of a file that never changes: the blocks around them are kept for a while."""
        pieces = []
        for number in range(begin // _BLOCK, -(-min(end, file.size) // _BLOCK)):
            with self._lock:
                block = self._blocks.get((file.key, number))
            if block is None:
                block = self.read(file, number * _BLOCK, (number + 1) * _BLOCK)
                with self._lock:
                    self._blocks[file.key, number] = block
                    if len(self._blocks) > _MOST_BLOCKS:
                        self._blocks.popitem(last=False)
            pieces.append(block[max(0, begin - number * _BLOCK) : end - number * _BLOCK])
        return b"".join(pieces)

    def pieces(self, file: StoredFile) -> Iterator[bytes]:
        for begin in range(0, file.size, PIECE):
            yield self.read(file, begin, begin + PIECE)

    def directories(self, path: str) -> list[str]:
        with self._reached():
            return self.place.directories(self.place.below(path))

    def size_of(self, path: str) -> int:
        """The bytes of everything below a path."""
        with self._reached():
            return sum(each["size"] for each in self.place.listing(self.place.below(path)))

    def newest_in(self, path: str) -> float:
        with self._reached():
            listed = self.place.listing(self.place.below(path))
        return max((each["last_modified"].timestamp() for each in listed), default=0.0)

    def remove(self, path: str) -> None:
        """Remove a file, or everything below a path: first what commits it."""
        with self._reached():
            keys = [each["path"] for each in self.place.listing(self.place.below(path))]
            first = {key for key in keys if key.rpartition("/")[2] in (INDEX, MANIFEST)}
            for doomed in (first, set(keys) - first, {self.place.below(path)}):
                self.place.delete(doomed)
        # Last: a reader remembers an index that it finds.
        with self._lock:
            for known in [known for known in self._indexes if known == path or known.startswith(f"{path}/")]:
                del self._indexes[known]
            for block in [block for block in self._blocks if block[0].startswith(path)]:
                del self._blocks[block]

    def _delete(self, paths: list[str]) -> None:
        with self._reached():
            self.place.delete([self.place.below(path) for path in paths])

    def _put(self, path: str, descriptor: int, begin: int, end: int) -> None:
        self.place.put_pieces(self.place.below(path), _pieces_of(descriptor, begin, end), end - begin)

    def _remember(self, path: str, unit: StoredUnit) -> None:
        with self._lock:
            self._indexes[path] = unit
            self._indexes.move_to_end(path)
            if len(self._indexes) > _MOST_INDEXES:
                self._indexes.popitem(last=False)

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        since, why = self._away
        if time.monotonic() < since + AWAY_S:
            raise ObjectStoreAwayError(why)
        try:
            yield
        except ObjectStoreError as error:
            why = f"the object store {self.place.uri}, which has the files of ended jobs, cannot be used now: {error}"
            self._away = (time.monotonic(), why)
            raise ObjectStoreAwayError(why) from error


class StoredStreams:
    """The streams of an attempt on the object store, with the reading half of a `RunDirectory`."""

    def __init__(self, archive: Archive, path: str) -> None:
        self._archive = archive
        self._path = path

    def streams(self) -> Iterator[tuple[str, int]]:
        yield from sorted((name, file.size) for name, file in self._files().items() if is_stream(name))

    def status(self, stream: str) -> StreamStatus | None:
        file = self._files().get(stream)
        return StreamStatus(file.size, file.modified_at) if file is not None else None

    def read(self, stream: str, offset: int, limit: int = 1 << 20) -> bytes:
        file = self._files().get(stream)
        if file is None:
            return b""
        try:
            return self._archive.read_block(file, offset, offset + limit)
        except FileNotFoundError:
            return b""  # removed meanwhile

    def gap(self, stream: str) -> Gap | None:
        file = self._files().get(stream)
        return file.gap if file is not None else None

    def _files(self) -> Mapping[str, StoredFile]:
        unit = self._archive.unit(self._path)
        return unit.files if unit is not None else {}


def key_of(unit: str, name: str) -> str:
    """Where a file of a unit lies.

    >>> key_of("runs/job-1/1", "nodes/0/exit.json"), key_of("artifacts/job-1", "a\\nb")[:24]
    ('runs/job-1/1/nodes/0/exit.json', 'artifacts/job-1/.named/7')
    """
    if len(name.encode()) > _LONGEST_NAME or _CONTROL_CHARACTER.search(name):
        name = f"{_DIGESTS}/{hashlib.sha256(name.encode()).hexdigest()}"
    return f"{unit}/{name}"


def _pieces_of(descriptor: int, begin: int, end: int) -> Iterator[bytes]:
    while begin < end:
        data = os.pread(descriptor, min(PIECE, end - begin), begin)
        if not data:
            raise OSError("the file became shorter while it was sent")
        begin += len(data)
        yield data


def _document_of(unit: StoredUnit) -> bytes:
    files = {
        name: {
            "size": file.size,
            "modified_at": file.modified_at,
            **({"gap": file.gap.to_json()} if file.gap is not None else {}),
        }
        for name, file in unit.files.items()
    }
    return json.dumps({"version": _VERSION, "attempts": unit.attempts, "files": files}).encode()


def _unit_of(path: str, document: Mapping[str, object]) -> StoredUnit:
    listed = document["files"]
    assert isinstance(listed, dict)
    files = {
        name: StoredFile(
            key=key_of(path, name),
            size=int(file["size"]),
            modified_at=float(file["modified_at"]),
            gap=Gap.from_json(file["gap"]) if "gap" in file else None,
        )
        for name, file in listed.items()
    }
    return StoredUnit(files=files, attempts=int(str(document.get("attempts", 0))))
