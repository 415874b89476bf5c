"""Checkpoints on an object store. It has no rename: a conditional put of the manifest commits a checkpoint.

    <rel_path>/.data-<job>.<attempt>-<random>/...    the files of one save
    <rel_path>/manifest.json                         names the directory of the committed save

So the files of a save that was killed, or that lost a race, never become part of another checkpoint. The server, as an
object store for jobs on other machines, answers the same requests, but keeps the files of saves out of sight, and
renames them when the manifest comes: there a checkpoint has the form that it has in a directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path, PurePosixPath

from trainmaster.jobs import checkpoint, objects
from trainmaster.jobs.attempt import NotOwnerError
from trainmaster.jobs.checkpoint import MANIFEST, CorruptCheckpointError, Manifest, ManifestFile, check_path
from trainmaster.jobs.lock import Lock, object_lock
from trainmaster.jobs.objects import ObjectInfo, Place
from trainmaster.jobs.parts import DeliveredParts, PartDelivery
from trainmaster.jobs.staging import local_copy, staging
from trainmaster.protocol.attempt_files import is_url

ABANDONED_S = 24 * 3600.0
"""A later save removes the files of a save that was not committed within this time, whoever made it."""

_DATA = re.compile(r"\.data-(?P<job>.+)\.(?P<attempt>\d+)-[0-9a-f]+")
_LOCK = ".lock"


def _open_place(uri: str) -> Place:
    if is_url(uri) and not uri.startswith(objects.S3_SCHEME):
        from trainmaster.jobs.server_place import ServerPlace  # most jobs share the server's files

        return ServerPlace.open(uri)
    return objects.open_place(uri)


class ObjectRoot:
    is_directory = False

    def __init__(self, uri: str) -> None:
        self._place = _open_place(uri)
        self.uri = self._place.uri
        self.is_retained = self._place.commits_by_rename

    def locate(self, rel_path: str) -> str:
        return f"{self.uri}/{check_path(rel_path)}"

    def delivery(self, rel_path: str, save: str) -> PartDelivery:
        return PartDelivery(place=self._place, key=self._key(rel_path, f".data-{save}"))

    @contextlib.contextmanager
    def draft(self, rel_path: str, *, job_id: str, attempt: int, expected_bytes: int = 0) -> Iterator[Path]:
        above = [parent.as_posix() for parent in PurePosixPath(check_path(rel_path)).parents]
        for parent in above:
            if self._is_committed(parent):
                raise FileExistsError(f"{self._uri(parent)} is a checkpoint: no other checkpoint can be below it")
        self._tidy(above[0], job_id=job_id, attempt=attempt)
        made = checkpoint.draft_directory(staging(), job_id=job_id, attempt=attempt, expected_bytes=expected_bytes)
        with made as directory:
            yield directory

    def commit(
        self,
        draft: Path,
        rel_path: str,
        manifest: Manifest,
        *,
        check_owner: Callable[[], None],
        known_digests: Mapping[str, str] | None = None,
        parts: DeliveredParts | None = None,
    ) -> Manifest:
        if self._is_committed(check_path(rel_path)):
            raise FileExistsError(f"{self.locate(rel_path)}: a checkpoint is never replaced")
        files = checkpoint.describe(draft, known_digests=known_digests, flush=False)
        delivered = parts.files if parts is not None else ()
        data = f".data-{draft.name.removeprefix(checkpoint.DRAFT_PREFIX)}"
        complete = replace(manifest, files=tuple(sorted((*files, *delivered), key=lambda file: file.path)), data=data)
        keys = {draft / file.path: self._key(rel_path, data, file.path) for file in files}
        moved = (
            {self._key(parts.rel_path, data, file.path): self._key(rel_path, data, file.path) for file in delivered}
            if parts is not None and parts.rel_path != rel_path
            else {}
        )
        try:
            self._place.send_all(keys)
            objects.in_parallel(lambda pair: self._place.copy(*pair), moved.items())
            check_owner()
        except Exception:
            self._forget(keys.values())
            raise
        # If this raises, the files stay: the manifest may have arrived all the same.
        if not self._put_manifest(rel_path, complete):
            self._forget((*keys.values(), *moved.values()))
            raise FileExistsError(f"{self.locate(rel_path)}: a checkpoint is never replaced")
        if self._place.commits_by_rename:
            return replace(complete, data="")
        self._forget(moved)
        return complete

    def manifest(self, rel_path: str) -> Manifest | None:
        key = self._key(check_path(rel_path), MANIFEST)
        try:
            data, _ = self._place.get(key)
        except FileNotFoundError:
            return None
        return Manifest.from_bytes(data, f"{self.locate(rel_path)}/{MANIFEST}")

    def read(self, rel_path: str, name: str) -> bytes:
        manifest = self._require(rel_path)
        file = manifest.file(name)
        with _missing_is_corrupt():
            data, _ = self._place.get(self._key(rel_path, manifest.data, name))
        checkpoint.require_same(f"{self.locate(rel_path)}/{name}", file, len(data), hashlib.sha256(data).hexdigest())
        return data

    def verify(self, rel_path: str, *, on_bytes: Callable[[int], None] | None = None) -> Manifest:
        manifest = self._require(rel_path)

        def compare(file: ManifestFile) -> None:
            with _missing_is_corrupt():
                found = self._place.digest(self._key(rel_path, manifest.data, file.path), on_bytes=on_bytes)
            checkpoint.require_same(f"{self._uri(rel_path)}/{file.path}", file, *found)

        objects.in_parallel(compare, manifest.files)
        return manifest

    @contextlib.contextmanager
    def fetch(
        self,
        rel_path: str,
        *,
        verify: bool = True,  # noqa: ARG002 - downloads are always verified
        on_bytes: Callable[[int], None] | None = None,
    ) -> Iterator[Path]:
        manifest = self._require(rel_path)

        def bring(directory: Path) -> None:
            def receive(file: ManifestFile) -> None:
                key = self._key(rel_path, manifest.data, file.path)
                with _missing_is_corrupt():
                    found = self._place.receive(key, directory / file.path, on_bytes=on_bytes)
                checkpoint.require_same(f"{self._uri(rel_path)}/{file.path}", file, *found)

            checkpoint.require_space(directory, manifest.size_bytes)
            objects.in_parallel(receive, manifest.files)
            (directory / MANIFEST).write_bytes(replace(manifest, data="").to_bytes())

        name = hashlib.sha256(f"{self._uri(rel_path)} {manifest.data} {manifest.checkpoint_id}".encode()).hexdigest()
        with local_copy(staging(), name[:16], bring) as directory:
            yield directory

    def names(self, rel_dir: str) -> list[str]:
        found = self._place.directories(self._key(check_path(rel_dir, empty=True)))
        return [name for name in found if not name.startswith(".")]

    def committed(self, below: str = "") -> list[str]:
        keys = (meta["path"] for meta in self._place.listing(self._key(check_path(below, empty=True))))
        paths = [PurePosixPath(self._relative(key)) for key in keys]
        visible = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
        places = {path.parent for path in visible if path.name == MANIFEST}
        places.discard(PurePosixPath())
        outermost = [place.as_posix() for place in places if places.isdisjoint(place.parents)]
        ages: dict[str, float] = {}
        objects.in_parallel(lambda place: ages.update({place: self._age(place)}), outermost)
        return sorted(outermost, key=lambda place: (ages[place], place))

    def remove(self, rel_path: str) -> None:
        if self._place.commits_by_rename:
            self._place.delete([self._key(check_path(rel_path), MANIFEST)])
            return
        # The manifest first: without it, the other files are no checkpoint.
        keys = [meta["path"] for meta in self._place.listing(self._key(check_path(rel_path)))]
        manifest = self._key(rel_path, MANIFEST)
        if manifest in keys:
            self._place.delete([manifest])
            self._place.delete([key for key in keys if key != manifest])

    def pointer(self, rel_dir: str, name: str) -> str | None:
        try:
            return self._place.get(self._pointer(rel_dir, name))[0].decode().strip() or None
        except FileNotFoundError:
            return None

    def point(self, rel_dir: str, name: str, target: str) -> None:
        self._place.put(self._pointer(rel_dir, name), f"{target}\n".encode())

    def lock(self, rel_dir: str, owner: str, *, wait_s: float = 0.0) -> AbstractContextManager[Lock]:
        return object_lock(self._place, self._key(check_path(rel_dir, empty=True), _LOCK), owner, wait_s=wait_s)

    def _put_manifest(self, rel_path: str, complete: Manifest) -> bool:
        if self._place.put_if(self._key(rel_path, MANIFEST), complete.to_bytes(), version=None) is not None:
            return True
        # Refused, perhaps by itself: a request whose answer got lost is sent again.
        found = self.manifest(rel_path)
        if found is None or not self._place.commits_by_rename:
            return found is not None and found.data == complete.data
        return (found.checkpoint_id, found.created_at, found.files) == (
            complete.checkpoint_id,
            complete.created_at,
            complete.files,
        )

    def _forget(self, keys: Iterable[str]) -> None:
        """Remove files that will not be committed. If that fails, a later save removes them."""
        with contextlib.suppress(OSError, NotOwnerError):
            self._place.delete(keys)

    def _tidy(self, rel_dir: str, *, job_id: str, attempt: int) -> None:
        """Remove files of saves in the same directory that can never be committed. A server does that by itself."""
        if self._place.commits_by_rename:
            return
        saves: dict[str, dict[str, list[ObjectInfo]]] = defaultdict(lambda: defaultdict(list))
        with_manifest = set()
        for meta in self._place.listing(self._key(rel_dir)):
            parts = PurePosixPath(self._relative(meta["path"])).relative_to(rel_dir).parts
            if len(parts) == 2 and parts[1] == MANIFEST:
                with_manifest.add(parts[0])
            elif len(parts) > 2 and _DATA.fullmatch(parts[1]):
                saves[parts[0]][parts[1]].append(meta)
        for name, directories in saves.items():
            if name in with_manifest and len(directories) == 1:
                continue  # It is the committed one.
            dead = [data for data, found in directories.items() if _is_dead(data, found, job_id, attempt)]
            with contextlib.suppress(CorruptCheckpointError):
                manifest = self.manifest(f"{rel_dir}/{name}") if dead else None
                kept = manifest.data if manifest is not None else ""
                doomed = [meta["path"] for data in dead if data != kept for meta in directories[data]]
                self._place.delete(doomed)

    def _age(self, rel_path: str) -> float:
        try:
            manifest = self.manifest(rel_path)
        except CorruptCheckpointError:
            return 0.0  # Listed all the same, so that readers find it to be corrupt.
        return manifest.created_at if manifest is not None else 0.0

    def _is_committed(self, rel_path: str) -> bool:
        return self._place.head(self._key(rel_path, MANIFEST)) is not None

    def _require(self, rel_path: str) -> Manifest:
        return checkpoint.required(self.manifest(rel_path), self.locate(rel_path))

    def _key(self, *parts: str) -> str:
        path = PurePosixPath(self._place.key, *parts)
        return path.as_posix() if path.parts else ""

    def _relative(self, key: str) -> str:
        return key.removeprefix(self._place.below("") + "/") if self._place.key else key

    def _uri(self, rel_path: str) -> str:
        return self._place.locate(self._key(rel_path))

    def _pointer(self, rel_dir: str, name: str) -> str:
        # The dot distinguishes it from a checkpoint that is called `latest`.
        return self._key(check_path(rel_dir, empty=True), f".{check_path(name)}")


def _is_dead(data: str, found: list[ObjectInfo], job_id: str, attempt: int) -> bool:
    """Whether a save can never be committed: it is of an older attempt, or was abandoned."""
    match = _DATA.fullmatch(data)
    if match is not None and match["job"] == job_id and int(match["attempt"]) < attempt:
        return True
    return max(meta["last_modified"].timestamp() for meta in found) < time.time() - ABANDONED_S


@contextlib.contextmanager
def _missing_is_corrupt() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(str(error)) from error
