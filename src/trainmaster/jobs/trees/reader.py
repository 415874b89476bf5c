"""Reads a saved tree: every file once, in threads, each piece hashed while it is in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.process import Process, SingleProcess
from trainmaster.jobs.trees import kinds, safetensors
from trainmaster.jobs.trees.buffers import Buffers
from trainmaster.jobs.trees.safetensors import Sink
from trainmaster.jobs.trees.structure import ANYTHING, TreeError, Wanted, match
from trainmaster.jobs.trees.writer import TREE, VERSION

THREADS = max(8, min(16, os.cpu_count() or 1))
"""Nothing trains meanwhile: every core may compute digests, and a disk likes several requests."""


def read(
    directory: Path,
    template: Any = ANYTHING,
    *,
    partial: bool = False,
    digests: Mapping[str, str] | None = None,
    process: Process | None = None,
    buffers: Buffers | None = None,
) -> Any:
    """The tree that was saved below a directory, in new arrays on the devices of the template.

    Args:
        directory: where it was saved.
        template: a tree to be like. Only the type, shape, device and sharding of its arrays count.
        partial: restore only what the template has; where nothing that fits was saved, keep the template's value.
        digests: of the files, by path; what is read is compared with them.
        process: this process among those that read; sharded files are divided between them for the comparison.
        buffers: memory to use on the way to a GPU.

    Raises:
        TreeError: the tree does not fit the template; names the paths.
        CorruptCheckpointError: a file differs from its digest, or is missing.
    """
    document = _document(directory, TREE, digests)
    wanted, build = match(document, template, kinds.describe, partial=partial)
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
    """What `write_small` saved; raises as `read` does."""
    wanted, build = match(_document(directory, f"{stem}.json", digests), ANYTHING, kinds.describe, partial=False)
    name = f"{stem}{safetensors.SUFFIX}"
    return build(_read_file(directory, name, wanted, digests, Buffers()) if wanted else [])


def read_text(directory: Path, name: str, digests: Mapping[str, str] | None) -> str:
    """A small file.

    Raises:
        CorruptCheckpointError: it is missing, or differs from its digest.
    """
    try:
        data = (directory / name).read_bytes()
    except OSError as error:
        raise CorruptCheckpointError(f"{directory / name}: {error.strerror}") from error
    _compare(directory / name, hashlib.sha256(data).hexdigest(), digests, name)
    return data.decode()


def _document(directory: Path, name: str, digests: Mapping[str, str] | None) -> Mapping[str, Any]:
    text = read_text(directory, name, digests)
    try:
        found = json.loads(text)
        version, document = found["version"], found["tree"]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{directory / name}: {error}") from error
    if version != VERSION:
        raise TreeError(f"{directory / name}: of version {version}, which this version does not know")
    return document  # type: ignore[no-any-return]


def _read_file(
    directory: Path, name: str, wanted: Sequence[Wanted], digests: Mapping[str, str] | None, buffers: Buffers
) -> list[Any]:
    path = directory / name
    if "/" in name or not name.endswith(safetensors.SUFFIX):
        raise CorruptCheckpointError(f"{directory / TREE}: {name!r} is no file of a checkpoint")
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: {error.strerror}") from error
    try:
        header = safetensors.read_header(descriptor, path)
        with _ferry(wanted, buffers) as ferry:
            arrays: dict[str, Any] = {}
            sinks: dict[str, Sink] = {}
            for leaf in wanted:
                key = leaf.node["name"]
                if key not in arrays:
                    arrays[key], sinks[key] = kinds.adapter(leaf.node["array"]).allocate(
                        leaf.node, leaf.template, ferry
                    )
                    if arrays[key].nbytes != header.nbytes(key, path):
                        raise safetensors.FormatError(f"{path}: {key} has another size than was expected")
            found = safetensors.read_into(descriptor, header, sinks, hashing=digests is not None, where=path)
        _compare(path, found, digests, name)
    except safetensors.FormatError as error:
        raise CorruptCheckpointError(str(error)) from error
    finally:
        os.close(descriptor)
    return [
        kinds.adapter(leaf.node["array"]).finish(leaf.node, leaf.template, arrays[leaf.node["name"]]) for leaf in wanted
    ]


@contextlib.contextmanager
def _ferry(wanted: Sequence[Wanted], buffers: Buffers) -> Iterator[Any]:
    """What takes arrays of one file to a GPU; None when none is wanted there."""
    if not any(kinds.adapter(leaf.node["array"]).on_gpu(leaf.template) for leaf in wanted):
        yield None
        return
    torch_tensors = kinds.adapter("torch")
    buffer = buffers.acquire(torch_tensors.Ferry.SIZE, pinned=True)
    ferry = torch_tensors.Ferry(buffer)
    try:
        yield ferry
    finally:
        ferry.arrive()
        buffers.release(buffer)


def _read_library(
    kind: str, directory: Path, wanted: Sequence[Wanted], digests: Mapping[str, str] | None, process: Process
) -> list[Any]:
    """Arrays whose files a library reads itself: their digests are compared first, each process some of them."""
    if kind == "jax":
        module, below = kinds.adapter("jax"), kinds.adapter("jax").DIRECTORY
    else:
        from trainmaster.jobs.trees import torch_sharded

        module, below = torch_sharded, torch_sharded.DIRECTORY
    if digests is not None:
        names = sorted(name for name in digests if name.startswith(f"{below}/"))
        with ThreadPoolExecutor(max_workers=THREADS) as executor:
            list(
                executor.map(lambda name: verify_file(directory, name, digests), names[process.index :: process.count])
            )
    return module.read(directory, wanted)  # type: ignore[no-any-return]


def verify_file(directory: Path, name: str, digests: Mapping[str, str]) -> None:
    """Compare one file with its digest.

    Raises:
        CorruptCheckpointError: it is missing, or differs.
    """
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
