"""Files on an object store: brought here, and taken there.

Which store, and as whom, is said by the usual variables: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL. The package `obstore` is imported on use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import S3Store

S3_SCHEME = "s3://"
_PIECE = 8 << 20
"""A larger file moves in pieces of this size, each a request of its own that is tried again when it fails."""
_MAX_PIECES = 9_000
"""S3 takes 10,000 pieces of one object."""
_FILES_AT_ONCE = 4
_PIECES_AT_ONCE = 4
"""Of each file that is sent; all of them are in memory."""
_TIMEOUT = "180s"
"""Of one request: a piece takes longer only where nothing moves."""
_CONNECT_TIMEOUT = "20s"
_TOLD = re.compile(r"<Code>([^<]+)</Code>\s*<Message>([^<]+)</Message>")
"""What the store itself says of an error."""

_REFUSALS = {"AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}
"""What it says when it refuses a listing, of which the package makes an error like any other."""

OnBytes = Callable[[int], None]


class ObjectStoreError(OSError):
    """An object store cannot be reached, or refuses."""


class AccessRefusedError(ObjectStoreError):
    """An object store does not know these credentials, or allows them too little."""


class NoSuchBucketError(ObjectStoreError):
    """An object store has no bucket of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A key in a bucket; or all keys that begin with it and a slash."""

    store: S3Store
    bucket: str
    key: str
    """Without slashes at its ends; empty for the whole bucket."""

    @property
    def uri(self) -> str:
        """Of this place."""
        return f"{S3_SCHEME}{self.bucket}/{self.key}".rstrip("/")

    def below(self, path: str) -> str:
        """The key of a path below this place."""
        return f"{self.key}/{path}".strip("/")


Credentials = Callable[[], Mapping[str, Any]]
"""Asked for keys when there are none yet, and whenever those that it gave have expired."""


def open_place(uri: str, credentials: Credentials | None = None) -> Place:
    """The store behind a URI, as the environment describes it, its keys as well unless there are credentials.

    Nothing is asked of it yet.

    Raises:
        ImportError: the package for object stores is not installed.
        ValueError: this is no `s3://bucket/key`.
    """
    bucket, _, key = uri.removeprefix(S3_SCHEME).partition("/")
    if not uri.startswith(S3_SCHEME) or not bucket:
        raise ValueError(f"{uri}: an object is named like s3://bucket/key")
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise ImportError(f"{uri}: object stores need one more package: pip install 'trainmaster[s3]'") from error
    settings: dict[str, Any] = {}
    # Only its first form is known to the package.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    if endpoint:
        settings["endpoint"] = endpoint
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        settings["region"] = "us-east-1"
    options = {
        "connect_timeout": _CONNECT_TIMEOUT,
        "timeout": _TIMEOUT,
        "allow_http": endpoint.startswith("http:"),
    }
    if credentials is not None:
        settings["credential_provider"] = credentials
    store = S3Store(bucket, client_options=options, **settings)  # type: ignore[arg-type]
    return Place(store=store, bucket=bucket, key="/".join(part for part in key.split("/") if part))


def head(place: Place, key: str) -> ObjectMeta | None:
    """What is known of an object; None when there is none."""
    import obstore

    with _translated(place, key), contextlib.suppress(FileNotFoundError):
        return obstore.head(place.store, key)
    return None


def listing(place: Place, key: str) -> list[ObjectMeta]:
    """All objects below a key."""
    import obstore

    with _translated(place, key):
        return [meta for batch in obstore.list(place.store, key or None) for meta in batch]


def directories(place: Place, key: str) -> list[str]:
    """The names that keys below a key go on with, up to their next slash."""
    import obstore

    with _translated(place, key):
        found = obstore.list_with_delimiter(place.store, key or None)
    return [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]


def get(place: Place, key: str) -> tuple[bytes, str]:
    """A small object, and its version.

    Raises:
        FileNotFoundError: there is none.
    """
    import obstore

    with _translated(place, key):
        found = obstore.get(place.store, key)
        return bytes(found.bytes()), found.meta["e_tag"] or ""


def put(place: Place, key: str, data: bytes) -> None:
    """Write a small object, whatever was there."""
    import obstore

    with _translated(place, key):
        obstore.put(place.store, key, data)


def put_if(place: Place, key: str, data: bytes, *, version: str | None) -> str | None:
    """Write a small object if there is none, or if it has still this version.

    Returns:
        Its version; None when the condition did not hold. Since a request whose answer got lost is sent again, the
        object may be ours even then: whoever cares reads it.
    """
    import obstore
    from obstore.exceptions import AlreadyExistsError, PreconditionError

    with _translated(place, key):
        try:
            return obstore.put(place.store, key, data, mode={"e_tag": version} if version else "create")["e_tag"] or ""
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            return None


def delete(place: Place, keys: Iterable[str]) -> None:
    """Remove objects; those that are not there are no error."""
    import obstore

    doomed = list(keys)
    with _translated(place, place.key), contextlib.suppress(FileNotFoundError):
        if doomed:
            obstore.delete(place.store, doomed)


def receive(place: Place, key: str, target: Path, *, on_bytes: OnBytes | None = None) -> tuple[int, str]:
    """Bring one object here, whole or not at all; returns its size and SHA-256.

    Raises:
        FileNotFoundError: there is none.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{os.urandom(6).hex()}.part")
    try:
        with open(part, "xb") as file:
            digest = _digest(place, key, on_bytes, file.write)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return digest


