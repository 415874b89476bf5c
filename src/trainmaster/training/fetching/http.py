"""Files by http and https: resumed where a download broke off, and cached until they change.

Where only public addresses are allowed, each name is resolved once, its addresses are checked, and the connection goes
to a checked one; the same for every redirect. That is why httpx is used here, and not obstore or fsspec: they resolve
names themselves, after any check that could be made before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote, urljoin, urlsplit

import httpx

from trainmaster import __version__
from trainmaster.protocol.sockets import resolve
from trainmaster.server.core.training.sources import scheme_of
from trainmaster.training import steps
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.cache import Cache, Fetched, key_of, require_room
from trainmaster.training.steps import CredentialsError, InputError, OnProgress, SourceUnavailableError, ignore_progress

BACK_OFF_S = (1.0, 3.0, 9.0)
MAX_REDIRECTS = 10
_TIMEOUT = httpx.Timeout(60.0, connect=20.0)
_KEEP_VERSIONS_S = 24 * 3600.0
_LOOK_AT_DISK_EVERY = 64 << 20
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str
    shown: str
    """The name in messages: the path that the job gave, without what may be secret in it."""
    headers: Mapping[str, str]
    """Sent to the URL's own host only."""
    trusted: bool = False
    """The operator configured the address, so that it may be private; those of redirects may not."""


def target_of(url: str) -> Target:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # The URL is not shown: any part of it may be a password.
        raise InputError(f"what begins with {scheme_of(url)}:// here is not a URL; check its host and port") from None
    shown = f"{parts.scheme}://{parts.hostname or ''}{f':{port}' if port else ''}{parts.path}"
    if parts.username or parts.password:
        raise InputError(f"{shown}: a URL must not hold a user or a password")
    return Target(url=url, shown=shown, headers={})


def service_target(scheme: str, path: str, access: Access, query: str = "") -> Target:
    """The file of ScaiDrive or ScaiAtlas that a path names: below the service's URL, requested with the token."""
    service = access.service(scheme, path)
    inner = path.removeprefix(f"{scheme}://").strip("/")
    if not inner or {"..", "."} & set(inner.split("/")):
        raise InputError(f"{path}: a path of {scheme} names what lies in it, without '.' and '..'")
    return Target(
        url=f"{service.url}/{quote(inner)}{query}",
        shown=path,
        headers={"Authorization": f"Bearer {service.token}"},
        trusted=True,
    )


def download(target: Target, access: Access, on_progress: OnProgress = ignore_progress) -> Fetched:
    """Fetch a file, unless the cached one is current. Raises PreparingError."""
    cache = Cache(access.cache)
    key = key_of("http", target.url)
    with cache.lock("http", key):
        place = access.cache / "http" / key
        place.mkdir(parents=True, exist_ok=True)
        fetched = steps.try_again_while_unavailable(_Download(target, access, place, on_progress).run, BACK_OFF_S)
        os.utime(place)
        return fetched


class _Download:
    """The download of one file. The caller holds its lock."""

    def __init__(self, target: Target, access: Access, place: Path, on_progress: OnProgress) -> None:
        self._target = target
        self._access = access
        self._on_progress = on_progress
        self._limit = access.beginning_bytes
        self._place = place
        self._record = place / "record.json"
        self._part = place / "part"

    def run(self) -> Fetched:
        known = self._known()
        done = self._place / known["file"] if "file" in known else None
        headers = dict(self._target.headers)
        if done is not None and done.is_file():
            if known.get("etag"):
                headers["If-None-Match"] = known["etag"]
            elif known.get("last_modified"):
                headers["If-Modified-Since"] = known["last_modified"]
        elif self._part.is_file() and (validator := known.get("etag") or known.get("last_modified")):
            headers |= {"Range": f"bytes={self._part.stat().st_size}-", "If-Range": validator}
        try:
            with _answered(self._target, self._access, headers) as answer:
                if answer.status_code == HTTPStatus.NOT_MODIFIED and done is not None:
                    os.utime(done.parent)
                    return Fetched(path=done)
                return self._take(answer)
        except httpx.HTTPError as error:
            raise SourceUnavailableError(
                f"{self._target.shown}: the transfer broke off: {error or type(error).__name__}"
            ) from error

    def _take(self, answer: httpx.Response) -> Fetched:
        resumes = answer.status_code == HTTPStatus.PARTIAL_CONTENT
        start = self._part.stat().st_size if resumes else 0
        if resumes and not answer.headers.get("content-range", "").startswith(f"bytes {start}-"):
            self._part.unlink()
            raise SourceUnavailableError(f"{self._target.shown}: the server sent another part than the requested one")
        length = answer.headers.get("content-length", "")
        # A compressed transfer has another length, and cannot be resumed.
        plain = "content-encoding" not in answer.headers
        total = start + int(length) if length.isdecimal() and plain else None
        etag = answer.headers.get("etag", "")
        record = {
            "etag": "" if etag.startswith("W/") or not plain else etag,
            "last_modified": answer.headers.get("last-modified", "") if plain else "",
        }
        if not resumes:
            steps.write_whole(self._record, json.dumps(record))
        with open(self._part, "ab" if resumes else "wb") as file:
            whole = self._copy(answer, file, start, total)
        if whole and total is not None and self._part.stat().st_size != total:
            raise SourceUnavailableError(
                f"{self._target.shown}: only {self._part.stat().st_size} of {total} bytes came"
            )
        return self._finish(record, whole)

    def _copy(self, answer: httpx.Response, file: IO[bytes], size: int, total: int | None) -> bool:
        """Returns false where it stopped because no more is wanted."""
        if total is not None and self._limit is None:
            require_room(self._place, total - size, self._target.shown)
        looked = size
        for piece in answer.iter_bytes():
            file.write(piece)
            size += len(piece)
            if self._limit is not None and size >= self._limit:
                return size == total
            if size - looked >= _LOOK_AT_DISK_EVERY:
                looked = size
                require_room(self._place, 0, self._target.shown)
            self._on_progress(size / total if total else 0.0)
        return True

    def _finish(self, record: Mapping[str, str], whole: bool) -> Fetched:
        # Files in use do not change: a new version gets another name, and old versions stay for a while.
        for old in self._place.glob("version-*"):
            if time.time() - old.stat().st_mtime > _KEEP_VERSIONS_S:
                shutil.rmtree(old)
        directory = self._place / f"version-{os.urandom(6).hex()}"
        directory.mkdir()
        done = directory / _name_of(self._target.url)
        with open(self._part, "rb") as file:
            os.fsync(file.fileno())
        os.rename(self._part, done)
        if whole:
            steps.write_whole(self._record, json.dumps({**record, "file": str(done.relative_to(self._place))}))
        else:
            self._record.unlink(missing_ok=True)
        return Fetched(path=done, whole=whole)

    def _known(self) -> dict[str, str]:
        try:
            known: dict[str, str] = json.loads(self._record.read_text())
        except (OSError, ValueError):
            return {}
        return known


