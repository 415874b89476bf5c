"""What the processes of a node find when they start: working directory, shipped files, inputs, token, /workspace.

Programs for Kubeflow look in `/workspace/dataset` and `/workspace/model` for fetched data. A worker that may do so
makes these for its ranks alone, in a mount namespace of its own; in a container the engine has mounted them. Where they
cannot be made, arguments and variables that name them are changed to name the real directories.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import selectors
import socket
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from trainmaster.protocol.account_files import User
from trainmaster.protocol.attempt_files import is_url
from trainmaster.protocol.environment import WORKSPACE
from trainmaster.protocol.launch import BlobFile, Lifetime
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import PREPARED, RunDirectory, events_stream, log_stream, metrics_stream
from trainmaster.protocol.secrets import Secrets, secret_named
from trainmaster.worker.local_http import KubeflowListener
from trainmaster.worker.users import acting_as, first_untraversable, give_directory, open_own

INPUTS = "inputs"
"""In a node's directory of the run directory."""
_CHUNK_BYTES = 1 << 20


class StagingError(Exception):
    """Something that the job needs is missing or wrong. The message is for its owner."""


def stage(
    request: AttemptRequest, run_dir: Path, node: int, on_chunk: Callable[[], None], user: User | None = None
) -> str:
    """Make the working directory, with the shipped files in it, and the node's own directories; returns its path."""
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
    # On another machine, checkpoints go to the server.
    checkpoints = [] if is_url(request.checkpoint_dir) else [request.checkpoint_dir]
    shared = [*checkpoints, request.output_dir, *([request.cache_dir] if request.cache_dir else [])]
    if user is not None:
        for directory in (*checkpoints, request.output_dir):
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
    """Never give another user's files away: as root of containers, an account may have left setuid programs."""
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
    """Check that the user can reach its files: the directories above ours are not ours to open."""
    for directory in directories:
        if (closed := first_untraversable(os.fspath(directory), user)) is not None:
            raise StagingError(
                f"jobs of this account run as uid {user.uid}, who may not pass through {closed} on the way to "
                f"{os.fspath(directory)}; allow that (chmod o+x {closed}), or keep the server's data elsewhere"
            )


def _place_inputs(request: AttemptRequest, home: Path, user: User | None) -> None:
    """Write the inputs, and make the directories for them and for what preparing steps leave."""
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
    """Make /workspace for this process and all it starts, if possible; `places` has the real directories by path."""
    named = [(f"{WORKSPACE}/{path}", place) for path, place in places.items()]
    if all(os.path.isdir(path) and os.path.isdir(place) and os.path.samefile(path, place) for path, place in named):
        return NO_WORKSPACE
    if (why_not := _link(home / "workspace", places, user)) is None:
        return NO_WORKSPACE
    # Paths that exist, of the machine's own or as a volume of the job, are meant as they are.
    missing = {path: place for path, place in places.items() if not os.path.lexists(f"{WORKSPACE}/{path}")}
    return Workspace(directories=missing, variables={path: name for name, path in prepared.items()}, why_not=why_not)


def _link(own: Path, places: Mapping[str, str], user: User | None) -> str | None:
    """Mount a directory of links at /workspace; returns why not, if it fails."""
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
        # Later mounts of the machine appear here, too; mounts made here stay here.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    request: AttemptRequest
    node: int
    run_dir: Path
    working_directory: str
    control_file: str
    token_file: str
    kubeflow_url: str
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables whose values no document holds."""
    port: int | None = None
    """For a service: where it listens."""
    user: User | None = None
    workspace: Workspace = NO_WORKSPACE
    environment: str | None = None
    """The Python environment that a preparing step made for the ranks; None: the worker's own Python."""

    @property
    def first_rank(self) -> int:
        return self.node * self.request.launch.ranks_per_node

    @property
    def home(self) -> Path:
        return self.run_dir / "nodes" / str(self.node)

    @property
    def python(self) -> str:
        return sys.executable if self.environment is None else os.path.join(self.environment, "bin", "python")

    def log(self, step: str, rank: int, channel: str) -> str:
        return os.fspath(self.run_dir / log_stream(self.node, step, rank, channel))

    def events(self, rank: int) -> str:
        return os.fspath(self.run_dir / events_stream(self.node, rank))

    def metrics(self, rank: int) -> str:
        return os.fspath(self.run_dir / metrics_stream(self.node, rank))


def stage_node(
    request: AttemptRequest,
    directory: RunDirectory,
    node: int,
    secrets: Secrets,
    *,
    control_file: Path,
    selector: selectors.BaseSelector,
    user: User | None,
    on_chunk: Callable[[], None],
) -> NodeContext:
    """Stage what the job needs, or raise StagingError, and open its listener. `on_chunk` may raise to give up."""
    launch, home = request.launch, directory.path / "nodes" / str(node)
    missing = launch.secrets.keys() - secrets.environment.keys()
    for step in launch.steps:
        missing |= {name for name, ref in step.secrets.items() if secret_named(ref) not in secrets.tokens}
    if missing:
        raise StagingError(f"the worker was not given the values of these variables: {', '.join(sorted(missing))}")
    working_directory = stage(request, directory.path, node, on_chunk=on_chunk, user=user)
    token_file = os.fspath(home / "token")
    with open(open_own(token_file, user, os.O_TRUNC), "w") as file:
        file.write(request.rank_token)
    workspace = NO_WORKSPACE
    # Containers get /workspace from their engine, also those of a worker outside.
    if launch.prepared and not any(step.through for step in launch.steps):
        places = {path: os.fspath(home / PREPARED / path) for path in launch.prepared.values()}
        workspace = make_workspace(home, launch.prepared, places, user)
    metrics = metrics_stream(node, node * launch.ranks_per_node)
    listener = KubeflowListener(selector, request.rank_token, os.fspath(directory.path / metrics))
    return NodeContext(
        request=request,
        node=node,
        run_dir=directory.path,
        working_directory=working_directory,
        control_file=os.fspath(control_file),
        token_file=token_file,
        kubeflow_url=listener.url,
        secrets=secrets.environment,
        port=(request.nodes[node].port or free_port()) if launch.lifetime is Lifetime.SERVICE else None,
        user=user,
        workspace=workspace,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
