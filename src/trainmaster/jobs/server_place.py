"""A job's files at the server, for ranks that do not share its file system: the server as an object store.

A large file is sent in pieces, and nobody sees it before all have arrived; after any break it continues where the
server has it. Downloads continue likewise.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from trainmaster.jobs.attempt import NotOwnerError
from trainmaster.jobs.objects import AccessRefusedError, ObjectInfo, ObjectStoreError, OnBytes, in_parallel
from trainmaster.jobs.server_connection import TIMEOUT_S, Answer, ServerConnection
from trainmaster.protocol.attempt_files import AttemptFileUrl

_PIECE = 8 << 20
"""Of a file that is sent: four files at a time, each with a piece in memory."""
_SENT_TRIES = 3
"""A file that arrives damaged this often is damaged by something that stays."""
_FINISH_TIMEOUT_S = 900.0
"""The server may have to read a very large file once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """A path below an area of an attempt's files, or all paths that begin with it and a slash."""

    area: AttemptFileUrl
    connection: ServerConnection
    key: str
    commits_by_rename = True

    @staticmethod
    def open(url: str) -> ServerPlace:
        if (found := AttemptFileUrl.parse(url)) is None:
            raise ValueError(f"{url}: checkpoints are stored in a directory, below s3://bucket/prefix, or at a server")
        connection = ServerConnection(found.server_url)
        return ServerPlace(area=replace(found, path=""), connection=connection, key=found.path)

    @property
    def uri(self) -> str:
        return self.locate(self.key)

    def locate(self, key: str) -> str:
        return str(replace(self.area, path=key))

    def below(self, path: str) -> str:
        return f"{self.key}/{path}".strip("/")

    def head(self, key: str) -> ObjectInfo | None:
        answer = self._ask("HEAD", key)
        if answer.status == 404:
            return None
        size, version = int(answer.headers["content-length"]), _version(answer)
        return {"path": key, "size": size, "e_tag": version, "last_modified": datetime.now(UTC)}

    def listing(self, key: str) -> list[ObjectInfo]:
        found: list[ObjectInfo] = []
        after: str | None = ""
        while after is not None:
            page = self._list(prefix=key, after=after)
            found += [
                {
                    "path": each["path"],
                    "size": each["size"],
                    "e_tag": each["version"],
                    "last_modified": datetime.fromtimestamp(each["modified_at"], UTC),
                }
                for each in page["files"]
            ]
            after = page["next_after"]
        return found

    def directories(self, key: str) -> list[str]:
        names: list[str] = self._list(prefix=key, directories="true")["directories"]
        return names

    def get(self, key: str) -> tuple[bytes, str]:
        answer = self._ask("GET", key)
        if answer.status == 404:
            raise self._missing(key)
        return answer.body, _version(answer)

    def put(self, key: str, data: bytes) -> None:
        self._put(key, data, {})

    def put_if(self, key: str, data: bytes, *, version: str | None) -> str | None:
        condition = {"If-None-Match": "*"} if version is None else {"If-Match": f'"{version}"'}
        answer = self._put(key, data, condition)
        return None if answer.status == 412 else str(answer.data["version"])

    def delete(self, keys: Iterable[str]) -> None:
        in_parallel(lambda key: self._ask("DELETE", key), keys)

    def copy(self, source: str, target: str) -> None:
        """Files of a save need not move: the server finds them by the save, wherever it is committed."""

    def receive(self, key: str, target: Path, *, on_bytes: OnBytes | None = None) -> tuple[int, str]:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{os.urandom(6).hex()}.part")
        try:
            with open(part, "xb") as file:
                found = self._read(key, on_bytes, file.write)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
        return found

    def digest(self, key: str, *, on_bytes: OnBytes | None = None) -> tuple[int, str]:
        return self._read(key, on_bytes, len)

    def send_all(self, files: Mapping[Path, str]) -> None:
        in_parallel(lambda item: self._send(*item), files.items())

    def _read(self, key: str, on_bytes: OnBytes | None, take: Callable[[bytes], object]) -> tuple[int, str]:
        """Read a file, which must not change meanwhile, from where each broken answer ended."""
        sha256, done, complete = hashlib.sha256(), 0, False
        version: str | None = None
        while not complete:
            before = done
            for _ in self.connection.tries():
                with self.connection.trying():
                    asked = {"Range": f"bytes={done}-"} if done else {}
                    with self.connection.receiving(self._path(key), asked) as (answer, pieces):
                        if answer.status == 404:
                            raise self._missing(key)
                        if answer.status != 416:  # all of it is there already
                            _refuse(answer, self.locate(key))
                            version = version or _version(answer)
                            if _version(answer) != version or (done and answer.status != 206):
                                raise ObjectStoreError(f"{self.locate(key)}: it was replaced while it was read")
                            for piece in pieces:
                                take(piece)
                                sha256.update(piece)
                                done += len(piece)
                                if on_bytes is not None:
                                    on_bytes(len(piece))
                    complete = True
                if complete or done > before:
                    break
        return done, sha256.hexdigest()

    def _send(self, path: Path, key: str) -> None:
        for _ in range(_SENT_TRIES):
            if self._sent(path, key, os.urandom(16).hex()):
                return
        raise ObjectStoreError(f"{self.locate(key)}: the server got other bytes than were sent, {_SENT_TRIES} times")

    def _sent(self, path: Path, key: str, upload: str) -> bool:
        """Send a file once; False if it arrived damaged."""
        sha256, hashed, offset = hashlib.sha256(), 0, 0
        piece = bytearray(min(_PIECE, max(1, path.stat().st_size)))
        with open(path, "rb", buffering=0) as file:
            while True:
                file.seek(offset)
                data = memoryview(piece)[: file.readinto(piece) or 0]
                if offset + len(data) > hashed:
                    sha256.update(data[hashed - offset :])
                    hashed = offset + len(data)
                if data or not offset:
                    query = {"upload": upload, "offset": offset}
                    answer = self._ask("PUT", key, query, body=data, allowed=(409,))
                    offset = int((answer.error if answer.status == 409 else answer.data)["next_offset"])
                    if data:
                        continue
                finish = {"upload": upload, "size": hashed, "sha256": sha256.hexdigest()}
                answer = self._ask("POST", key, finish, allowed=(409, 422), timeout_s=_FINISH_TIMEOUT_S)
                if answer.status != 409:
                    return answer.status != 422
                if "next_offset" not in answer.error:
                    raise ObjectStoreError(f"{self.locate(key)}: {answer.error.get('message')}")
                offset = int(answer.error["next_offset"])

    def _put(self, key: str, data: bytes, condition: Mapping[str, str]) -> Answer:
        return self._ask("PUT", key, body=data, headers=condition, allowed=(412,))

    def _list(self, **query: str) -> Any:
        path = f"{self.area.route}/{self.area.area}?{urlencode(query)}"
        answer = self.connection.ask("GET", path)
        _refuse(answer, self.locate(query["prefix"]))
        return answer.data

    def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, object] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview | None = None,
        allowed: Iterable[int] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> Answer:
        """A good answer, one with an allowed status, or that there is no such file; else raises."""
        path = self._path(key) + (f"?{urlencode(query)}" if query else "")
        answer = self.connection.ask(method, path, headers=headers, body=body, timeout_s=timeout_s)
        absent = answer.status == 404 and method in ("GET", "HEAD", "DELETE")
        if not absent and answer.status not in allowed:
            _refuse(answer, self.locate(key))
        return answer

    def _path(self, key: str) -> str:
        return f"{self.area.route}/{self.area.area}/{quote(key)}"

    def _missing(self, key: str) -> FileNotFoundError:
        return FileNotFoundError(f"{self.locate(key)}: there is no such file")


def _version(answer: Answer) -> str:
    return answer.headers.get("etag", "").strip('"')


def _refuse(answer: Answer, where: str) -> None:
    """Raise for an answer that is a refusal."""
    if answer.status < 300:
        return
    said = answer.error.get("message") or f"status {answer.status}"
    details = answer.error.get("details")
    if isinstance(details, list) and details:
        with contextlib.suppress(KeyError, TypeError):
            said = f"{details[0]['field']} {details[0]['message']}"
    if answer.status == 410:
        raise NotOwnerError(f"{where}: {said}")
    if answer.status in (401, 403):
        raise AccessRefusedError(f"{where}: {said}")
    raise ObjectStoreError(f"{where}: {said}")
