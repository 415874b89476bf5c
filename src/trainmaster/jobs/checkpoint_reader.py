"""Finds checkpoints by path, those of theseus too, and loads them; all that is read is compared with the manifest."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainmaster.jobs import rng, trees
from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest, check_path, required
from trainmaster.jobs.process import Process, ProcessError
from trainmaster.jobs.report import Reporter
from trainmaster.jobs.roots import ANOTHER_SAVE, Root
from trainmaster.jobs.trees.reader import read_text, verify_file
from trainmaster.protocol.launch import POINTERS

METADATA = "metadata.json"


class InexactResumeError(RuntimeError):
    """The checkpoint lacks something that an exact continuation of the training needs."""


class LoadedCheckpoint(NamedTuple):
    tree: Any
    metadata: dict[str, Any]
    manifest: Manifest


class Loader:
    """Loads checkpoints of one job. Every load is collective: either all ranks get the checkpoint, or all raise."""

    def __init__(self, root: Root, process: Process, *, home: str, buffers: trees.Buffers, reporter: Reporter) -> None:
        self._root = root
        self._process = process
        self._home = home
        self._buffers = buffers
        self._reporter = reporter

    def load(
        self,
        rel_path: str,
        template: Any = trees.ANYTHING,
        *,
        partial: bool = False,
        verify: bool = True,
        exact: bool = False,
        needs: Sequence[str] = (),
        elastic: bool = False,
    ) -> LoadedCheckpoint:
        """Read a checkpoint.

        Args:
            template: a tree to be like: it gives types, shapes, devices and sharding.
            partial: restore only what the template has; where nothing that fits was saved, keep the template's value.
            exact: continue exactly as the training that saved it would have: restore the random-number generators of
                this rank, and refuse a checkpoint that lacks them.
            needs: names at the top of the tree or of the metadata without which the checkpoint is refused.
            elastic: if another number of processes saved it, leave the generators alone instead of refusing.

        Raises:
            FileNotFoundError: nothing is committed there.
            CorruptCheckpointError: a file differs from what was committed, on any rank.
            InexactResumeError, TreeError: something that was asked for is missing, or does not fit; names it.
        """
        self.settle()
        rel_path = check_path(rel_path)
        process = self._process
        problem: Exception | None = None
        loaded: LoadedCheckpoint | None = None
        state: Mapping[str, Any] | None = None
        try:
            manifest = required(self._root.manifest(rel_path), self._root.locate(rel_path))
            with self._root.fetch(rel_path, verify=False) as directory:
                digests = _digests(manifest) if verify else None
                metadata = json.loads(read_text(directory, METADATA, digests))
                if exact and not (elastic and manifest.world_size != process.count):
                    _require_same_ranks(rel_path, manifest, process)
                    state = _state(directory, rel_path, manifest, process, digests)
                tree = trees.read(
                    directory, template, partial=partial, digests=digests, process=process, buffers=self._buffers
                )
                there = {*(tree if isinstance(tree, Mapping) else ()), *metadata}
                if missing := [name for name in needs if name not in there]:
                    lacks = f"{rel_path} lacks {', '.join(missing)}"
                    raise InexactResumeError(f"{lacks}: training cannot continue exactly from it")
                if digests is not None:
                    # The files that belong to no tree, such as configurations; each rank takes some of them.
                    rest = sorted(name for name in digests if not trees.holds(name))
                    for name in rest[process.index :: process.count]:
                        verify_file(directory, name, digests)
            loaded = LoadedCheckpoint(tree, metadata, manifest)
        except Exception as error:
            problem = error
        _agree(rel_path, problem, process)
        assert loaded is not None
        if state is not None:
            rng.restore(state)
        return loaded

    def load_latest_good(
        self, template: Any = trees.ANYTHING, *, start: str | None = None, needs: Sequence[str] = ()
    ) -> tuple[str, LoadedCheckpoint]:
        """Read the newest checkpoint of this job that is not corrupt, as `load` does; returns its place, too.

        With `start`, that is the first to try, and newer ones are ignored. If all are corrupt, raises the first error.
        """
        self.settle()
        # Listed once, by one process: others may see an older listing.
        candidates: list[str] = self._process.broadcast(self._root.committed(self._home)[::-1], "checkpoints to load")
        if start is not None:
            if start not in candidates:
                raise FileNotFoundError(f"{self._root.locate(start)}: no checkpoint is committed there")
            candidates = candidates[candidates.index(start) :]
        if not candidates:
            raise FileNotFoundError(f"{self._root.uri}/{self._home}: no checkpoint is committed there")
        problems = []
        for rel_path in candidates:
            try:
                return rel_path, self.load(rel_path, template, needs=needs)
            except CorruptCheckpointError as error:
                problems.append(error)
                if self._process.index == 0:
                    self._reporter.note(f"the checkpoint {rel_path} is corrupt, the one before it is used: {error}")
        raise problems[0]

    def load_rng(self, rel_path: str) -> Mapping[str, Any]:
        """Read the state of this rank's generators, for `rng.restore`; raises InexactResumeError if there is none."""
        rel_path = check_path(rel_path)
        manifest = required(self._root.manifest(rel_path), self._root.locate(rel_path))
        _require_same_ranks(rel_path, manifest, self._process)
        with self._root.fetch(rel_path, verify=False) as directory:
            return _state(directory, rel_path, manifest, self._process, _digests(manifest))

    def settle(self) -> None:
        """Wait for a save that is under way; called before each load."""