@contextlib.contextmanager
def _answered(target: Target, access: Access, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
    url, sent = target.url, {"User-Agent": f"trainmaster/{__version__}", "Accept-Encoding": "identity", **headers}
    for hop in range(MAX_REDIRECTS + 1):
        private = access.private_urls or (target.trusted and not hop)
        with _requested(target, url, sent, private=private) as answer:
            if not answer.has_redirect_location:
                _refuse_failure(target, answer)
                yield answer
                return
            further = urljoin(url, answer.headers["location"])
        if urlsplit(further)[:2] != urlsplit(target.url)[:2]:
            sent = {name: value for name, value in sent.items() if name not in target.headers}
        url = further
    raise InputError(f"{target.shown}: it is redirected more than {MAX_REDIRECTS} times")


@contextlib.contextmanager
def _requested(target: Target, url: str, headers: Mapping[str, str], *, private: bool) -> Iterator[httpx.Response]:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:
        raise InputError(f"{target.shown} is not a URL") from None
    if address.scheme not in ("http", "https") or not address.host:
        raise InputError(f"{target.shown}: it leads to {address.scheme}://{address.host}; only http and https are read")
    # A proxy would be a way around the check.
    with httpx.Client(timeout=_TIMEOUT, follow_redirects=False, trust_env=private) as client:
        request = client.build_request("GET", address, headers=headers)
        if not private:
            checked = _public_address(target, address)
            request = client.build_request(
                "GET",
                address.copy_with(host=checked),
                headers={**headers, "Host": address.netloc.decode()},
                extensions={"sni_hostname": address.host} if address.scheme == "https" else {},
            )
        try:
            answer = client.send(request, stream=True)
        except (httpx.ConnectError, httpx.TimeoutException, httpx.RemoteProtocolError, httpx.ReadError) as error:
            if isinstance(error, httpx.ConnectError) and _unknown_host(error):
                raise InputError(f"{target.shown}: there is no host {address.host}") from error
            raise SourceUnavailableError(
                f"{target.shown}: {address.host} does not answer: {error or type(error).__name__}"
            ) from error
        try:
            yield answer
        finally:
            answer.close()


def _public_address(target: Target, address: httpx.URL) -> str:
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        found = resolve(address.host, port)
    except (OSError, UnicodeError) as error:
        if _unknown_host(error):
            raise InputError(f"{target.shown}: there is no host {address.host}") from error
        raise SourceUnavailableError(f"{target.shown}: {address.host} cannot be looked up: {error}") from error
    for candidate, public in found.items():
        if public:
            return candidate
    raise InputError(
        f"{target.shown}: it leads to {address.host}, which is not a public address; this server lets jobs read from "
        "public addresses alone"
    )


def _refuse_failure(target: Target, answer: httpx.Response) -> None:
    status = answer.status_code
    if status < HTTPStatus.BAD_REQUEST:
        return
    said = f"{target.shown}: the server answers {status} {answer.reason_phrase}".rstrip()
    if status in _TRANSIENT:
        raise SourceUnavailableError(said)
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        got = "than it got" if target.headers else "than none"
        raise CredentialsError(f"{said}: it wants other credentials {got}")
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        raise SourceUnavailableError(f"{target.shown}: the file became shorter")
    raise InputError(f"{said}; check the address")


def _unknown_host(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False


def _name_of(url: str) -> str:
    name = _NOT_IN_NAMES.sub("_", unquote(urlsplit(url).path.rpartition("/")[2]))
    return name.strip("._")[-100:] or "download"
