"""Local paths: below the server's data roots, shipped into the job's working directory, or left by another job."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path

from trainmaster.server.core.training.sources import file_path, fixed_part, left_by_job
from trainmaster.training.errors import InputError
from trainmaster.training.fetching.access import Access

_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFiles:
    """The files that a path stands for."""

    paths: tuple[Path, ...]
    """Sorted."""
    top: Path
    """The directory that the path names, or below which all matches of its pattern lie."""
    itself: bool = False
    """The path names a file."""
    pattern: bool = False
    """The path is a pattern."""


def local_path(path: str, access: Access) -> Path:
    """Where a path leads that a job names.

    Raises:
        InputError: there is nothing, or it lies where jobs may not read.
    """
    named = file_path(path) or path
    found = access.working_directory / named
    _require_allowed(path, found, access)
    if not found.exists():
        raise InputError(_nothing(path, named))
    return found


def local_files(path: str, access: Access) -> LocalFiles:
    """All files that a path stands for: itself, those of a directory, or those that a pattern matches.

    Raises:
        InputError: there are none, or one of them lies where jobs may not read.
    """
    named = file_path(path) or path
    if _WILD & set(named):
        top = access.working_directory / fixed_part(named)
        _require_allowed(path, top, access)
        pattern = str(access.working_directory / named)
        files = [Path(each) for each in sorted(glob.glob(pattern, recursive=True)) if Path(each).is_file()]
        if not files:
            raise InputError(f"{path}: no file matches this pattern")
        found = LocalFiles(paths=tuple(files), top=top, pattern=True)
    else:
        top = local_path(path, access)
        if not top.is_dir():
            return LocalFiles(paths=(top,), top=top.parent, itself=True)
        files = sorted(each for each in top.rglob("*") if _is_plain(each, top))
        if not files:
            raise InputError(f"{path}: the directory is empty")
        found = LocalFiles(paths=tuple(files), top=top)
    for file in found.paths:
        _require_allowed(path, file, access)
    return found


def left_directory(name: str, access: Access) -> Path:
    """A directory that another job left. That the account may have it was seen when the job was submitted.

    Raises:
        InputError: it is not there, or leads elsewhere.
    """
    try:
        wanted = left_by_job(name)
    except ValueError as error:
        raise InputError(str(error)) from None
    if access.artifacts is None:
        raise InputError(f"{name}: what jobs leave is known where jobs run alone; name its directory")
    own = access.artifacts.resolve() / wanted.job_id
    try:
        found = (own / wanted.path).resolve()
        if found.is_relative_to(own) and found.is_dir():
            return found
    except OSError as error:  # the account runs as another user than it did then, say
        raise InputError(f"{name} cannot be read: {error.strerror}") from error
    raise InputError(f"{name}: the job has left no such directory, or it was removed since")


def _is_plain(path: Path, directory: Path) -> bool:
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)


def _require_allowed(path: str, found: Path, access: Access) -> None:
    """Refuse what lies elsewhere, wherever a link or `..` leads."""
    if access.data_roots is None:
        return
    real = found.resolve()
    roots = [root.resolve() for root in (access.working_directory, *access.data_roots)]
    if not any(real == root or root in real.parents for root in roots):
        allowed = ", ".join(map(str, access.data_roots)) or "none"
        raise InputError(
            f"{path}: this server lets jobs read below its data roots alone ({allowed}); put it there, "
            "name it from the job file's directory, so that it is sent along, or add to the server's data_roots"
        )


def _nothing(path: str, named: str) -> str:
    if named.startswith("/"):
        return f"{path}: there is no such file or directory on the machine that runs the job"
    return f"{path}: there is no such file in the job's working directory; was it shipped with the job?"
