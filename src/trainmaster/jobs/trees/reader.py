"""Reads a saved tree: every file once, in threads; each piece is hashed while it is in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.process import Process, SingleProcess
from trainmaster.jobs.trees import safetensors
from trainmaster.jobs.trees.arrays import Array, describe_array, library, module_for
from trainmaster.jobs.trees.buffers import Buffers
from trainmaster.jobs.trees.safetensors import Sink
from trainmaster.jobs.trees.structure import ANYTHING, Node, TreeError, WantedArray, match
from trainmaster.jobs.trees.writer import TREE, VERSION

if TYPE_CHECKING:
    from trainmaster.jobs.trees.torch_tensors import HostToDeviceCopier

THREADS = max(8, min(16, os.cpu_count() or 1))
"""Nothing trains meanwhile: every core may compute digests, and disks serve several requests at a time."""


def read(
    directory: Path,
    template: object = ANYTHING,
    *,
    partial: bool = False,
    digests: Mapping[str, str] | None = None,
    process: Process | None = None,
    buffers: Buffers | None = None,
) -> Any:
    """Read the tree that was saved in a directory into new arrays on the devices of the template.

    Raises TreeError, which names the paths, if the tree does not fit the template, and CorruptCheckpointError if a file
    differs from its digest or is missing.

    Args:
        template: a tree to be like. Only the type, shape, device and sharding of its arrays count.
        partial: restore only what the template has; where nothing that fits was saved, keep the template's value.
        digests: SHA-256 of the files by path, to compare with what is read.
        process: this process among those that read; sharded files are divided between them for the comparison.
        buffers: memory to use on the way to a GPU.
    """
    wanted, build = match(_document(directory, TREE, digests), template, describe_array, partial=partial)
    results: list[Any] = [None] * len(wanted)
    by_file: dict[str, list[int]] = {}
    others: dict[str, list[int]] = {}
    for index, leaf in enumerate(wanted):
        target = by_file if "file" in leaf.node else others
        target.setdefault(leaf.node.get("file", leaf.node["array"]), []).append(index)

    def read_file(path: str) -> None:
        chosen = [wanted[index] for index in by_file[path]]
        for index, value in zip(by_file[path], _read_file(directory, path, chosen, digests, pool), strict=True):
            results[index] = value

    pool = buffers if buffers is not None else Buffers()
    with ThreadPoolExecutor(max_workers=THREADS) as executor:
        list(executor.map(read_file, by_file))
    for kind, indices in others.items():
        chosen = [wanted[index] for index in indices]
        found = _read_library(kind, directory, chosen, digests, process if process is not None else SingleProcess())
        for index, value in zip(indices, found, strict=True):
            results[index] = value
    return build(results)


def read_small(directory: Path, stem: str, *, digests: Mapping[str, str] | None = None) -> Any:
    wanted, build = match(_document(directory, f"{stem}.json", digests), ANYTHING, describe_array, partial=False)
    name = f"{stem}{safetensors.SUFFIX}"
    return build(_read_file(directory, name, wanted, digests, Buffers()) if wanted else [])


def read_text(directory: Path, name: str, digests: Mapping[str, str] | None) -> str:
    try:
        data = (directory / name).read_bytes()
    except OSError as error:
        raise CorruptCheckpointError(f"{directory / name}: {error.strerror}") from error
    _compare(directory / name, hashlib.sha256(data).hexdigest(), digests, name)
    return data.decode()


def _document(directory: Path, name: str, digests: Mapping[str, str] | None) -> Node:
    text = read_text(directory, name, digests)
    try:
        found = json.loads(text)
        version = found["version"]
        document: Node = found["tree"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{directory / name}: {error}") from error
    if version != VERSION:
        raise TreeError(f"{directory / name}: of version {version}, which this version does not know")
    return document


def _read_file(
    directory: Path, name: str, wanted: Sequence[WantedArray], digests: Mapping[str, str] | None, buffers: Buffers
) -> list[Array]:
    path = directory / name
    if "/" in name or not name.endswith(safetensors.SUFFIX):
        raise CorruptCheckpointError(f"{directory / TREE}: {name!r} is no file of a checkpoint")
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: {error.strerror}") from error
    try:
        header = safetensors.read_header(descriptor, path)
        with _copier(wanted, buffers) as copier:
            arrays: dict[str, Array] = {}
            sinks: dict[str, Sink] = {}
            for leaf in wanted:
                key = leaf.node["name"]
                if key not in arrays:
                    arrays[key], sinks[key] = module_for(leaf.node["array"]).allocate(leaf.node, leaf.template, copier)
                    if arrays[key].nbytes != header.nbytes(key, path):
                        raise safetensors.FormatError(f"{path}: {key} has another size than was expected")
            found = safetensors.read_into(descriptor, header, sinks, hashing=digests is not None, where=path)
        _compare(path, found, digests, name)
    except safetensors.FormatError as error:
        raise CorruptCheckpointError(str(error)) from error
    finally:
        os.close(descriptor)
    return [
        module_for(leaf.node["array"]).finish(leaf.node, leaf.template, arrays[leaf.node["name"]]) for leaf in wanted
    ]


@contextlib.contextmanager
def _copier(wanted: Sequence[WantedArray], buffers: Buffers) -> Iterator[HostToDeviceCopier | None]:
    """Copies the arrays of one file to a GPU; None when none of them is wanted there."""
    if not any(module_for(leaf.node["array"]).on_gpu(leaf.template) for leaf in wanted):
        yield None
        return
    from trainmaster.jobs.trees.torch_tensors import HostToDeviceCopier

    buffer = buffers.acquire(HostToDeviceCopier.SIZE, pinned=True)
    copier = HostToDeviceCopier(buffer)
    try:
        yield copier
    finally:
        copier.arrive()
        buffers.release(buffer)


def _read_library(
    kind: str, directory: Path, wanted: Sequence[WantedArray], digests: Mapping[str, str] | None, process: Process
) -> Sequence[Array]:
    """Read arrays whose files a library reads itself. Their digests are compared first, each process some of them."""
    read_arrays: Callable[[Path, Sequence[WantedArray]], Sequence[Array]]
    with library(kind):
        if kind == "jax":
            from trainmaster.jobs.trees import jax_arrays

            read_arrays, below = jax_arrays.read, jax_arrays.DIRECTORY
        elif kind == "torch-sharded":
            from trainmaster.jobs.trees import torch_tensors

            read_arrays, below = torch_tensors.read_sharded, torch_tensors.SHARDED_DIRECTORY
        else:
            raise CorruptCheckpointError(f"{directory / TREE}: {kind!r} arrays are in no file of the checkpoint")
    if digests is not None:
        own = sorted(name for name in digests if name.startswith(f"{below}/"))[process.index :: process.count]
        with ThreadPoolExecutor(max_workers=THREADS) as executor:
            list(executor.map(lambda name: verify_file(directory, name, digests), own))
    return read_arrays(directory, wanted)


def verify_file(directory: Path, name: str, digests: Mapping[str, str]) -> None:
    try:
        with open(directory / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorruptCheckpointError(f"{directory / name}: {error.strerror}") from error
    _compare(directory / name, found, digests, name)


def _compare(path: Path, found: str, digests: Mapping[str, str] | None, name: str) -> None:
    if digests is None:
        return
    expected = digests.get(name)
    if expected != found:
        was = "nothing of that name was committed" if expected is None else f"{expected[:12]}… was committed"
        raise CorruptCheckpointError(f"{path}: digest {found[:12]}…, but {was}")
