"""The HTTP side of the API server: paths, users, faults and answers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kubernetes_server import statuses
from kubernetes_server.api import discovery
from kubernetes_server.api.lists import predicate_of
from kubernetes_server.api.requests import Target, body_of, content_type_of, options_of, target_of
from kubernetes_server.api.subresources import Subresources
from kubernetes_server.api.tables import is_table_wanted, table
from kubernetes_server.deletion import ORPHAN_WARNING, delete_options
from kubernetes_server.objects import Object
from kubernetes_server.resources import JOBS, REVIEWS, Resource
from kubernetes_server.statuses import StatusError
from kubernetes_server.store import Record

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster

log = logging.getLogger(__name__)
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_OPEN = ("/readyz", "/livez", "/healthz", "/version")
"""Paths that need no token."""


class Api:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._subresources = Subresources(cluster)

    def routes(self) -> list[Route]:
        return [Route("/{path:path}", self._answer, methods=_METHODS)]

    async def _answer(self, request: Request) -> Response:
        try:
            await self._cluster.faults.meet()
            return await self._route(request)
        except StatusError as error:
            return JSONResponse(error.body(), error.code, error.headers)
        except Exception as error:
            log.exception("%s %s", request.method, request.url.path)
            status = statuses.internal_error(f"{type(error).__name__}: {error}")
            return JSONResponse(status.body(), status.code)

    async def _route(self, request: Request) -> Response:
        path = request.url.path.rstrip("/")
        if path in _OPEN:
            return JSONResponse(discovery.VERSION) if path == "/version" else PlainTextResponse("ok")
        user = self._cluster.users.of(request.headers.get("authorization", ""))
        if (found := self._discovered(path)) is not None:
            return JSONResponse(found)
        parts = path.split("/")
        if not (path.startswith("/api/v1/") or (path.startswith("/apis/") and len(parts) > 4)):
            return PlainTextResponse("404 page not found\n", 404)
        target = target_of(request, self._cluster.resources)
        self._cluster.users.authorize(user, target.access(), target.resource)
        if target.resource is REVIEWS:
            return await self._subresources.review(request, user)
        if target.subresource and target.subresource != "status":
            return await self._subresources.answer(request, target)
        verbs: dict[str, Callable[[Request, Target], Awaitable[Response]]] = {
            "get": self._get,
            "list": self._list,
            "watch": self._watch,
            "create": self._create,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
            "deletecollection": self._delete_collection,
        }
        if bool(target.name) == (target.verb in ("create", "list", "deletecollection")) and target.verb != "watch":
            raise statuses.method_not_allowed()
        return await verbs[target.verb](request, target)

    def _discovered(self, path: str) -> dict[str, Any] | None:
        resources = self._cluster.resources
        parts = path.strip("/").split("/")
        match parts:
            case ["api"]:
                return discovery.api_versions()
            case ["apis"]:
                return discovery.group_list(resources)
            case ["api", "v1"]:
                return discovery.resource_list(resources, "", "v1")
            case ["apis", group] if group in resources.groups():
                return {"kind": "APIGroup", "apiVersion": "v1", **discovery.group(resources, group)}
            case ["apis", group, version] if version in resources.versions(group):
                return discovery.resource_list(resources, group, version)
            case ["openapi", "v3"]:
                return discovery.openapi_index(resources)
            case ["openapi", "v3", "api", "v1"]:
                return discovery.openapi(resources, "", "v1")
            case ["openapi", "v3", "apis", group, version]:
                return discovery.openapi(resources, group, version)
        return None

    # -- reading --

    async def _get(self, request: Request, target: Target) -> Response:
        obj = self._cluster.operations.get(target.resource, target.key)
        return self._shown(request, target.resource, obj)

    async def _list(self, request: Request, target: Target) -> Response:
        resource = target.resource
        records, metadata = self._cluster.lists.page(request, resource, target.namespace)
        if is_table_wanted(request.headers.get("accept", "")):
            objects = [record.object for record in records]
            return JSONResponse(table(resource, objects, metadata, request.query_params.get("includeObject", "")))
        head = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": metadata}
        # In slices, since a list of thousands would keep everybody else waiting.
        parts = []
        for start in range(0, len(records), 500):
            parts += [_json(resource, record) for record in records[start : start + 500]]
            if start:
                await asyncio.sleep(0)
        content = b'%s,"items":[%s]}' % (json.dumps(head)[:-1].encode(), b",".join(parts))
        return Response(content, media_type="application/json")

    async def _watch(self, request: Request, target: Target) -> Response:
        resource = target.resource
        show = None
        if is_table_wanted(request.headers.get("accept", "")):
            include = request.query_params.get("includeObject", "")
            first = True

            def show(obj: Object) -> bytes:
                nonlocal first
                version = {"resourceVersion": obj["metadata"]["resourceVersion"]}
                rows = table(resource, [obj], version, include, headers=first)
                first = False
                return json.dumps(rows).encode()

        if target.name:
            name = target.name
            request.scope["query_string"] += f"&fieldSelector=metadata.name%3D{name}".encode()
            request = Request(request.scope, request.receive)
        lines = self._cluster.watches.stream(request, resource, target.namespace, show)
        return StreamingResponse(lines, media_type="application/json")

    # -- writing --

    async def _create(self, request: Request, target: Target) -> Response:
        body = await body_of(request)
        options = options_of(request, "")
        obj = self._cluster.operations.create(target.resource, target.namespace, body, options)
        return self._shown(request, target.resource, obj, 201, options.warnings)

    async def _update(self, request: Request, target: Target) -> Response:
        body = await body_of(request)
        options = options_of(request, target.subresource)
        obj = self._cluster.operations.update(target.resource, target.key, body, options)
        return self._shown(request, target.resource, obj, 200, options.warnings)

    async def _patch(self, request: Request, target: Target) -> Response:
        body = await body_of(request)
        options = options_of(request, target.subresource)
        obj, created = self._cluster.operations.patch(
            target.resource, target.key, content_type_of(request), body, options
        )
        return self._shown(request, target.resource, obj, 201 if created else 200, options.warnings)

    async def _delete(self, request: Request, target: Target) -> Response:
        options = delete_options(await body_of(request), dict(request.query_params))
        warnings = [ORPHAN_WARNING] if target.resource is JOBS and options.propagation is None else []
        obj = self._cluster.operations.deletion.delete(target.resource, target.key, options)
        return self._shown(request, target.resource, obj, 200, warnings)

    async def _delete_collection(self, request: Request, target: Target) -> Response:
        options = delete_options(await body_of(request), dict(request.query_params))
        accepts = predicate_of(request, target.resource) or (lambda obj: True)
        resource, store = target.resource, self._cluster.store
        found = [each for each in store.records(resource.store_key, target.namespace) if accepts(each.object)]
        for record in found:
            self._cluster.operations.deletion.delete(resource, record.key, options)
        head = {"resourceVersion": str(store.version)}
        items = [record.object for record in found]
        return JSONResponse(
            {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": head, "items": items}
        )

    def _shown(
        self, request: Request, resource: Resource, obj: Object, code: int = 200, warnings: list[str] | None = None
    ) -> Response:
        if obj.get("kind") == resource.kind:
            if is_table_wanted(request.headers.get("accept", "")):
                version = {"resourceVersion": obj["metadata"].get("resourceVersion", "")}
                obj = table(resource, [obj], version, request.query_params.get("includeObject", ""))
            elif obj["apiVersion"] != resource.api_version:
                obj = {**obj, "apiVersion": resource.api_version}
        response = JSONResponse(obj, code)
        for warning in warnings or ():
            text = warning.replace('"', '\\"')
            response.headers.append("Warning", f'299 - "{text}"')
        return response


def _json(resource: Resource, record: Record) -> bytes:
    if record.object["apiVersion"] == resource.api_version:
        return record.json
    return json.dumps({**record.object, "apiVersion": resource.api_version}).encode()
