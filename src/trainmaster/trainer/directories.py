"""The files of a directory that a script trainer takes along."""

from __future__ import annotations

from pathlib import Path

from trainmaster.client.directories import kept_files
from trainmaster.client.file_upload import MAX_FILES


def files_of(directory: Path) -> list[str]:
    """The files to ship, relative to the directory, sorted: those that git would keep.

    Raises:
        ValueError: there is no such directory, nothing in it, or too much.
    """
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}")
    found = kept_files(directory)
    if not found:
        raise ValueError(f"there is nothing in {directory} to send along")
    if len(found) > MAX_FILES:
        raise ValueError(f"{directory} has {len(found)} files; at most {MAX_FILES} go along with a job")
    return found
