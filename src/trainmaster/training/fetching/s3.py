"""Objects of S3 and compatible stores, cached until they change, and the roles that are assumed for them.

Requests to STS (`AssumeRole`) are signed here: obstore does not call it without boto3.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import hmac
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import httpx

from trainmaster.jobs import objects
from trainmaster.server.core.training.sources import fixed_part
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.cache import Cache, Fetched, emptied, key_of, require_room
from trainmaster.training.fetching.file_choice import is_ignored
from trainmaster.training.steps import CredentialsError, InputError, OnProgress, SourceUnavailableError, ignore_progress

if TYPE_CHECKING:
    from obstore import ObjectMeta


def fetch(
    uri: str, metas: Sequence[ObjectMeta], access: Access, on_progress: OnProgress = ignore_progress
) -> list[Fetched]:
    """Fetch objects that `find` found; the files are in their order. Raises PreparingError."""
    with _translated(uri, access):
        place = objects.open_place(uri)
        if access.beginning_bytes is not None:
            return [_beginning(place, meta, access) for meta in metas]
        meter = _Meter(sum(meta["size"] for meta in metas), on_progress)
        return [Fetched(path=_kept(place, meta, access, meter)) for meta in metas]


def directory(
    uri: str, access: Access, on_progress: OnProgress = ignore_progress, *, ignored: Sequence[str] = ()
) -> Path:
    """Fetch an object, or everything below a prefix but `ignored` keys, into a directory that is cached."""
    with _translated(uri, access):
        place = objects.open_place(uri, access.s3_credentials)
        names = {name: meta for meta in find(uri, access) if not is_ignored(name := _name(place, meta), ignored)}
        if not names:
            raise InputError(f"{uri}: nothing is left of it; check the patterns of what is ignored")
        key = key_of(uri, endpoint(), [[meta["path"], meta["e_tag"], meta["size"]] for meta in names.values()])
        meter = _Meter(sum(meta["size"] for meta in names.values()), on_progress)
        return Cache(access.cache).entry("s3", key, lambda draft: _bring_all(place, names, draft, meter))


def _bring_all(place: objects.ObjectPlace, names: Mapping[str, ObjectMeta], target: Path, meter: _Meter) -> None:
    """Fill an entry's draft. The entry's key has each object's version, so that files which exist are current."""
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


def _name(place: objects.ObjectPlace, meta: ObjectMeta) -> str:
    path = PurePosixPath(meta["path"])
    if ".." in path.parts:
        raise InputError(f"{place.uri}: the key {meta['path']!r} would lie outside of its directory")
    return path.name if str(path) == place.key else path.relative_to(place.key or ".").as_posix()


def _kept(place: objects.ObjectPlace, meta: ObjectMeta, access: Access, meter: _Meter) -> Path:
    name = PurePosixPath(meta["path"]).name
    key = key_of(place.bucket, endpoint(), meta["path"], meta["e_tag"], meta["size"])

    def bring(draft: Path) -> None:
        objects.receive(place, meta["path"], emptied(draft) / name, on_bytes=meter.add)

    return Cache(access.cache).entry("s3", key, bring) / name


def _beginning(place: objects.ObjectPlace, meta: ObjectMeta, access: Access) -> Fetched:
    import obstore

    assert access.beginning_bytes is not None
    size = min(meta["size"], access.beginning_bytes)
    target = access.cache / "beginnings" / key_of(place.uri, meta["path"]) / PurePosixPath(meta["path"]).name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(bytes(obstore.get_range(place.store, meta["path"], start=0, end=size)) if size else b"")
    return Fetched(path=target, whole=size == meta["size"])


def find(uri: str, access: Access) -> list[ObjectMeta]:
    """The objects of a URI, sorted by their keys: one, everything below a prefix, or all that match a pattern."""
    credentials = access.s3_credentials
    with _translated(uri, access):
        if (above := fixed_part(uri)) != uri:
            place = objects.open_place(above, credentials)
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