def receive_version(place: Place, meta: ObjectMeta, target: Path, *, on_bytes: OnBytes | None = None) -> None:
    """Bring one version of an object here, going on where an earlier call broke off. Nobody else may do the same.

    Raises:
        FileNotFoundError: there is none any more.
    """
    import obstore

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with open(part, "ab") as file, _translated(place, meta["path"]):
        done = file.tell()
        if on_bytes is not None and done:
            on_bytes(done)
        for start in range(done, meta["size"], _PIECE):
            span = (start, min(start + _PIECE, meta["size"]))
            found = obstore.get(place.store, meta["path"], options={"range": span, "if_match": meta["e_tag"]})
            file.write(memoryview(found.bytes()))
            file.flush()
            if on_bytes is not None:
                on_bytes(span[1] - span[0])
    os.replace(part, target)


def digest(place: Place, key: str, *, on_bytes: OnBytes | None = None) -> tuple[int, str]:
    """Size and SHA-256 of an object, all of which is read.

    Raises:
        FileNotFoundError: there is none.
    """
    return _digest(place, key, on_bytes, len)


def send_all(place: Place, files: Mapping[Path, str]) -> None:
    """Take files to their keys, several at a time."""
    in_parallel(lambda item: _send(place, *item), files.items())


def in_parallel(work: Callable[[Any], object], items: Iterable[Any]) -> None:
    """Do something with each, several at a time; what one raises is raised, and the rest is left undone."""
    with ThreadPoolExecutor(max_workers=_FILES_AT_ONCE) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _digest(place: Place, key: str, on_bytes: OnBytes | None, take: Callable[[memoryview], object]) -> tuple[int, str]:
    import obstore

    sha256 = hashlib.sha256()
    with _translated(place, key):
        meta = obstore.head(place.store, key)
        for start in range(0, meta["size"], _PIECE):
            span = (start, min(start + _PIECE, meta["size"]))
            # All pieces of one version: somebody may replace it meanwhile.
            found = obstore.get(place.store, key, options={"range": span, "if_match": meta["e_tag"]})
            piece = memoryview(found.bytes())
            take(piece)
            sha256.update(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    return meta["size"], sha256.hexdigest()


def _send(place: Place, path: Path, key: str) -> None:
    import obstore

    with _translated(place, key):
        obstore.put(
            place.store,
            key,
            path,
            chunk_size=max(_PIECE, path.stat().st_size // _MAX_PIECES + 1),
            max_concurrency=_PIECES_AT_ONCE,
        )


@contextlib.contextmanager
def _translated(place: Place, key: str) -> Iterator[None]:
    """The package's errors as ours, in one line that names the object."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    where = f"{S3_SCHEME}{place.bucket}/{key}"
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: there is no such object") from error
    except BaseError as error:
        told = _TOLD.search(str(error))
        line = told.expand(r"\1: \2") if told else " ".join(str(error).partition("\n\n")[0].split())
        refused = isinstance(error, PermissionDeniedError | UnauthenticatedError) or (told and told[1] in _REFUSALS)
        kind = AccessRefusedError if refused else ObjectStoreError
        if told and told[1] == "NoSuchBucket":
            kind = NoSuchBucketError
        raise kind(f"{where}: {line[:500]}") from error
