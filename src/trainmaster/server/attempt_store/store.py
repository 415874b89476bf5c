"""The files of one attempt that runs elsewhere, as a small object store over the directory of artifacts.

What is not complete lies in a directory of the attempt that only the server can enter, until it is committed by a
rename: a result, when all its bytes are there; a save, when its manifest comes, which makes it a checkpoint in the
same form that a job on this machine leaves.

    artifacts/.uploads/lock                                 held while a small object is replaced under a condition
    artifacts/.uploads/<attempt_id>/part-<upload>/file      a file that is being sent in pieces
    artifacts/.uploads/<attempt_id>/data-<save>/<path>      the files of a save that is not committed
    artifacts/.uploads/<attempt_id>/node-<digest>           which node left a result, of several
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trainmaster.protocol import account_files
from trainmaster.protocol.account_files import User, closing, directory_below, open_below
from trainmaster.protocol.attempt_files import DRAFT, FileArea
from trainmaster.protocol.run_directory import StreamGapError
from trainmaster.server.attempt_store.digests import digest_of, running_digests
from trainmaster.server.attempt_store.paths import (
    FilePathError,
    FileStatus,
    is_beside_checkpoints,
    is_of_save,
    parts_of,
    status_of,
)

UPLOADS = ".uploads"
MANIFEST = "manifest.json"
_LOCK = f"{UPLOADS}/lock"
_MOST_LOCK_BYTES = 2048
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)


class DigestError(ValueError):
    """The bytes that arrived are not those that were sent."""


class IncompleteSaveError(ValueError):
    """A manifest names files that did not arrive."""


class LockHolder(NamedTuple):
    owner: str
    """As its file says."""
    is_here: bool
    """Whether a process of this machine has locked the file itself."""
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOnlyCheckpoint:
    """The checkpoint that an attempt resumes from, wherever it lies."""

    top: Path
    directory: str
    name: str
    """By which it is found in the area."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStore:
    """Raises FileNotFoundError where a file is missing, behind a link, or no plain one; OSError where a disk fails."""

    artifacts: Path
    attempt_id: str
    checkpoints: str
    """The job's directory for checkpoints, below the artifacts."""
    output: str
    resume: ReadOnlyCheckpoint | None = None
    user: User | None = None
    """The system user that the account's jobs run as on this machine: what is committed belongs to that user."""

    def open(self, area: FileArea, path: str) -> tuple[int, FileStatus]:
        """A descriptor of a file, which the caller closes, and its status."""
        descriptor = open_below(*self._place(area, path))
        return descriptor, status_of(path, os.fstat(descriptor))

    def files(self, area: FileArea, prefix: str, after: str) -> Iterator[FileStatus]:
        """The committed files below a directory, sorted by their paths' names, from after a path on."""
        if area is FileArea.RESUME and not prefix:
            prefix = self.resume.name if self.resume is not None else ""
        names = tuple(after.removeprefix(f"{prefix}/" if prefix else "").split("/")) if after else ()
        with contextlib.suppress(FileNotFoundError):
            top, name = self._directory(area, prefix)
            with directory_below(top, name) as directory:
                for found in account_files.files_in_order(directory, names):
                    path = "/".join(found)
                    if (status := account_files.status_below(top, f"{name}/{path}")) is not None:
                        yield status_of(f"{prefix}/{path}".lstrip("/"), status)

    def directories(self, area: FileArea, prefix: str) -> list[str]:
        if area is FileArea.RESUME and not prefix and self.resume is not None:
            return [self.resume.name]
        with contextlib.suppress(FileNotFoundError):
            return sorted(account_files.directories_in(*self._directory(area, prefix)))
        return []

    def put(self, path: str, data: bytes, *, create: bool, version: str | None) -> str | None:
        """Write a small object among the checkpoints: a file of a save, or one beside checkpoints, such as a pointer.

        With `create` only where there is none, with `version` only over that one, else None.
        """
        top, name = self._place(FileArea.CHECKPOINTS, path)
        if not is_of_save(path) and not is_beside_checkpoints(path):
            raise FilePathError("only files of a save, its manifest and names with a dot first can be written there")
        temporary = f"{self._own}/put-{secrets.token_hex(8)}"
        with self._locked():
            before = account_files.status_below(top, name)
            if (create and before is not None) or (
                version is not None and (before is None or status_of(path, before).version != version)
            ):
                return None
            self._write(temporary, data)
            try:
                self._make_parent(name, FileArea.CHECKPOINTS if not is_of_save(path) else None)
                account_files.move(self.artifacts, temporary, name)
            finally:
                account_files.remove(self.artifacts, temporary)
            after = account_files.status_below(top, name)
        return status_of(path, after).version if after is not None else ""

    def lock_holder(self, path: str) -> LockHolder | None:
        """Who holds the lock at a path; None if there is no lock."""
        with (
            contextlib.suppress(FileNotFoundError),
            closing(open_below(*self._place(FileArea.CHECKPOINTS, path))) as descriptor,
        ):
            owner, is_here = os.pread(descriptor, _MOST_LOCK_BYTES, 0).decode(errors="replace"), False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    owner = str(json.loads(owner)["owner"])
            except BlockingIOError:
                is_here = True
            return LockHolder(owner, is_here, status_of(path, os.fstat(descriptor)).version)
        return None

    def discard(self, path: str, version: str) -> None:
        """Remove a small object that still has this version."""
        top, name = self._place(FileArea.CHECKPOINTS, path)
        with self._locked():
            now = account_files.status_below(top, name)
            if now is not None and status_of(path, now).version == version:
                account_files.remove(top, name)

    def append(self, area: FileArea, path: str, upload: str, offset: int, data: bytes) -> int:
        """Take a piece of a file; returns where the next one begins. Raises StreamGapError if bytes before it lack."""
        self._place_to_finish(area, path)
        name = self._part(upload)
        account_files.make_directories(self.artifacts, name.rpartition("/")[0])
        with closing(open_below(self.artifacts, name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)) as descriptor:
            # A client that got no answer sends again, perhaps while its first request is still being written.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            end = os.fstat(descriptor).st_size
            if offset > end:
                raise StreamGapError(end)
            fresh = memoryview(data)[end - offset :]
            while fresh:
                written = os.write(descriptor, fresh)
                running_digests.extend(f"{self.artifacts}/{name}", end, fresh[:written])
                fresh, end = fresh[written:], end + written
        return end

    def finish(self, area: FileArea, path: str, upload: str, *, size: int, sha256: str, node: int | None = None) -> str:
        """Put a file that has arrived where it belongs, in place of any other; returns its version.

        May be repeated. Raises StreamGapError if bytes lack, and DigestError if the file has to be sent again. A result
        stays if a node with a higher number left it.
        """
        top, name = self._place_to_finish(area, path)
        part = self._part(upload)
        try:
            descriptor = open_below(self.artifacts, part, os.O_RDWR)
        except FileNotFoundError:
            return self._already_there(top, name, path, size, sha256)
        with closing(descriptor):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            status = os.fstat(descriptor)
            now = account_files.status_below(self.artifacts, part)
            if now is None or not os.path.samestat(now, status):
                return self._already_there(top, name, path, size, sha256)
            if status.st_size < size:
                raise StreamGapError(status.st_size)
            digest = running_digests.take(f"{self.artifacts}/{part}", size) or digest_of(descriptor)
            if status.st_size > size or digest != sha256:
                account_files.remove(self.artifacts, part.rpartition("/")[0])
                raise DigestError("the file did not arrive as it was sent; send it again")
            os.fsync(descriptor)
            if area is FileArea.OUTPUT:
                self._take_result(path, name, part, descriptor, node)
            else:
                self._make_parent(name, None)
                account_files.move(self.artifacts, part, name)
            account_files.remove(self.artifacts, part.rpartition("/")[0])
            return status_of(path, status).version

    def prepare(self, path: str, save: str, files: dict[str, int], manifest: bytes) -> Callable[[], bool]:
        """Complete a save; returns the function that commits it by a rename, and False if something is there already.

        `path` is that of the manifest. Raises IncompleteSaveError.
        """
        directory = self._directory(FileArea.CHECKPOINTS, path.rpartition("/")[0])[1]
        if account_files.exists(self.artifacts, f"{directory}/{MANIFEST}"):
            return lambda: False
        draft = self._draft(save)
        account_files.make_directories(self.artifacts, draft)
        for name, size in files.items():
            status = account_files.status_below(self.artifacts, f"{draft}/{'/'.join(parts_of(name))}")
            if status is None or status.st_size != size:
                raise IncompleteSaveError(f"{name} did not arrive, or not all of it")
        account_files.remove(self.artifacts, f"{draft}/{MANIFEST}")
        self._write(f"{draft}/{MANIFEST}", manifest)
        account_files.seal_tree(self.artifacts, draft, self.user)

        def commit() -> bool:
            self._make_parent(directory, FileArea.CHECKPOINTS)
            try:
                return account_files.move(self.artifacts, draft, directory)
            except OSError as error:
                if error.errno in _TAKEN:
                    account_files.remove(self.artifacts, f"{draft}/{MANIFEST}")
                    return False
                raise

        return commit

    def flush(self, path: str) -> None:
        """Flush the directory in which the checkpoint with this manifest was committed."""
        top, directory = self._directory(FileArea.CHECKPOINTS, path.rpartition("/")[0])
        with directory_below(top, directory.rpartition("/")[0]) as above:
            os.fsync(above)

    def delete(self, path: str) -> None:
        """Remove a small object, a file of a save, or, by its manifest, a whole checkpoint: first from all listings."""
        top, name = self._place(FileArea.CHECKPOINTS, path)
        if is_of_save(path) or is_beside_checkpoints(path):
            account_files.remove(top, name)
        elif path.endswith(f"/{MANIFEST}"):
            aside = f"{self._own}/removed-{secrets.token_hex(8)}"
            account_files.make_directories(self.artifacts, self._own)
            if account_files.exists(top, name):
                account_files.move(self.artifacts, name.rpartition("/")[0], aside)
            account_files.remove(self.artifacts, aside)
        elif account_files.exists(top, name):
            raise FilePathError("a file of a checkpoint goes with its manifest, and not alone")

    @property
    def _own(self) -> str:
        return f"{UPLOADS}/{self.attempt_id}"

    def _part(self, upload: str) -> str:
        return f"{self._own}/part-{upload}/file"

    def _draft(self, save: str) -> str:
        return f"{self._own}/data-{save}"

    def _place(self, area: FileArea, path: str) -> tuple[Path, str]:
        """The directory of ours, and the path below it, of a file."""
        names = parts_of(path)
        if area is FileArea.RESUME:
            if self.resume is None or names[0] != self.resume.name or len(names) < 2:
                raise FileNotFoundError(errno.ENOENT, "it is no file of the checkpoint that is resumed from", path)
            return self.resume.top, "/".join((self.resume.directory, *names[1:]))
        if area is FileArea.OUTPUT:
            return self.artifacts, f"{self.output}/{path}"
        for position, name in enumerate(names[:-1]):
            if (found := DRAFT.fullmatch(name)) is not None:
                return self.artifacts, "/".join((self._draft(found["save"]), *names[position + 1 :]))
        return self.artifacts, f"{self.checkpoints}/{path}"

    def _place_to_finish(self, area: FileArea, path: str) -> tuple[Path, str]:
        if area is FileArea.CHECKPOINTS and not is_of_save(path):
            raise FilePathError("a file of a checkpoint belongs to a save")
        return self._place(area, path)

    def _directory(self, area: FileArea, path: str) -> tuple[Path, str]:
        if area is FileArea.RESUME:
            names = parts_of(path) if path else ()
            if self.resume is None or (names and names[0] != self.resume.name):
                raise FileNotFoundError(errno.ENOENT, "it is no part of the checkpoint that is resumed from", path)
            if not names:
                raise FilePathError("name the checkpoint")
            return self.resume.top, "/".join((self.resume.directory, *names[1:]))
        home = self.output if area is FileArea.OUTPUT else self.checkpoints
        return self.artifacts, "/".join((home, *(parts_of(path) if path else ())))

    def _make_parent(self, name: str, area: FileArea | None) -> None:
        """Make the directory of a file; an area's belong to the user of its account."""
        parent = name.rpartition("/")[0]
        if area is None:
            account_files.make_directories(self.artifacts, parent)
            return
        home = self.output if area is FileArea.OUTPUT else self.checkpoints
        account_files.make_directories_for(self.user, self.artifacts, home, parent.removeprefix(home).lstrip("/"))

    def _make_way(self, name: str) -> None:
        """Make the directory of a result. What is there in place of a directory goes, or of the file a directory."""
        way = name.removeprefix(f"{self.output}/").split("/")
        for count in range(len(way)):
            above = "/".join((self.output, *way[:count]))
            try:
                self._make_parent(f"{above}/", FileArea.OUTPUT)
            except FileExistsError:
                account_files.remove(self.artifacts, above)
        self._make_parent(name, FileArea.OUTPUT)
        if account_files.exists(self.artifacts, name) and account_files.status_below(self.artifacts, name) is None:
            account_files.remove(self.artifacts, name)

    def _take_result(self, path: str, name: str, part: str, descriptor: int, node: int | None) -> None:
        """Put a result in its place, unless a node with a higher number left one there."""
        note = f"{self._own}/node-{hashlib.sha256(path.encode()).hexdigest()}"
        with self._locked():
            if node is not None:
                if account_files.status_below(self.artifacts, note) is not None:
                    with closing(open_below(self.artifacts, note)) as noted:
                        if int(os.read(noted, 20) or b"0") > node:
                            return
                    account_files.remove(self.artifacts, note)
                self._write(note, str(node).encode())
            self._make_way(name)
            account_files.give_file(descriptor, self.user)
            account_files.move(self.artifacts, part, name)

    def _already_there(self, top: Path, name: str, path: str, size: int, sha256: str) -> str:
        """The version of a file that an earlier request has put there, whose answer got lost."""
        with contextlib.suppress(FileNotFoundError), closing(open_below(top, name)) as descriptor:
            status = os.fstat(descriptor)
            if status.st_size == size and digest_of(descriptor) == sha256:
                return status_of(path, status).version
        raise StreamGapError(0)

    def _write(self, name: str, data: bytes) -> None:
        account_files.make_directories(self.artifacts, name.rpartition("/")[0])
        with closing(open_below(self.artifacts, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)) as descriptor:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
            account_files.give_file(descriptor, self.user)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        account_files.make_directories(self.artifacts, UPLOADS)
        with closing(open_below(self.artifacts, _LOCK, os.O_RDWR | os.O_CREAT)) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