def endpoint() -> str:
    """The endpoint of a store that is not AWS's; empty for AWS."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


class _Meter:
    def __init__(self, total: int, on_progress: OnProgress) -> None:
        self._total = total
        self._on_progress = on_progress
        self._done = 0

    def add(self, count: int) -> None:
        self._done += count
        self._on_progress(self._done / self._total if self._total else 1.0)


@contextlib.contextmanager
def _translated(uri: str, access: Access) -> Iterator[None]:
    remedy = access.remedies.s3_keys
    try:
        from obstore.exceptions import BaseError  # where it is not installed, that is an error to report as well

        yield
    except FileNotFoundError as error:
        raise InputError(f"{uri}: {error}") from error
    except objects.NoSuchBucketError as error:
        raise InputError(f"{error}; check its name, and the store's endpoint") from error
    except (ImportError, ValueError) as error:
        raise InputError(str(error)) from error
    except objects.AccessRefusedError as error:
        raise CredentialsError(f"{error}; {remedy}") from error
    except (objects.ObjectStoreError, BaseError) as error:
        if not os.environ.get("AWS_ACCESS_KEY_ID"):
            raise SourceUnavailableError(f"{error}; if it wants credentials, {remedy}") from error
        raise SourceUnavailableError(str(error)) from error


_TIMEOUT_S = 30.0


def in_role(role: str | None, access: Access) -> Access:
    """The access with the keys of a role, assumed by those of the environment, and again whenever they expire."""
    if not role:
        return access
    remedy = access.remedies.s3_keys
    if not (os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY")):
        raise InputError(f"{role}: a role is assumed with keys, and there are none; {remedy}")
    first = [_assume(role, remedy)]  # now, so that an error is ours and not obstore's

    def credentials() -> Mapping[str, Any]:
        return first.pop() if first else _assume(role, remedy)

    return replace(access, s3_credentials=credentials)


def _assume(role: str, remedy: str) -> Mapping[str, Any]:
    form = {"Action": "AssumeRole", "Version": "2011-06-15", "RoleArn": role, "RoleSessionName": "trainmaster"}
    body = urlencode(form)
    # Stores that are not AWS's have STS at their own endpoint.
    own = os.environ.get("AWS_ENDPOINT_URL_STS") or endpoint()
    url = f"{own.rstrip('/')}/" if own else f"https://sts.{region()}.amazonaws.com/"
    try:
        answer = httpx.post(url, content=body, headers=signed(url, body, datetime.now(UTC)), timeout=_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise SourceUnavailableError(f"{role}: {url}, which hands out its keys, does not answer: {error}") from error
    if answer.is_server_error:
        raise SourceUnavailableError(f"{role}: {url}, which hands out its keys, answers {answer.status_code}")
    found = _texts(answer.text)
    if answer.is_error or "AccessKeyId" not in found:
        said = f"{found.get('Code', answer.status_code)}: {found.get('Message', 'no keys came')}"
        raise CredentialsError(f"{role}: the role cannot be assumed: {said[:500]}; {remedy}")
    return {
        "access_key_id": found["AccessKeyId"],
        "secret_access_key": found["SecretAccessKey"],
        "token": found.get("SessionToken"),
        "expires_at": datetime.fromisoformat(found["Expiration"]),
    }


def signed(url: str, body: str, now: datetime) -> dict[str, str]:
    """The headers of a POST of a form, signed with the keys of the environment (Signature Version 4)."""
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {
        "content-type": "application/x-www-form-urlencoded; charset=utf-8",
        "host": urlsplit(url).netloc,
        "x-amz-date": stamp,
    }
    if token := os.environ.get("AWS_SESSION_TOKEN"):
        headers["x-amz-security-token"] = token
    names = ";".join(sorted(headers))
    request = "\n".join(
        (
            "POST",
            urlsplit(url).path or "/",
            "",
            *(f"{name}:{headers[name]}" for name in sorted(headers)),
            "",
            names,
            hashlib.sha256(body.encode()).hexdigest(),
        )
    )
    scope = f"{stamp[:8]}/{region()}/sts/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{os.environ['AWS_SECRET_ACCESS_KEY']}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"{os.environ['AWS_ACCESS_KEY_ID']}/{scope}"
    return {
        **headers,
        "authorization": f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}",
    }


def region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _texts(document: str) -> dict[str, str]:
    try:
        elements = ElementTree.fromstring(document).iter()
    except ElementTree.ParseError:
        return {}
    return {element.tag.rpartition("}")[2]: element.text for element in elements if element.text}
