"""Which committed checkpoint a path means: the newest save to it, or what `latest` or `best` points to.

A committed checkpoint never changes. A second save to the same path lies beside the first, under another name, and its
manifest says which path it was saved to and as which generation.
"""

from __future__ import annotations

import re

from trainmaster.jobs import checkpoint_reader
from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest
from trainmaster.jobs.roots import ANOTHER_SAVE, Root, checked
from trainmaster.protocol.launch import POINTERS

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
    if checkpoint_reader.theseus_directory(root, path) is not None:
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
    place = f"{home}/{checked(suffix)}"
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
