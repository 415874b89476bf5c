"""Saves a tree: copies its arrays away first, then writes them in threads while training goes on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from trainmaster.jobs.process import Process, SingleProcess
from trainmaster.jobs.trees import kinds, safetensors
from trainmaster.jobs.trees.buffers import Buffer, Buffers
from trainmaster.jobs.trees.safetensors import Entry
from trainmaster.jobs.trees.structure import Leaf, TreeError, describe

TREE = "tree.json"
ARRAYS = "arrays-"
VERSION = 1
SHARD_BYTES = 256 << 20
"""A file holds no more than this, unless one array is larger: threads write, hash and read files side by side."""
THREADS = 4
"""Enough for the disks of one machine; more would take cores from training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """An array, or this process's part of one, that goes into a file."""

    entry: Entry
    value: Any
    adapter: ModuleType
    metadata: Mapping[str, Any] | None = None
    """What a sharded one's file says of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file."""

    path: str
    pieces: Sequence[Piece]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of all arrays together."""
        return sum(piece.entry.nbytes for piece in self.pieces)

    @property
    def on_gpu(self) -> list[Any]:
        """Those that lie on a GPU."""
        return [piece.value for piece in self.pieces if piece.adapter.on_gpu(piece.value)]


class Writing:
    """A tree on its way to the disk."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="checkpoint")
        self.files: list[Future[tuple[str, str]]] = []
        self.others: Callable[[], None] | None = None
        """Waits for the files that a library writes by itself."""

    def result(self) -> dict[str, str]:
        """Wait until every file is on disk; the SHA-256 of those that were hashed on the way, by path.

        Raises:
            OSError: a file could not be written.
        """
        try:
            digests = dict(file.result() for file in self.files)
        except BaseException:
            self.give_up()
            raise
        self._end()
        return digests

    def give_up(self) -> None:
        """Return when nobody writes any more: only then may the directory be removed."""
        with contextlib.suppress(Exception):
            self._end()

    def _end(self) -> None:
        self.executor.shutdown(cancel_futures=True)
        if self.others is not None:
            self.others()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a tree will be saved: which array goes to which file of which process."""

    document: Mapping[str, Any]
    leaves: Sequence[Leaf]
    shards: Sequence[Shard]
    first: bool
    """Whether this is process 0, which writes what belongs to nobody in particular."""

    @property
    def nbytes(self) -> int:
        """Of all arrays together, on all processes."""
        return sum(_nbytes(leaf) for leaf in self.leaves)

    @property
    def framework(self) -> str:
        """The library that most bytes belong to; empty when there are no arrays."""
        sizes: dict[str, int] = {}
        for leaf in self.leaves:
            library = leaf.described.kind.partition("-")[0]
            sizes[library] = sizes.get(library, 0) + _nbytes(leaf)
        return max(sizes, key=lambda library: sizes[library], default="")

    def start(self, directory: Path, buffers: Buffers | None = None) -> Writing:
        """Begin to save below a directory that exists; when this returns, the tree may be changed again."""
        buffers = buffers if buffers is not None else Buffers()
        self.allocate(buffers)
        writing = Writing()
        try:
            writing.others = _start_jax([leaf for leaf in self.leaves if leaf.described.kind == "jax"], directory)
            _stage(self.shards, directory, buffers, writing)
            if self.first:
                writing.files.append(writing.executor.submit(write_text, directory, TREE, _text(self.document)))
        except BaseException:
            writing.give_up()
            raise
        return writing

    def allocate(self, buffers: Buffers) -> None:
        """Get the memory that `start` will need, as far as the limit allows."""
        buffers.reserve((shard.nbytes, bool(shard.on_gpu)) for shard in self.shards)


def plan(tree: Any, *, process: Process | None = None) -> Plan:
    """Look at a tree that is to be saved.

    Whole arrays and plain values are those of process 0; of sharded arrays every process writes its part.

    Raises:
        TreeError: names the path of what cannot be saved.
    """
    process = process if process is not None else SingleProcess()
    document, leaves = describe(tree, kinds.describe)
    shards = _shards(leaves, process)
    return Plan(document=document, leaves=leaves, shards=shards, first=process.index == 0)


def write(tree: Any, directory: Path, *, process: Process | None = None) -> dict[str, str]:
    """Save a tree below a directory that exists, and wait for it; digests as `Writing.result` has them."""
    return plan(tree, process=process).start(directory).result()


def write_small(tree: Any, directory: Path, stem: str) -> dict[str, str]:
    """Save a small tree of whole arrays as `<stem>.json` and one file of arrays beside it; the digests of both."""
    document, leaves = describe(tree, kinds.describe)
    pieces = _aligned(_whole(leaf) for leaf in leaves)
    shard = Shard(path=f"{stem}{safetensors.SUFFIX}", pieces=pieces)
    for leaf in leaves:
        leaf.node["file"] = shard.path
    data = memoryview(bytearray(shard.nbytes))
    _fill(shard, data)
    digest = safetensors.write(directory / shard.path, [piece.entry for piece in pieces], data)
    return dict([(shard.path, digest), write_text(directory, f"{stem}.json", _text(document))])


def holds(name: str) -> bool:
    """Whether a file of a checkpoint is part of its tree, by its path."""
    return name == TREE or name.startswith((ARRAYS, "sharded/", "orbax/"))


def write_text(directory: Path, name: str, text: str) -> tuple[str, str]:
    """Write a new file and flush it; its name and SHA-256."""
    data = text.encode()
    with open(directory / name, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return name, hashlib.sha256(data).hexdigest()


def _stage(shards: Iterable[Shard], directory: Path, buffers: Buffers, writing: Writing) -> None:
    """Copy every shard away, and have it written meanwhile."""
    copies: list[Any] = []
    for shard in shards:
        on_gpu = shard.on_gpu
        buffer = buffers.acquire(shard.nbytes, pinned=bool(on_gpu))
        try:
            _fill(shard, buffer.view)
            begun = kinds.adapter("torch").mark(on_gpu) if on_gpu else []
            file = writing.executor.submit(_write, shard, directory, buffer, begun)
        except BaseException:
            buffers.release(buffer)
            raise
        # Also of a file that is never begun, since another one failed.
        file.add_done_callback(functools.partial(_release, buffers, buffer))
        writing.files.append(file)
        copies += begun
    for copy in copies:
        copy.synchronize()


def _release(buffers: Buffers, buffer: Buffer, _file: Future[Any]) -> None:
    buffers.release(buffer)


def _fill(shard: Shard, view: memoryview) -> None:
    begin = 0
    for piece in shard.pieces:
        end = begin + piece.entry.nbytes
        piece.adapter.fill(piece.value, view[begin:end])
        begin = end


def _write(shard: Shard, directory: Path, buffer: Buffer, copies: Sequence[Any]) -> tuple[str, str]:
    for copy in copies:
        copy.synchronize()
    path = directory / shard.path
    if path.parent != directory:
        path.parent.mkdir(exist_ok=True)
    entries = [piece.entry for piece in shard.pieces]
    return shard.path, safetensors.write(path, entries, buffer.view[: shard.nbytes], metadata=shard.metadata)


def _shards(leaves: Iterable[Leaf], process: Process) -> list[Shard]:
    """The files that this process writes. Which file a whole array is in is noted in its node, on every process."""
    whole: list[tuple[Leaf, Piece]] = []
    parts: list[Piece] = []
    for leaf in leaves:
        kind = leaf.described.kind
        if kind == "jax":
            continue
        try:
            if kind == "torch-sharded":
                from trainmaster.jobs.trees import torch_sharded

                parts += torch_sharded.parts(leaf.name, leaf.value)
            else:
                whole.append((leaf, _whole(leaf)))
        except TypeError as error:
            raise TreeError(f"{leaf.name}: a checkpoint cannot hold {error}") from error
    shards = []
    for number, chunk in enumerate(_chunks(whole, lambda item: item[1].entry.nbytes)):
        path = f"{ARRAYS}{number:05d}{safetensors.SUFFIX}"
        for leaf, _ in chunk:
            leaf.node["file"] = path
        if process.index == 0:
            shards.append(Shard(path=path, pieces=_aligned(piece for _, piece in chunk)))
    if parts:
        from trainmaster.jobs.trees import torch_sharded

        for number, chunk in enumerate(_chunks(parts, lambda piece: piece.entry.nbytes)):
            path = f"{torch_sharded.DIRECTORY}/rank-{process.index:05d}-{number:05d}{safetensors.SUFFIX}"
            shards.append(Shard(path=path, pieces=_aligned(chunk), metadata=torch_sharded.metadata(chunk)))
    return shards


def _whole(leaf: Leaf) -> Piece:
    adapter = kinds.adapter(leaf.described.kind)
    return Piece(entry=adapter.entry(leaf.name, leaf.value), value=leaf.value, adapter=adapter)


def _nbytes(leaf: Leaf) -> int:
    return int(getattr(leaf.value, "nbytes", 0))


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps({"version": VERSION, "tree": document}, separators=(",", ":"))


def _chunks(items: Iterable[Any], nbytes: Callable[[Any], int]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    size = 0
    for item in items:
        if chunk and size + nbytes(item) > SHARD_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += nbytes(item)
    if chunk:
        yield chunk


def _aligned(pieces: Iterable[Piece]) -> list[Piece]:
    """Those with the largest elements first: the format has no gaps, and so every element lies as it should."""

    def alignment(piece: Piece) -> int:
        size = int(piece.adapter.itemsize(piece.value))
        return size & -size

    return sorted(pieces, key=alignment, reverse=True)


def _start_jax(leaves: Sequence[Leaf], directory: Path) -> Callable[[], None] | None:
    if not leaves:
        return None
    return kinds.adapter("jax").start({leaf.name: leaf.value for leaf in leaves}, directory)  # type: ignore[no-any-return]
