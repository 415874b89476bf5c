"""Files on object stores. Here is S3, configured by the usual variables (AWS_*), by obstore, which is imported on use;
`server_place` has the server, for jobs on other machines. Both are a `Place`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Store

S3_SCHEME = "s3://"
_PIECE = 8 << 20
"""A larger file moves in pieces of this size; each is one request, which is retried if it fails."""
_MAX_PIECES = 9_000
"""S3 accepts 10,000 parts of one object."""
_FILES_AT_ONCE = 4
_PIECES_AT_ONCE = 4
"""For each uploaded file; all pieces are in memory."""
_TIMEOUT = "180s"
"""Of one request: a piece takes longer only if nothing moves."""
_CONNECT_TIMEOUT = "20s"
_IMPATIENT_RETRIES = 3
_STORE_ERROR = re.compile(r"<Code>([^<]+)</Code>\s*<Message>([^<]+)</Message>")

_REFUSALS = {"AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}
"""Codes of a refused listing, which obstore raises as a generic error."""

OnBytes = Callable[[int], None]


class ObjectStoreError(OSError):
    """An object store is unreachable, or refuses a request."""


class AccessRefusedError(ObjectStoreError):
    """An object store refuses the credentials."""


class NoSuchBucketError(ObjectStoreError):
    pass


class ObjectInfo(TypedDict):
    path: str
    size: int
    e_tag: str | None
    last_modified: datetime


class Place(Protocol):
    """A key of an object store, or all keys that begin with it and a slash. Keys have no slashes at their ends."""

    @property
    def key(self) -> str: ...

    @property
    def uri(self) -> str: ...

    @property
    def commits_by_rename(self) -> bool:
        """Whether a manifest moves the files of its save beside itself, and is removed together with them."""

    def locate(self, key: str) -> str:
        """The URI of any key."""

    def below(self, path: str) -> str: ...

    def head(self, key: str) -> ObjectInfo | None:
        """The metadata of an object; None if there is none."""

    def listing(self, key: str) -> Sequence[ObjectInfo]: ...

    def directories(self, key: str) -> list[str]:
        """The names directly below a key, up to the next slash."""

    def get(self, key: str) -> tuple[bytes, str]:
        """A small object and its version; raises FileNotFoundError if there is none."""

    def put(self, key: str, data: bytes) -> None:
        """Write a small object, replacing any other."""

    def put_if(self, key: str, data: bytes, *, version: str | None) -> str | None:
        """Write a small object if there is none, or if it still has this version; returns the new version, else None.

        A request whose answer got lost is sent again, and may be refused because of itself: read the object then.
        """

    def copy(self, source: str, target: str) -> None: ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; missing ones are no error."""

    def receive(self, key: str, target: Path, *, on_bytes: OnBytes | None = None) -> tuple[int, str]:
        """Download an object, completely or not at all; returns its size and SHA-256."""

    def digest(self, key: str, *, on_bytes: OnBytes | None = None) -> tuple[int, str]:
        """Size and SHA-256 of an object, read completely."""

    def send_all(self, files: Mapping[Path, str]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPlace:
    """A key in a bucket, or all keys that begin with it and a slash."""

    store: S3Store
    bucket: str
    key: str
    """Without slashes at its ends; empty for the whole bucket."""

    @property
    def uri(self) -> str:
        return self.locate(self.key).rstrip("/")

    @property
    def commits_by_rename(self) -> bool:
        return False

    def locate(self, key: str) -> str:
        return f"{S3_SCHEME}{self.bucket}/{key}"

    def below(self, path: str) -> str:
        return f"{self.key}/{path}".strip("/")

    def head(self, key: str) -> ObjectInfo | None:
        return head(self, key)

    def listing(self, key: str) -> Sequence[ObjectInfo]:
        return listing(self, key)

    def directories(self, key: str) -> list[str]:
        return directories(self, key)

    def get(self, key: str) -> tuple[bytes, str]:
        return get(self, key)

    def put(self, key: str, data: bytes) -> None:
        put(self, key, data)

    def put_if(self, key: str, data: bytes, *, version: str | None) -> str | None:
        return put_if(self, key, data, version=version)

    def copy(self, source: str, target: str) -> None:
        with _translated(self, source):
            self.store.copy(source, target)

    def delete(self, keys: Iterable[str]) -> None:
        delete(self, keys)

    def receive(self, key: str, target: Path, *, on_bytes: OnBytes | None = None) -> tuple[int, str]:
        return receive(self, key, target, on_bytes=on_bytes)

    def digest(self, key: str, *, on_bytes: OnBytes | None = None) -> tuple[int, str]:
        return digest(self, key, on_bytes=on_bytes)

    def send_all(self, files: Mapping[Path, str]) -> None:
        send_all(self, files)

    def read(self, key: str, begin: int, end: int) -> bytes:
        """A part of an object, which is not empty; raises FileNotFoundError if there is none."""
        with _translated(self, key):
            return bytes(self.store.get(key, options={"range": (begin, end)}).bytes())

    def put_pieces(self, key: str, pieces: Iterator[bytes], size: int) -> None:
        """Write an object of a known size, replacing any other; it is there when all pieces are."""
        with _translated(self, key):
            if size <= _PIECE:
                self.store.put(key, b"".join(pieces))
            else:
                chunk = max(_PIECE, size // _MAX_PIECES + 1)
                self.store.put(key, pieces, chunk_size=chunk, max_concurrency=_PIECES_AT_ONCE)


Credentials = Callable[[], Mapping[str, Any]]
"""Called when there are no keys yet, and when those that it returned have expired."""


def open_place(uri: str, credentials: Credentials | None = None, *, patience_s: float | None = None) -> ObjectPlace:
    """The store of a URI, configured by the environment; `credentials` replaces its keys. No request is sent yet.
    `patience_s`: how long a request is repeated that failed, if not for minutes."""
    bucket, _, key = uri.removeprefix(S3_SCHEME).partition("/")
    if not uri.startswith(S3_SCHEME) or not bucket:
        raise ValueError(f"{uri}: the URI of an object is s3://bucket/key")
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise ImportError(f"{uri}: object stores need another package: pip install 'trainmaster[s3]'") from error
    settings: dict[str, Any] = {}
    # Only its first form is known to the package.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if endpoint:
        settings["endpoint"] = endpoint
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        settings["region"] = "us-east-1"
    options = {"connect_timeout": _CONNECT_TIMEOUT, "timeout": _TIMEOUT, "allow_http": endpoint.startswith("http:")}
    if credentials is not None:
        settings["credential_provider"] = credentials
    if patience_s is not None:
        settings["retry_config"] = {"max_retries": _IMPATIENT_RETRIES, "retry_timeout": timedelta(seconds=patience_s)}
        options["connect_timeout"] = f"{patience_s:g}s"
    store = S3Store(bucket, client_options=options, **settings)  # type: ignore[arg-type]
    return ObjectPlace(store=store, bucket=bucket, key="/".join(part for part in key.split("/") if part))


def head(place: ObjectPlace, key: str) -> ObjectMeta | None:
    """The metadata of an object; None if there is none."""
    with _translated(place, key), contextlib.suppress(FileNotFoundError):
        return place.store.head(key)
    return None


def listing(place: ObjectPlace, key: str) -> list[ObjectMeta]:
    with _translated(place, key):
        return [meta for batch in place.store.list(key or None) for meta in batch]


def directories(place: ObjectPlace, key: str) -> list[str]:
    """The names directly below a key, up to the next slash."""
    with _translated(place, key):
        found = place.store.list_with_delimiter(key or None)
    return [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]


def get(place: ObjectPlace, key: str) -> tuple[bytes, str]:
    """Read a small object and its version; raises FileNotFoundError if there is none."""
    with _translated(place, key):
        found = place.store.get(key)
        return bytes(found.bytes()), found.meta["e_tag"] or ""


def put(place: ObjectPlace, key: str, data: bytes) -> None:
    """Write a small object, replacing any other."""
    with _translated(place, key):
        place.store.put(key, data)


def put_if(place: ObjectPlace, key: str, data: bytes, *, version: str | None) -> str | None:
    """Write a small object if there is none, or if it still has this version; returns the new version, else None.

    A request whose answer got lost is sent again, and may be refused because of itself: read the object to find out.
    """
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    with _translated(place, key):
        try:
            return place.store.put(key, data, mode={"e_tag": version} if version else "create")["e_tag"] or ""
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            return None


def delete(place: ObjectPlace, keys: Iterable[str]) -> None:
    """Remove objects; missing ones are no error."""
    doomed = list(keys)
    with _translated(place, place.key), contextlib.suppress(FileNotFoundError):
        if doomed:
            place.store.delete(doomed)


def receive(place: ObjectPlace, key: str, target: Path, *, on_bytes: OnBytes | None = None) -> tuple[int, str]:
    """Download an object, completely or not at all; returns its size and SHA-256."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{os.urandom(6).hex()}.part")
    try:
        with open(part, "xb") as file:
            digest = _digest(place, key, on_bytes, file.write)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return digest


def receive_version(place: ObjectPlace, meta: ObjectMeta, target: Path, *, on_bytes: OnBytes | None = None) -> None:
    """Download one version of an object, continuing where an earlier call broke off. Not for concurrent callers."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with open(part, "ab") as file, _translated(place, meta["path"]):
        done = file.tell()
        if on_bytes is not None and done:
            on_bytes(done)
        for piece in _pieces(place, meta, done, on_bytes):
            file.write(piece)
            file.flush()
    os.replace(part, target)


def digest(place: ObjectPlace, key: str, *, on_bytes: OnBytes | None = None) -> tuple[int, str]:
    """Size and SHA-256 of an object, read completely."""
    return _digest(place, key, on_bytes, len)


def send_all(place: ObjectPlace, files: Mapping[Path, str]) -> None:
    in_parallel(lambda item: _send(place, *item), files.items())


def in_parallel(work: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Call a function for each item, several at a time; the first exception is raised, and the rest is not started."""
    with ThreadPoolExecutor(max_workers=_FILES_AT_ONCE) as pool:
        list(pool.map(work, items))


def _digest(
    place: ObjectPlace, key: str, on_bytes: OnBytes | None, take: Callable[[memoryview], object]
) -> tuple[int, str]:
    sha256 = hashlib.sha256()
    with _translated(place, key):
        meta = place.store.head(key)
        for piece in _pieces(place, meta, 0, on_bytes):
            take(piece)
            sha256.update(piece)
    return meta["size"], sha256.hexdigest()


def _pieces(place: ObjectPlace, meta: ObjectMeta, start: int, on_bytes: OnBytes | None) -> Iterator[memoryview]:
    """Download an object in pieces, all of one version: another client may replace the object meanwhile."""
    for begin in range(start, meta["size"], _PIECE):
        span = (begin, min(begin + _PIECE, meta["size"]))
        yield memoryview(place.store.get(meta["path"], options={"range": span, "if_match": meta["e_tag"]}).bytes())
        if on_bytes is not None:
            on_bytes(span[1] - span[0])


def _send(place: ObjectPlace, path: Path, key: str) -> None:
    with _translated(place, key):
        place.store.put(
            key,
            path,
            chunk_size=max(_PIECE, path.stat().st_size // _MAX_PIECES + 1),
            max_concurrency=_PIECES_AT_ONCE,
        )


@contextlib.contextmanager
def _translated(place: ObjectPlace, key: str) -> Iterator[None]:
    """Raise obstore's errors as ours, in one line that names the object."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    where = place.locate(key)
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: there is no such object") from error
    except BaseError as error:
        store_error = _STORE_ERROR.search(str(error))
        line = store_error.expand(r"\1: \2") if store_error else " ".join(str(error).partition("\n\n")[0].split())
        code = store_error[1] if store_error else ""
        refused = isinstance(error, PermissionDeniedError | UnauthenticatedError) or code in _REFUSALS
        kind = AccessRefusedError if refused else ObjectStoreError
        if code == "NoSuchBucket":
            kind = NoSuchBucketError
        raise kind(f"{where}: {line[:500]}") from error
