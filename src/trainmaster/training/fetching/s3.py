"""Objects of S3 and the like, kept as long as they do not change. The client is that of `trainmaster.jobs.objects`."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from trainmaster.jobs import objects
from trainmaster.training.errors import CredentialsError, InputError, UnavailableError
from trainmaster.training.fetching.access import Access, Remedies
from trainmaster.training.fetching.cache import Cache, Fetched, emptied, key_of, require_room
from trainmaster.training.fetching.file_choice import is_ignored
from trainmaster.training.progress import Tell, tell_nobody

if TYPE_CHECKING:
    from obstore import ObjectMeta

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
    with _translated(uri, access):
        place = objects.open_place(uri)
        metas = [_require(objects.head(place, key), uri, key) for key in keys]
        if access.beginning_bytes is not None:
            return [_beginning(place, meta, access) for meta in metas]
        meter = _Meter(sum(meta["size"] for meta in metas), tell)
        return [Fetched(path=_kept(place, meta, access, meter)) for meta in metas]


def directory(uri: str, access: Access, tell: Tell = tell_nobody, *, ignored: Sequence[str] = ()) -> Path:
    """Bring an object, or everything below a prefix, here, as a directory. What was brought before is not again.

    Args:
        uri: what to bring.
        access: what may be reached.
        tell: told which share is done.
        ignored: patterns of what is left out.

    Raises: as `fetch`.
    """
    with _translated(uri, access):
        place = objects.open_place(uri, access.s3_credentials)
        names = {name: meta for meta in _found(uri, access) if not is_ignored(name := _name(place, meta), ignored)}
        if not names:
            raise InputError(f"{uri}: nothing is left of it; check the patterns of what is ignored")
        key = key_of(uri, _endpoint(), [[meta["path"], meta["e_tag"], meta["size"]] for meta in names.values()])
        meter = _Meter(sum(meta["size"] for meta in names.values()), tell)
        return Cache(access.cache).entry("s3", key, lambda draft: _bring_all(place, names, draft, meter))


def _bring_all(place: objects.Place, names: Mapping[str, ObjectMeta], target: Path, meter: _Meter) -> None:
    """Fill the draft of an entry, whose key has the version of each object: files that are there are the same ones."""
    missing = {}
    for name, meta in names.items():
        if (target / name).is_file():
            meter.add(meta["size"])
        else:
            missing[name] = meta
    require_room(target, sum(meta["size"] for meta in missing.values()), place.uri)
    objects.in_parallel(
        lambda item: objects.receive_version(place, item[1], target / item[0], on_bytes=meter.add), missing.items()
    )


def _name(place: objects.Place, meta: ObjectMeta) -> str:
    """What an object is called in the directory of those below a place; the place itself by its last part."""
    path = PurePosixPath(meta["path"])
    if ".." in path.parts:
        raise InputError(f"{place.uri}: the key {meta['path']!r} would lie outside of its directory")
    return path.name if str(path) == place.key else path.relative_to(place.key or ".").as_posix()


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


def _found(uri: str, access: Access | None = None) -> list[ObjectMeta]:
    credentials = access.s3_credentials if access else None
    with _translated(uri, access):
        wild = next((index for index, sign in enumerate(uri) if sign in _WILD), None)
        if wild is not None:
            place = objects.open_place(uri[:wild].rpartition("/")[0], credentials)
            pattern = uri.removeprefix(f"{objects.S3_SCHEME}{place.bucket}/")
            metas = [meta for meta in objects.listing(place, place.key) if fnmatch.fnmatch(meta["path"], pattern)]
        else:
            place = objects.open_place(uri, credentials)
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
def _translated(uri: str, access: Access | None = None) -> Iterator[None]:
    remedy = (access.remedies if access else Remedies()).s3_keys
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"{uri}: {error}") from error
    except objects.NoSuchBucketError as error:
        raise InputError(f"{error}; check its name, and the store's endpoint") from error
    except (ImportError, ValueError) as error:
        raise InputError(str(error)) from error
    except objects.AccessRefusedError as error:
        raise CredentialsError(f"{error}; {remedy}") from error
    except (objects.ObjectStoreError, _store_error()) as error:
        if not os.environ.get("AWS_ACCESS_KEY_ID"):
            raise UnavailableError(f"{error}; if it wants credentials, {remedy}") from error
        raise UnavailableError(str(error)) from error


def _store_error() -> type[Exception]:
    from obstore.exceptions import BaseError

    return BaseError
