"""Watches: what changed since a version, as a stream of lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from kubernetes_server.api.lists import predicate_of
from kubernetes_server.api.requests import truth
from kubernetes_server.objects import Object
from kubernetes_server.resources import Resource
from kubernetes_server.statuses import StatusError, bad_request, expired, invalid_value
from kubernetes_server.store import Change, Record, Store, TooOldError

DEFAULT_TIMEOUT_S = 1800
Show = Callable[[Object], bytes]


class WatchDroppedError(Exception):
    """A test broke the connection of this watch."""


@dataclass
class Watches:
    store: Store
    bookmark_s: float
    _open: set[asyncio.Queue[Change | Exception | None]] = field(default_factory=set)

    def drop(self) -> int:
        """Break the connections of all watches; how many there were."""
        for queue in self._open:
            queue.put_nowait(WatchDroppedError())
        return len(self._open)

    def end(self) -> None:
        """End all watches as their timeout would."""
        for queue in self._open:
            queue.put_nowait(None)

    def stream(self, request: Request, resource: Resource, namespace: str, show: Show | None) -> AsyncIterator[bytes]:
        """
        Raises:
            StatusError: the parameters of the request are wrong.
        """
        query = request.query_params
        accepts = predicate_of(request, resource) or (lambda obj: True)
        version = query.get("resourceVersion", "")
        if version and not version.isdigit():
            raise bad_request(invalid_value("resourceVersion", version, "strconv.ParseUint: invalid syntax").message)
        initial = truth(request, "sendInitialEvents")
        if initial and query.get("resourceVersionMatch") != "NotOlderThan":
            message = (
                'ListOptions.meta.k8s.io "" is invalid: resourceVersionMatch: Forbidden: sendInitialEvents requires '
                "setting resourceVersionMatch to NotOlderThan"
            )
            raise StatusError(422, "Invalid", message, {"group": "meta.k8s.io", "kind": "ListOptions"})
        return self._lines(
            resource,
            namespace,
            accepts,
            show or (lambda obj: json.dumps(obj).encode()),
            plain=show is None,
            since=None if initial or version in ("", "0") else int(version),
            initial=initial,
            bookmarks=truth(request, "allowWatchBookmarks"),
            timeout_s=float(query.get("timeoutSeconds") or DEFAULT_TIMEOUT_S),
        )

    async def _lines(
        self, resource: Resource, namespace: str, accepts: Callable[[Object], bool], show: Show, *, plain: bool,
        since: int | None, initial: bool, bookmarks: bool, timeout_s: float,
    ) -> AsyncIterator[bytes]:  # fmt: skip
        queue: asyncio.Queue[Change | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        key = resource.store_key
        latest = 0
        """The last change of the kind since the watch began: bookmarks say no more, and before it there are none."""
        unsubscribe = self.store.subscribe(key, queue.put_nowait)
        self._open.add(queue)

        def line(kind: str, record: Record, version: int) -> bytes:
            own = plain and version == record.version and record.object.get("apiVersion") == resource.api_version
            if own:
                return _line(kind, record.json)
            metadata = {**record.object["metadata"], "resourceVersion": str(version)}
            return _line(kind, show({**record.object, "apiVersion": resource.api_version, "metadata": metadata}))

        try:
            if since is None:
                since = self.store.version
                for record in self.store.records(key, namespace):
                    if accepts(record.object):
                        yield line("ADDED", record, record.version)
                if initial and bookmarks:
                    yield _bookmark(resource, since, {"k8s.io/initial-events-end": "true"})
            else:
                try:
                    for change in self.store.since(key, since):
                        if out := _seen(change, namespace, accepts):
                            yield line(*out)
                        since = latest = change.version
                except TooOldError:
                    error = expired(f"too old resource version: {since} ({self.store.version})")
                    yield _line("ERROR", json.dumps(error.body()).encode())
                    return
            while (left_s := deadline - loop.time()) > 0:
                try:
                    change_or_end = await asyncio.wait_for(queue.get(), min(left_s, self.bookmark_s))
                except TimeoutError:
                    if bookmarks and latest:
                        yield _bookmark(resource, latest)
                    continue
                if change_or_end is None:
                    return
                if isinstance(change_or_end, Exception):
                    raise change_or_end
                if change_or_end.version > since:
                    latest = change_or_end.version
                    if out := _seen(change_or_end, namespace, accepts):
                        yield line(*out)
            if bookmarks and latest:
                yield _bookmark(resource, latest)
        finally:
            self._open.discard(queue)
            unsubscribe()


def _seen(change: Change, namespace: str, accepts: Callable[[Object], bool]) -> tuple[str, Record, int] | None:
    """How a change looks through a selector: an object may enter or leave it."""
    if namespace and change.record.key[0] != namespace:
        return None
    before = change.previous is not None and accepts(change.previous.object)
    after = change.kind != "DELETED" and accepts(change.record.object)
    if change.kind == "DELETED":
        return ("DELETED", change.record, change.version) if before else None
    if after:
        return ("MODIFIED" if before else "ADDED"), change.record, change.version
    if before:
        assert change.previous is not None
        return "DELETED", change.previous, change.version
    return None


def _line(kind: str, content: bytes) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), content)


def _bookmark(resource: Resource, version: int, annotations: dict[str, str] | None = None) -> bytes:
    metadata: Object = {"resourceVersion": str(version), "creationTimestamp": None}
    if annotations:
        metadata["annotations"] = annotations
    bookmark = {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}
    return _line("BOOKMARK", json.dumps(bookmark).encode())