def _digests(manifest: Manifest) -> dict[str, str]:
    return {file.path: file.sha256 for file in manifest.files}


def _require_same_ranks(rel_path: str, manifest: Manifest, process: Process) -> None:
    if manifest.world_size != process.count:
        raise InexactResumeError(
            f"{rel_path} was saved by {manifest.world_size} processes and cannot be resumed exactly by "
            f"{process.count}: each has random-number generators of its own"
        )


def _state(
    directory: Path, rel_path: str, manifest: Manifest, process: Process, digests: Mapping[str, str] | None
) -> Mapping[str, Any]:
    if all(file.path != rng.file_of(process.index) for file in manifest.files):
        raise InexactResumeError(f"{rel_path} lacks the state of rank {process.index}'s random-number generators")
    return rng.read(directory, process.index, digests=digests)


def _agree(rel_path: str, problem: Exception | None, process: Process) -> None:
    """Raise on every rank if one failed: no rank may continue from a checkpoint that another refuses."""
    if not process.any(problem is not None):
        return
    corrupt = process.any(isinstance(problem, CorruptCheckpointError))
    if corrupt and not isinstance(problem, CorruptCheckpointError):
        raise CorruptCheckpointError(f"{rel_path} is corrupt: another rank found a damaged file")
    if problem is None:
        raise ProcessError(f"another rank could not load {rel_path}; its log says why")
    raise problem


# A checkpoint of theseus is an Orbax tree with files beside it:
#
#     PATH/checkpoint/    the tree; Orbax renames it to this name when it is complete
#     PATH/config.json    the metadata
#     PATH/job.json       name, project, group and the tracker's id
#     PATH/config.yaml    the whole configuration
#
# Its `rng.npy` is a pickle and is not read: random-number generators are left as they are.

_THESEUS_TREE = "checkpoint"
THESEUS_METADATA = "config.json"


def theseus_directory(root: Root, path: str) -> Path | None:
    """The directory of a complete checkpoint of theseus; None if there is none."""
    if not root.is_directory:
        return None
    directory = Path(root.locate(path))
    complete = (directory / _THESEUS_TREE).is_dir() and (directory / THESEUS_METADATA).is_file()
    return directory if complete else None


def theseus_metadata(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / THESEUS_METADATA).read_text())
    return found


def theseus_tree(directory: Path, template: Any, *, partial: bool) -> Any:
    """Read the tree into arrays like those of the template. Collective where there are several processes."""
    from trainmaster.jobs.trees import jax_arrays

    return jax_arrays.read_tree(directory / _THESEUS_TREE, template, partial=partial)


LATEST, BEST = POINTERS

_ANOTHER = re.compile(rf"(?P<name>.+){ANOTHER_SAVE}\d+(-\d+)?")


def find(root: Root, path: str) -> str:
    """The place of the checkpoint that a path means: its newest save, or the target of a job's pointer.

    Raises FileNotFoundError if nothing is committed there, and CorruptCheckpointError if the newest is unknown.
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
    """The place of the newest save to a path; None when nothing is committed there."""
    home, _, name = path.rpartition("/")
    saves: list[tuple[int, float, str]] = []
    for each in root.names(home):
        another = _ANOTHER.fullmatch(each)
        if each != name and not (another and another["name"] == name):
            continue
        place = f"{home}/{each}".lstrip("/")
        if (manifest := root.manifest(place)) is None:
            continue
        own = (manifest.saved_as or name) == name
        # A later save may be asked for by the name of its directory, which is no path that was saved to.
        if own or each == name:
            saves.append((manifest.generation if own else 0, manifest.created_at, place))
    return max(saves)[2] if saves else None


def pointed(root: Root, home: str, pointer: str) -> str | None:
    """The target of a job's pointer. If the latest one is gone, the newest takes its place."""
    if (suffix := root.pointer(home, pointer)) is None:
        return None
    place = f"{home}/{check_path(suffix)}"
    try:
        if root.manifest(place) is not None:
            return place
    except CorruptCheckpointError:
        return place  # reading it will fail
    left = root.committed(home)
    return left[-1] if left and pointer == LATEST else None


def path_of(root: Root, place: str) -> str:
    """The path that means a checkpoint: the one it was saved to, unless that has a newer save."""
    path = _saved_to(root, place)
    try:
        return path if newest(root, path) == place else place
    except CorruptCheckpointError:
        return place


def paths(root: Root, home: str) -> list[str]:
    """The paths below a job's home that mean a checkpoint, in the order of their newest saves."""
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
