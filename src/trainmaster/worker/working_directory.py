"""Laying out what a node's processes need before any of them starts: the working directory and shipped files."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from trainmaster.protocol.launch import BlobFile
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import PREPARED
from trainmaster.protocol.users import User
from trainmaster.worker.users import acting_as, barred, give_directory

INPUTS = "inputs"
"""Of a node's directory in the run directory."""
_CHUNK_BYTES = 1 << 20


class StagingError(Exception):
    """Something that the job needs is missing or wrong. The message is for its owner."""


def stage(
    request: AttemptRequest, run_dir: Path, node: int, on_chunk: Callable[[], None], user: User | None = None
) -> str:
    """Prepare the working directory and place the shipped files in it, and the node's own directories; its path.

    Args:
        request: what the attempt was told.
        run_dir: the attempt's run directory, whose `work` is the default.
        node: the index of this node.
        on_chunk: called again and again while files are copied; it may raise to give up.
        user: whose processes will work there; None means our own.

    Raises:
        StagingError: the working directory or a shipped file is missing, or a file is not what it should be.
    """
    launch = request.launch
    if launch.working_directory is None:
        working_directory = run_dir / "work"
        if user is None:
            working_directory.mkdir(exist_ok=True)
        else:
            give_directory(working_directory, user)
    else:
        working_directory = Path(launch.working_directory)
        whose = f" for uid {user.uid}, as whom jobs of this account run" if user else ""
        with acting_as(user):
            if not os.path.isdir(working_directory):
                raise StagingError(f"working directory {working_directory} does not exist{whose}")
            if not os.access(working_directory, os.X_OK, effective_ids=True):
                raise StagingError(f"working directory {working_directory} may not be entered{whose}")
    shared = [request.checkpoint_dir, request.output_dir, *([request.cache_dir] if request.cache_dir else [])]
    if user is not None:
        for directory in (request.checkpoint_dir, request.output_dir):
            _check_owner(directory, user)
    for directory in shared:
        try:
            give_directory(directory, user)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise StagingError(f"directory {directory} cannot be made: {error}") from error
    if user is not None:
        _check_ways(user, working_directory, *shared)
    _place_inputs(request, run_dir / "nodes" / str(node), user)
    for blob in launch.blobs:
        if request.blob_dir is None:
            raise StagingError(f"shipped file {blob.path}: there is no place to take it from")
        _place(blob, Path(request.blob_dir), working_directory, on_chunk, user)
    return os.fspath(working_directory)


def _check_owner(directory: str, user: User) -> None:
    """See that no files of another user would be given away.

    An account that got its uid later may have run as root of containers before, and left setuid programs.
    """
    try:
        status = os.lstat(directory)
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode) and status.st_uid != user.uid and os.listdir(directory):
        raise StagingError(
            f"directory {directory} holds files of uid {status.st_uid}, and this account runs as uid {user.uid}; "
            f"have the operator run `chown -R {user.uid} {directory}`"
        )


def _check_ways(user: User, *directories: str | os.PathLike[str]) -> None:
    """See that the user gets to where its files are: directories above ours are not ours to open."""
    for directory in directories:
        if (closed := barred(os.fspath(directory), user)) is not None:
            raise StagingError(
                f"jobs of this account run as uid {user.uid}, who may not pass through {closed} on the way to "
                f"{os.fspath(directory)}; allow that (chmod o+x {closed}), or keep the server's data elsewhere"
            )


def _place_inputs(request: AttemptRequest, home: Path, user: User | None) -> None:
    """Make the directories of the node's inputs and of what a step prepares for the ranks; write the inputs."""
    for directory in (home / INPUTS, home / PREPARED):
        give_directory(directory, user)
    for name, text in request.launch.inputs.items():
        if PurePosixPath(name).name != name:
            raise StagingError(f"input {name!r} is no plain file name")
        with acting_as(user):
            (home / INPUTS / name).write_text(text, encoding="utf-8")


def _place(
    blob: BlobFile, blob_dir: Path, working_directory: Path, on_chunk: Callable[[], None], user: User | None
) -> None:
    relative = PurePosixPath(blob.path)
    if relative.is_absolute() or ".." in relative.parts or not relative.name:
        raise StagingError(f"shipped file {blob.path}: its path leaves the working directory")
    target = working_directory / relative
    # Another node of the gang may be placing the same file in the same directory.
    temporary = target.with_name(f".{target.name}.{os.urandom(8).hex()}")
    try:
        with open(blob_dir / blob.sha256, "rb") as reader:
            with acting_as(user):
                target.parent.mkdir(parents=True, exist_ok=True)
                writer = open(temporary, "xb")  # noqa: SIM115 - closed below, as ourselves
            try:
                with writer:
                    digest = _copy(reader, writer, on_chunk)
                    os.fchmod(writer.fileno(), 0o755 if blob.executable else 0o644)
                if digest != blob.sha256:
                    raise StagingError(
                        f"shipped file {blob.path}: its content is not what was shipped (sha256 {digest})"
                    )
                with acting_as(user):
                    os.replace(temporary, target)
            finally:
                with acting_as(user):
                    temporary.unlink(missing_ok=True)
    except FileNotFoundError as error:
        raise StagingError(f"shipped file {blob.path} (sha256 {blob.sha256}) is missing on the server") from error
    except (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise StagingError(f"shipped file {blob.path} cannot be placed: {error}") from error


def _copy(reader: BinaryIO, writer: BinaryIO, on_chunk: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    while chunk := reader.read(_CHUNK_BYTES):
        digest.update(chunk)
        writer.write(chunk)
        on_chunk()
    return digest.hexdigest()
