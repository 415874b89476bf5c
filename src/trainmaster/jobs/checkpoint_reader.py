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
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainmaster.jobs import rng, trees
from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest, check_path
from trainmaster.jobs.objects import S3_SCHEME
from trainmaster.jobs.process import Process, ProcessError
from trainmaster.jobs.roots import ANOTHER_SAVE, Root
from trainmaster.jobs.trees.reader import read_text, verify_file
from trainmaster.protocol.launch import POINTERS

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


# Which committed checkpoint a path means: the newest save to it, or what `latest` or `best` points to.
#
# A committed checkpoint never changes. A second save to a path lies beside the first; see `commit_beside`.

LATEST, BEST = POINTERS
"""Pointers in the home of a job."""

_ANOTHER = re.compile(rf"(?P<name>.+){ANOTHER_SAVE}\d+(-\d+)?")


def find(root: Root, path: str) -> str:
    """Where the checkpoint that a path means lies.

    Args:
        root: where checkpoints lie.
        path: the path of a save, or of a pointer in a job's home.

    Raises:
        FileNotFoundError: nothing is committed there.
        CorruptCheckpointError: a manifest cannot be read, so that nobody can tell which save is the newest.
    """
    home, _, name = path.rpartition("/")
    if name in POINTERS and (place := pointed(root, home, name)) is not None:
        return place
    if name != LATEST and (place := newest(root, path)) is not None:
        return place
    if theseus_directory(root, path) is not None:
        return path
    if name in POINTERS:
        raise FileNotFoundError(f"{home} has no {name} checkpoint")
    raise FileNotFoundError(f"{root.locate(path)}: no checkpoint is committed there")


def newest(root: Root, path: str) -> str | None:
    """Where the newest save to a path lies; None when nothing is committed there.

    Raises:
        CorruptCheckpointError: a manifest cannot be read.
    """
    home, _, name = path.rpartition("/")
    saves: list[tuple[int, float, str]] = []
    for each in root.names(home):
        another = _ANOTHER.fullmatch(each)
        if each != name and not (another and another["name"] == name):
            continue
        place = f"{home}/{each}".lstrip("/")
        manifest = root.manifest(place)
        if manifest is None:
            continue
        if each == name or (manifest.saved_as or name) == name:
            # Somebody may ask for a later save by the name under which it lies: it is no save to that path.
            own = (manifest.saved_as or name) == name
            saves.append((manifest.generation if own else 0, manifest.created_at, place))
    return max(saves)[2] if saves else None


def pointed(root: Root, home: str, pointer: str) -> str | None:
    """Where the checkpoint lies that a pointer of a job names; in place of a latest that is gone, the newest."""
    suffix = root.pointer(home, pointer)
    if suffix is None:
        return None
    place = f"{home}/{check_path(suffix)}"
    try:
        if root.manifest(place) is not None:
            return place
    except CorruptCheckpointError:
        return place  # Whoever reads it finds out.
    left = root.committed(home)
    return left[-1] if left and pointer == LATEST else None


def path_of(root: Root, place: str) -> str:
    """The path that leads to a checkpoint: the one that it was saved to, unless a later save took that over."""
    path = _saved_to(root, place)
    try:
        return path if newest(root, path) == place else place
    except CorruptCheckpointError:
        return place


def paths(root: Root, home: str) -> list[str]:
    """The paths below a job's home that lead to a checkpoint, in the order of their newest saves."""
    found: dict[str, None] = {}
    for place in root.committed(home):
        path = _saved_to(root, place)
        found.pop(path, None)
        found[path] = None
    return list(found)


def _saved_to(root: Root, place: str) -> str:
    home, _, name = place.rpartition("/")
    if (another := _ANOTHER.fullmatch(name)) is None:
        return place
    try:
        manifest: Manifest | None = root.manifest(place)
    except CorruptCheckpointError:
        return place
    saved_as = (manifest.saved_as if manifest is not None else "") or another["name"]
    return f"{home}/{saved_as}".lstrip("/")
