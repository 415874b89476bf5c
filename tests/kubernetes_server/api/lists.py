"""Lists: selectors and pages."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from kubernetes_server.objects import Object
from kubernetes_server.resources import Resource
from kubernetes_server.selectors import field_predicate, label_predicate
from kubernetes_server.statuses import StatusError, bad_request, expired
from kubernetes_server.store import Record, Store

_TOO_OLD = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter."
)


@dataclass
class Lists:
    store: Store
    _rest: dict[int, tuple[int, list[Record]]] = field(default_factory=dict)
    """What the next page of an unfinished list is taken from, with the version of its first page."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def page(self, request: Request, resource: Resource, namespace: str) -> tuple[list[Record], Object]:
        """The objects of one page, and the metadata of the list."""
        query = request.query_params
        limit = int(query.get("limit") or 0)
        if token := query.get("continue", ""):
            version, records = self._take(token)
        else:
            self._check_version(query.get("resourceVersion", ""), query.get("resourceVersionMatch", ""))
            version, records = self.store.version, self.store.records(resource.store_key, namespace)
            accepts = predicate_of(request, resource)
            if accepts is not None:
                records = [record for record in records if accepts(record.object)]
        metadata: Object = {"resourceVersion": str(version)}
        if limit and len(records) > limit:
            rest = records[limit:]
            metadata["continue"] = self._keep(version, rest)
            if not (query.get("labelSelector") or query.get("fieldSelector")):
                metadata["remainingItemCount"] = len(rest)
            records = records[:limit]
        return records, metadata

    def _check_version(self, version: str, match: str) -> None:
        if not version or version == "0":
            return
        if not version.isdigit():
            raise bad_request(f'Invalid value: "{version}": strconv.ParseUint: parsing "{version}": invalid syntax')
        if int(version) > self.store.version:
            message = f"Too large resource version: {version}, current: {self.store.version}"
            cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
            raise StatusError(504, "Timeout", message, {"causes": [cause], "retryAfterSeconds": 1})
        if match == "Exact" and int(version) < self.store.compacted:
            raise expired(f"The resourceVersion for the provided list is too old: {version}")

    def _keep(self, version: int, rest: list[Record]) -> str:
        number = next(self._numbers)
        self._rest[number] = (version, rest)
        if len(self._rest) > 100:
            del self._rest[min(self._rest)]
        text = json.dumps({"v": "meta.k8s.io/v1", "rv": version, "page": number})
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    def _take(self, token: str) -> tuple[int, list[Record]]:
        try:
            content = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
            number = int(content["page"])
        except (ValueError, KeyError, binascii.Error) as error:
            raise bad_request(f"continue key is not valid: {error}") from error
        found = self._rest.get(number)
        if found is None or found[0] < self.store.compacted:
            raise expired(_TOO_OLD)
        return found


def predicate_of(request: Request, resource: Resource) -> Callable[[Object], bool] | None:
    """What the selectors of a request accept, or None if there are none."""
    query = request.query_params
    by_label = label_predicate(query.get("labelSelector", ""))
    by_field = field_predicate(query.get("fieldSelector", ""), resource)
    if by_label and by_field:
        return lambda obj: by_label(obj) and by_field(obj)
    return by_label or by_field
