"""Reads checkpoints: tree, metadata and the state of random-number generators, all compared with the manifest.

It also reads checkpoints of theseus: an Orbax tree, with metadata, identity and configuration as files beside it.

    PATH/checkpoint/    the tree; Orbax renames it to this name when it is complete
    PATH/config.json    the metadata
    PATH/job.json       name, project, group and the tracker's id
    PATH/config.yaml    the whole configuration

Their `rng.npy` is a pickle and is not read: random-number generators are left as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainmaster.jobs import rng, trees
from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest
from trainmaster.jobs.objects import S3_SCHEME
from trainmaster.jobs.process import Process, ProcessError
from trainmaster.jobs.roots import Root
from trainmaster.jobs.trees.reader import read_text, verify_file

METADATA = "metadata.json"


class InexactResumeError(RuntimeError):
    """The checkpoint lacks something without which training would take another course."""


class Loaded(NamedTuple):
    """A checkpoint that was read."""

    tree: Any
    metadata: dict[str, Any]
    manifest: Manifest


def load(
    root: Root,
    rel_path: str,
    template: Any,
    *,
    process: Process,
    buffers: trees.Buffers,
    partial: bool,
    verify: bool,
    exact: bool,
    needs: Sequence[str],
    elastic: bool = False,
) -> Loaded:
    """One checkpoint, on all ranks or on none; see `Saver.load`."""
    problem: Exception | None = None
    loaded: Loaded | None = None
    state: rng.State | None = None
    try:
        manifest = _manifest(root, rel_path)
        with root.fetch(rel_path, verify=False) as directory:
            digests = {file.path: file.sha256 for file in manifest.files} if verify else None
            metadata = json.loads(read_text(directory, METADATA, digests))
            if exact and not (elastic and manifest.world_size != process.count):
                _require_same_ranks(rel_path, manifest, process)
                state = _state(directory, rel_path, manifest, process, digests)
            tree = trees.read(directory, template, partial=partial, digests=digests, process=process, buffers=buffers)
            _require(rel_path, needs, tree, metadata)
            if digests is not None:
                _verify_rest(directory, digests, process)
        loaded = Loaded(tree, metadata, manifest)
    except Exception as error:
        problem = error
    _agree(rel_path, problem, process)
    assert loaded is not None
    if state is not None:
        rng.restore(state)
    return loaded


def load_latest_good(
    root: Root,
    home: str,
    template: Any,
    *,
    start: str | None,
    note: Callable[[str], None],
    process: Process,
    **options: Any,
) -> tuple[str, Loaded]:
    """The newest checkpoint that is not corrupt; see `Saver.load_latest_good`."""
    # Listed once, by one process: what others see may be older.
    candidates: list[str] = process.broadcast(root.committed(home)[::-1], "checkpoints to load")
    if start is not None:
        if start not in candidates:
            raise FileNotFoundError(f"{root.locate(start)}: no checkpoint is committed there")
        candidates = candidates[candidates.index(start) :]
    if not candidates:
        raise FileNotFoundError(f"{root.uri}/{home}: no checkpoint is committed there")
    first: CorruptCheckpointError | None = None
    for rel_path in candidates:
        try:
            return rel_path, load(root, rel_path, template, process=process, verify=True, **options)
        except CorruptCheckpointError as error:
            first = first if first is not None else error
            if process.index == 0:
                note(f"the checkpoint {rel_path} is corrupt, the one before it is used: {error}")
    assert first is not None
    raise first


def load_rng(root: Root, rel_path: str, process: Process) -> rng.State:
    """The state of this rank's generators; see `Saver.load_rng`."""
    manifest = _manifest(root, rel_path)
    _require_same_ranks(rel_path, manifest, process)
    with root.fetch(rel_path, verify=False) as directory:
        return _state(directory, rel_path, manifest, process, {file.path: file.sha256 for file in manifest.files})


def _manifest(root: Root, rel_path: str) -> Manifest:
    manifest = root.manifest(rel_path)
    if manifest is None:
        raise FileNotFoundError(f"{root.locate(rel_path)}: no checkpoint is committed there")
    return manifest


def _require_same_ranks(rel_path: str, manifest: Manifest, process: Process) -> None:
    if manifest.world_size != process.count:
        raise InexactResumeError(
            f"{rel_path} was saved by {manifest.world_size} processes and cannot be resumed exactly by "
            f"{process.count}: each has random-number generators of its own"
        )


def _state(
    directory: Path, rel_path: str, manifest: Manifest, process: Process, digests: Mapping[str, str] | None
) -> rng.State:
    if all(file.path != rng.file_of(process.index) for file in manifest.files):
        raise InexactResumeError(f"{rel_path} lacks the state of rank {process.index}'s random-number generators")
    return rng.read(directory, process.index, digests=digests)


def _require(rel_path: str, needs: Sequence[str], tree: Any, metadata: Mapping[str, Any]) -> None:
    there = {*(tree if isinstance(tree, Mapping) else ()), *metadata}
    if missing := [name for name in needs if name not in there]:
        raise InexactResumeError(f"{rel_path} lacks {', '.join(missing)}: training cannot go on exactly from there")


def _verify_rest(directory: Path, digests: Mapping[str, str], process: Process) -> None:
    """What belongs to no tree, such as configurations: small, and divided between the ranks."""
    rest = sorted(name for name in digests if not trees.holds(name))
    for name in rest[process.index :: process.count]:
        verify_file(directory, name, digests)


def _agree(rel_path: str, problem: Exception | None, process: Process) -> None:
    """Raise on every rank when it went wrong on one: no rank goes on from a checkpoint that another refuses."""
    if not process.any(problem is not None):
        return
    corrupt = process.any(isinstance(problem, CorruptCheckpointError))
    if corrupt and not isinstance(problem, CorruptCheckpointError):
        raise CorruptCheckpointError(f"{rel_path} is corrupt, as another rank found")
    if problem is None:
        raise ProcessError(f"another rank could not load {rel_path}; its log says why")
    raise problem


_THESEUS_TREE = "checkpoint"
THESEUS_METADATA = "config.json"


def theseus_directory(root: Root, path: str) -> Path | None:
    """The directory of a complete checkpoint of theseus; None where there is none."""
    if root.uri.startswith(S3_SCHEME):
        return None
    directory = Path(root.locate(path))
    complete = (directory / _THESEUS_TREE).is_dir() and (directory / THESEUS_METADATA).is_file()
    return directory if complete else None


def theseus_metadata(directory: Path) -> dict[str, Any]:
    """What the caller gave beside the tree."""
    found: dict[str, Any] = json.loads((directory / THESEUS_METADATA).read_text())
    return found


def theseus_tree(directory: Path, template: Any, *, partial: bool) -> Any:
    """The tree, in arrays like those of the template, on its devices. Collective where there are several processes.

    Raises:
        ValueError: the tree does not fit the template.
    """
    from trainmaster.jobs.trees import jax_arrays

    return jax_arrays.read_tree(directory / _THESEUS_TREE, template, partial=partial)
