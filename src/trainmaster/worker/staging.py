"""Laying out what a node's processes need before any of them starts: the working directory and shipped files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from trainmaster.protocol.launch import BlobFile
from trainmaster.protocol.request import AttemptRequest

_CHUNK_BYTES = 1 << 20


class StagingError(Exception):
    """Something that the job needs is missing or wrong. The message is for its owner."""


def stage(request: AttemptRequest, run_dir: Path, on_chunk: Callable[[], None]) -> str:
    """Prepare the working directory and place the shipped files in it; its path.

    Args:
        request: what the attempt was told.
        run_dir: the attempt's run directory, whose `work` is the default.
        on_chunk: called again and again while files are copied; it may raise to give up.

    Raises:
        StagingError: the working directory or a shipped file is missing, or a file is not what it should be.
    """
    launch = request.launch
    if launch.working_directory is None:
        working_directory = run_dir / "work"
        working_directory.mkdir(exist_ok=True)
    else:
        working_directory = Path(launch.working_directory)
        if not working_directory.is_dir():
            raise StagingError(f"working directory {launch.working_directory} does not exist")
        if not os.access(working_directory, os.X_OK):
            raise StagingError(f"working directory {launch.working_directory} may not be entered")
    for directory in (request.checkpoint_dir, request.output_dir):
        try:
            os.makedirs(directory, exist_ok=True)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise StagingError(f"directory {directory} cannot be made: {error}") from error
    for blob in launch.blobs:
        if request.blob_dir is None:
            raise StagingError(f"shipped file {blob.path}: there is no place to take it from")
        _place(blob, Path(request.blob_dir), working_directory, on_chunk)
    return os.fspath(working_directory)


def _place(blob: BlobFile, blob_dir: Path, working_directory: Path, on_chunk: Callable[[], None]) -> None:
    relative = PurePosixPath(blob.path)
    if relative.is_absolute() or ".." in relative.parts or not relative.name:
        raise StagingError(f"shipped file {blob.path}: its path leaves the working directory")
    target = working_directory / relative
    # Another node of the gang may be placing the same file in the same directory.
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            digest = _copy(blob_dir / blob.sha256, temporary, on_chunk)
            if digest != blob.sha256:
                raise StagingError(f"shipped file {blob.path}: its content is not what was shipped (sha256 {digest})")
            temporary.chmod(0o755 if blob.executable else 0o644)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except FileNotFoundError as error:
        raise StagingError(f"shipped file {blob.path} (sha256 {blob.sha256}) is missing on the server") from error
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise StagingError(f"shipped file {blob.path} cannot be placed: {error}") from error


def _copy(source: Path, target: Path, on_chunk: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            digest.update(chunk)
            writer.write(chunk)
            on_chunk()
    return digest.hexdigest()
