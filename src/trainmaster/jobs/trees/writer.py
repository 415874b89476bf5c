"""Saves a tree: copies its arrays first, then writes the copies in threads while training continues."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trainmaster.jobs.process import Process, SingleProcess
from trainmaster.jobs.trees import safetensors
from trainmaster.jobs.trees.arrays import Array, ArrayModule, describe_array, module_for
from trainmaster.jobs.trees.buffers import Buffer, Buffers
from trainmaster.jobs.trees.safetensors import TensorEntry
from trainmaster.jobs.trees.structure import Leaf, Node, TreeError, describe

T = TypeVar("T")

TREE = "tree.json"
ARRAYS = "arrays-"
VERSION = 1
SHARD_BYTES = 256 << 20
"""The size of a file, unless one array is larger: threads write, hash and read files in parallel."""
THREADS = 4
"""Enough for the disks of one machine; more would take cores from training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPiece:
    """An array, or this process's part of one, that goes into a file."""

    entry: TensorEntry
    value: Array
    module: ArrayModule
    offsets: Sequence[int] = ()
    """Where the part of a sharded array begins in the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFile:
    path: str
    pieces: Sequence[ArrayPiece]
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(piece.entry.nbytes for piece in self.pieces)

    @property
    def on_gpu(self) -> list[Array]:
        return [piece.value for piece in self.pieces if piece.module.on_gpu(piece.value)]


class Writing:
    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="checkpoint")
        self.files: list[Future[tuple[str, str]]] = []
        self.others: Callable[[], None] | None = None
        """Waits for the files that Orbax writes."""

    def result(self) -> dict[str, str]:
        """Wait until every file is on disk; returns the SHA-256, by path, of those that were hashed."""
        try:
            digests = dict(file.result() for file in self.files)
        except BaseException:
            self.give_up()
            raise
        self._end()
        return digests

    def give_up(self) -> None:
        """Stop writing, and wait for the threads: only then may the directory be removed."""
        with contextlib.suppress(Exception):
            self._end()

    def _end(self) -> None:
        self.executor.shutdown(cancel_futures=True)
        if self.others is not None:
            self.others()


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlan:
    """How a tree will be saved: which array goes to which file of which process."""

    document: Node
    leaves: Sequence[Leaf]
    files: Sequence[ArrayFile]
    first: bool
    """Whether this is process 0, which also writes tree.json."""

    @property
    def nbytes(self) -> int:
        """Of all arrays together, on all processes."""
        return sum(_nbytes(leaf) for leaf in self.leaves)

    @property
    def framework(self) -> str:
        """The library that most bytes belong to; empty when there are no arrays."""
        sizes: Counter[str] = Counter()
        for leaf in self.leaves:
            sizes[leaf.described.kind.partition("-")[0]] += _nbytes(leaf)
        return max(sizes, key=lambda library: sizes[library], default="")

    @property
    def needs_shared_directory(self) -> bool:
        """Whether all processes must write into the same directory, as Orbax does with sharded arrays of JAX."""
        return any(leaf.described.kind == "jax" for leaf in self.leaves)

    def start(self, directory: Path, buffers: Buffers | None = None) -> Writing:
        """Start to save into an existing directory; when this returns, the tree may be changed again."""
        buffers = buffers if buffers is not None else Buffers()
        self.allocate(buffers)
        writing = Writing()
        try:
            writing.others = _start_jax([leaf for leaf in self.leaves if leaf.described.kind == "jax"], directory)
            _stage(self.files, directory, buffers, writing)
            if self.first:
                writing.files.append(writing.executor.submit(write_text, directory, TREE, _text(self.document)))
        except BaseException:
            writing.give_up()
            raise
        return writing

    def allocate(self, buffers: Buffers) -> None:
        """Allocate the memory that `start` will need, as far as the limit allows."""
        buffers.reserve((file.nbytes, bool(file.on_gpu)) for file in self.files)


def plan(tree: object, *, process: Process | None = None) -> TreePlan:
    """Plan how to save a tree: process 0 writes whole arrays and plain values, all their parts of sharded ones."""
    process = process if process is not None else SingleProcess()
    document, leaves = describe(tree, describe_array)
    return TreePlan(document=document, leaves=leaves, files=_files(leaves, process), first=process.index == 0)


def write(tree: object, directory: Path, *, process: Process | None = None) -> dict[str, str]:
    return plan(tree, process=process).start(directory).result()


def write_small(tree: object, directory: Path, stem: str) -> dict[str, str]:
    """Save a small tree of whole arrays as `<stem>.json` and one file of arrays; returns the digests of both."""
    document, leaves = describe(tree, describe_array)
    pieces = _aligned(_whole(leaf) for leaf in leaves)
    file = ArrayFile(path=f"{stem}{safetensors.SUFFIX}", pieces=pieces)
    for leaf in leaves:
        leaf.node["file"] = file.path
    data = memoryview(bytearray(file.nbytes))
    _fill(file, data)
    digest = safetensors.write(directory / file.path, [piece.entry for piece in pieces], data)
    return dict([(file.path, digest), write_text(directory, f"{stem}.json", _text(document))])


def holds(name: str) -> bool:
    return name == TREE or name.startswith((ARRAYS, "sharded/", "orbax/"))


def write_text(directory: Path, name: str, text: str) -> tuple[str, str]:
    """Write a new file and flush it; returns its name and SHA-256."""
    data = text.encode()
    with open(directory / name, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return name, hashlib.sha256(data).hexdigest()


def _stage(files: Iterable[ArrayFile], directory: Path, buffers: Buffers, writing: Writing) -> None:
    """Copy the arrays of every file, and start to write it."""
    copies: list[Any] = []
    for file in files:
        on_gpu = file.on_gpu
        buffer = buffers.acquire(file.nbytes, pinned=bool(on_gpu))
        try:
            _fill(file, buffer.view)
            begun = _marks(on_gpu) if on_gpu else []
            written = writing.executor.submit(_write, file, directory, buffer, begun)
        except BaseException:
            buffers.release(buffer)
            raise
        # Also called for a file that is never written because another one failed.
        written.add_done_callback(lambda _, buffer=buffer: buffers.release(buffer))  # type: ignore[misc]
        writing.files.append(written)
        copies += begun
    for copy in copies:
        copy.synchronize()


def _marks(tensors: list[Array]) -> list[Any]:
    from trainmaster.jobs.trees import torch_tensors

    return list(torch_tensors.mark(tensors))


def _fill(file: ArrayFile, view: memoryview) -> None:
    begin = 0
    for piece in file.pieces:
        end = begin + piece.entry.nbytes
        piece.module.fill(piece.value, view[begin:end])
        begin = end


def _write(file: ArrayFile, directory: Path, buffer: Buffer, copies: Sequence[Any]) -> tuple[str, str]:
    for copy in copies:
        copy.synchronize()
    path = directory / file.path
    if path.parent != directory:
        path.parent.mkdir(exist_ok=True)
    entries = [piece.entry for piece in file.pieces]
    return file.path, safetensors.write(path, entries, buffer.view[: file.nbytes], metadata=file.metadata)


def _files(leaves: Iterable[Leaf], process: Process) -> list[ArrayFile]:
    """The files that this process writes. Every process notes in its nodes which file a whole array is in."""
    whole: list[tuple[Leaf, ArrayPiece]] = []
    parts: list[ArrayPiece] = []
    for leaf in leaves:
        try:
            if leaf.described.kind == "torch-sharded":
                parts += _sharded_part(leaf)
            elif leaf.described.kind != "jax":
                whole.append((leaf, _whole(leaf)))
        except TypeError as error:
            raise TreeError(f"{leaf.name}: a checkpoint cannot hold {error}") from error
    files = []
    for number, chunk in enumerate(_chunks(whole, lambda item: item[1].entry.nbytes)):
        path = f"{ARRAYS}{number:05d}{safetensors.SUFFIX}"
        for leaf, _ in chunk:
            leaf.node["file"] = path
        if process.index == 0:
            files.append(ArrayFile(path=path, pieces=_aligned(piece for _, piece in chunk)))
    if parts:
        from trainmaster.jobs.trees import torch_tensors

        for number, pieces in enumerate(_chunks(parts, lambda piece: piece.entry.nbytes)):
            path = f"{torch_tensors.SHARDED_DIRECTORY}/rank-{process.index:05d}-{number:05d}{safetensors.SUFFIX}"
            metadata = torch_tensors.sharded_metadata({piece.entry.name: piece.offsets for piece in pieces})
            files.append(ArrayFile(path=path, pieces=_aligned(pieces), metadata=metadata))
    return files


def _whole(leaf: Leaf) -> ArrayPiece:
    module = module_for(leaf.described.kind)
    return ArrayPiece(entry=module.entry(leaf.name, leaf.value), value=leaf.value, module=module)


def _sharded_part(leaf: Leaf) -> Iterator[ArrayPiece]:
    from trainmaster.jobs.trees import torch_tensors

    if (part := torch_tensors.sharded_part(leaf.name, leaf.value)) is not None:
        entry, local, offsets = part
        yield ArrayPiece(entry=entry, value=local, module=torch_tensors, offsets=offsets)


def _nbytes(leaf: Leaf) -> int:
    return int(getattr(leaf.value, "nbytes", 0))


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps({"version": VERSION, "tree": document}, separators=(",", ":"))


def _chunks(items: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    chunk: list[T] = []
    size = 0
    for item in items:
        if chunk and size + nbytes(item) > SHARD_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += nbytes(item)
    if chunk:
        yield chunk


def _aligned(pieces: Iterable[ArrayPiece]) -> list[ArrayPiece]:
    """Pieces with the largest elements first: the format has no gaps, so every element is aligned then."""
    sized = ((piece.module.itemsize(piece.value), piece) for piece in pieces)
    return [piece for _, piece in sorted(sized, key=lambda item: item[0] & -item[0], reverse=True)]


def _start_jax(leaves: Sequence[Leaf], directory: Path) -> Callable[[], None] | None:
    if not leaves:
        return None
    from trainmaster.jobs.trees import jax_arrays

    return jax_arrays.start({leaf.name: leaf.value for leaf in leaves}, directory)
