"""Objects of S3 and the like, kept as long as they do not change. The client is that of `trainmaster.jobs.objects`."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from trainmaster.jobs import objects
from trainmaster.trainers.errors import CredentialsError, InputError, UnavailableError
from trainmaster.trainers.fetching.access import Access
from trainmaster.trainers.fetching.cache import Cache, emptied, key_of
from trainmaster.trainers.fetching.http import Fetched
from trainmaster.trainers.progress import Tell, tell_nobody

if TYPE_CHECKING:
    from obstore import ObjectMeta

_KEYS = "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in training_config.environment"
_WILD = frozenset("*?[")


def find(uri: str) -> list[str]:
    """The keys that a URI stands for, sorted: of an object, of all below a prefix, or of those that match a pattern.

    Raises:
        InputError: there are none.
        CredentialsError: the store refuses the credentials.
        UnavailableError: it does not answer.
    """
    return [meta["path"] for meta in _found(uri)]


def fetch(uri: str, keys: Sequence[str], access: Access, tell: Tell = tell_nobody) -> list[Fetched]:
    """Bring objects here; the files are in the order of the keys.

    Raises:
        InputError: one is not there.
        CredentialsError: the store refuses the credentials.
        UnavailableError: it does not answer.
    """
    with _translated(uri):
        place = objects.open_place(uri)
        metas = [_require(objects.head(place, key), uri, key) for key in keys]
        if access.beginning_bytes is not None:
            return [_beginning(place, meta, access) for meta in metas]
        meter = _Meter(sum(meta["size"] for meta in metas), tell)
        return [Fetched(path=_kept(place, meta, access, meter)) for meta in metas]


def directory(uri: str, access: Access, tell: Tell = tell_nobody) -> Path:
    """Bring everything below a prefix here, as a directory.

    Raises: as `fetch`.
    """
    with _translated(uri):
        place = objects.open_place(uri)
        metas = _found(uri)
        meter = _Meter(sum(meta["size"] for meta in metas), tell)
        key = key_of(uri, _endpoint(), [[meta["path"], meta["e_tag"], meta["size"]] for meta in metas])
        return Cache(access.cache).entry("s3", key, lambda draft: _bring_all(place, metas, emptied(draft), meter))


def _bring_all(place: objects.Place, metas: Sequence[ObjectMeta], target: Path, meter: _Meter) -> None:
    objects.in_parallel(
        lambda meta: objects.receive(
            place, meta["path"], target / PurePosixPath(meta["path"]).relative_to(place.key or "."), on_bytes=meter.add
        ),
        metas,
    )


def _kept(place: objects.Place, meta: ObjectMeta, access: Access, meter: _Meter) -> Path:
    name = PurePosixPath(meta["path"]).name
    key = key_of(place.bucket, _endpoint(), meta["path"], meta["e_tag"], meta["size"])

    def bring(draft: Path) -> None:
        objects.receive(place, meta["path"], emptied(draft) / name, on_bytes=meter.add)

    return Cache(access.cache).entry("s3", key, bring) / name


def _beginning(place: objects.Place, meta: ObjectMeta, access: Access) -> Fetched:
    import obstore

    assert access.beginning_bytes is not None
    size = min(meta["size"], access.beginning_bytes)
    target = access.cache / "beginnings" / key_of(place.uri, meta["path"]) / PurePosixPath(meta["path"]).name
    target.parent.mkdir(parents=True, exist_ok=True)
    data = obstore.get_range(place.store, meta["path"], start=0, end=size) if size else b""
    target.write_bytes(bytes(data))
    return Fetched(path=target, whole=size == meta["size"])


def _found(uri: str) -> list[ObjectMeta]:
    with _translated(uri):
        wild = next((index for index, sign in enumerate(uri) if sign in _WILD), None)
        if wild is not None:
            place = objects.open_place(uri[:wild].rpartition("/")[0])
            pattern = uri.removeprefix(f"{objects.S3_SCHEME}{place.bucket}/")
            metas = [meta for meta in objects.listing(place, place.key) if fnmatch.fnmatch(meta["path"], pattern)]
        else:
            place = objects.open_place(uri)
            exact = objects.head(place, place.key) if place.key and not uri.endswith("/") else None
            metas = [exact] if exact is not None else objects.listing(place, place.key)
        metas = sorted((meta for meta in metas if not meta["path"].endswith("/")), key=lambda meta: meta["path"])
        if not metas:
            raise InputError(f"{uri}: the store has no such object, and none below it")
        return metas


def _require(meta: ObjectMeta | None, uri: str, key: str) -> ObjectMeta:
    if meta is None:
        raise InputError(f"{uri}: the object {key} is gone")
    return meta


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


class _Meter:
    """Counts bytes that come through several threads."""

    def __init__(self, total: int, tell: Tell) -> None:
        self._total = total
        self._tell = tell
        self._done = 0

    def add(self, count: int) -> None:
        self._done += count
        self._tell(self._done / self._total if self._total else 1.0)


@contextlib.contextmanager
def _translated(uri: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{uri}: {error}") from error
    except (ImportError, ValueError) as error:
        raise InputError(str(error)) from error
    except objects.AccessRefusedError as error:
        raise CredentialsError(f"{error}; {_KEYS}") from error
    except (objects.ObjectStoreError, _store_error()) as error:
        if not os.environ.get("AWS_ACCESS_KEY_ID"):
            raise UnavailableError(f"{error}; if it wants credentials, {_KEYS}") from error
        raise UnavailableError(str(error)) from error


def _store_error() -> type[Exception]:
    from obstore.exceptions import BaseError

    return BaseError
