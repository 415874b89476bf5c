"""The directories that a node's processes find when they start: the working directory with shipped files, /workspace.

Programs for Kubeflow look in `/workspace/dataset` and `/workspace/model` for what was fetched for them. A worker that
may do so makes these for its ranks alone, in a mount namespace of its own. In a container they are mounted there
already. Where they cannot be made, words that name them are changed to name the real directories.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from trainmaster.protocol.environment import WORKSPACE
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


_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What ranks find below /workspace."""

    directories: Mapping[str, str] = field(default_factory=dict)
    """Path below /workspace -> the directory that it stands for; none where the path itself is there."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The same paths, and the variables that name those directories."""
    why_not: str = ""
    """Why it is not there."""

    def place(self, word: str) -> str:
        """A word in which a path below /workspace is replaced, where that is not there."""
        for path, directory in self.directories.items():
            named = f"{WORKSPACE}/{path}"
            if word == named or word.startswith(f"{named}/"):
                return directory + word[len(named) :]
        return word

    def advice(self, text: str) -> str | None:
        """What to say to a program that failed with this text, because it looked there."""
        for path, variable in self.variables.items():
            if path in self.directories and f"{WORKSPACE}/{path}" in text:
                return f"{WORKSPACE}/{path} is not there ({self.why_not}); read os.environ[{variable!r}] instead"
        return None


NO_WORKSPACE = Workspace()
"""Nothing is to be changed: all is there, or nothing was fetched."""


def make_workspace(home: Path, prepared: Mapping[str, str], places: Mapping[str, str], user: User | None) -> Workspace:
    """Make /workspace for this process and all that it starts, if it may.

    Args:
        home: the node's part of the run directory.
        prepared: variable -> path below /workspace.
        places: path below /workspace -> the directory that it stands for.
        user: as whom the ranks run; None: as the worker.
    """
    if all(os.path.isdir(f"{WORKSPACE}/{path}") and _is_same(path, place) for path, place in places.items()):
        return NO_WORKSPACE
    why_not = _link(home / "workspace", places, user)
    if why_not is None:
        return NO_WORKSPACE
    # What is there of the machine's own, or is a volume of the job, is what is meant.
    missing = {path: place for path, place in places.items() if not os.path.lexists(f"{WORKSPACE}/{path}")}
    return Workspace(directories=missing, variables={path: name for name, path in prepared.items()}, why_not=why_not)


def _is_same(path: str, place: str) -> bool:
    return os.path.isdir(place) and os.path.samefile(f"{WORKSPACE}/{path}", place)


def _link(own: Path, places: Mapping[str, str], user: User | None) -> str | None:
    """Mount a directory of links at /workspace; why that cannot be, if it cannot."""
    if os.geteuid() != 0:
        return "the worker may mount nothing"
    try:
        if os.path.lexists(WORKSPACE):
            if not os.path.isdir(WORKSPACE) or os.path.islink(WORKSPACE) or os.listdir(WORKSPACE):
                return f"this machine has a {WORKSPACE} of its own"
        else:
            os.mkdir(WORKSPACE, 0o755)  # it stays, and is empty for everybody else
        own.mkdir(mode=0o700)
        for path, place in places.items():
            (own / path).symlink_to(place)
        give_directory(own, user)
        _call("unshare", ctypes.c_int(_CLONE_NEWNS))
        # What is mounted on the machine later comes here too; what is mounted here stays here.
        _mount("none", "/", _MS_REC | _MS_SLAVE)
        _mount(os.fspath(own), WORKSPACE, _MS_BIND)
    except OSError as error:
        return f"the worker cannot mount it: {error.strerror}"
    return None


def _mount(source: str, target: str, flags: int) -> None:
    _call("mount", os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(flags), None)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
