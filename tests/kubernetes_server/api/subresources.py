"""Logs, evictions, bindings, tokens of service accounts, and reviews of one's own access."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kubernetes_server import statuses
from kubernetes_server.api.logs import lines_of
from kubernetes_server.api.requests import Target, body_of, truth
from kubernetes_server.api.users import Access, User, service_account
from kubernetes_server.deletion import delete_options
from kubernetes_server.objects import Object, now, set_condition, timestamp
from kubernetes_server.resources import PODS, REVIEWS
from kubernetes_server.statuses import bad_request

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster

_SUCCESS = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


class Subresources:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def answer(self, request: Request, target: Target) -> Response:
        match target.subresource, request.method:
            case "log", "GET":
                return self._log(request, target)
            case "eviction", "POST":
                return await self._evict(request, target)
            case "binding", "POST":
                return await self._bind(request, target)
            case "token", "POST":
                return await self._token(request, target)
        raise statuses.method_not_allowed()

    async def review(self, request: Request, user: User) -> Response:
        body = await body_of(request)
        wanted = body["spec"].get("resourceAttributes") or {}
        subresource = wanted.get("subresource")
        access = Access(
            verb=wanted.get("verb", ""),
            group=wanted.get("group", ""),
            resource=wanted.get("resource", "") + (f"/{subresource}" if subresource else ""),
            namespace=wanted.get("namespace", ""),
            name=wanted.get("name", ""),
        )
        allowed = self._cluster.users.allows(user, access)
        review = {"kind": REVIEWS.kind, "apiVersion": REVIEWS.api_version, "metadata": {}, "spec": body["spec"]}
        return JSONResponse({**review, "status": {"allowed": allowed}}, 201)

    def _log(self, request: Request, target: Target) -> Response:
        pod = self._cluster.operations.get(PODS, target.key)
        query = request.query_params
        name = _container_name(pod, query.get("container", ""))
        previous = truth(request, "previous")
        follow = truth(request, "follow")
        status = next((each for each in _statuses(pod) if each["name"] == name), None)
        if previous and not (status and status.get("lastState", {}).get("terminated")):
            raise bad_request(f'previous terminated container "{name}" in pod "{target.name}" not found')
        if not previous and (status is None or ("waiting" in status["state"] and not status["restartCount"])):
            reason = (status or {"state": {}})["state"].get("waiting", {}).get("reason", "ContainerCreating")
            text = f'container "{name}" in pod "{target.name}" is waiting to start: {reason}'
            if reason in ("ErrImagePull", "ImagePullBackOff"):
                text = (
                    f'container "{name}" in pod "{target.name}" is waiting to start: trying and failing to pull image'
                )
            raise bad_request(text)
        kubelet = self._cluster.kubelet_of(pod)
        path = kubelet.log_path(pod, name, previous=previous)
        since_s = query.get("sinceSeconds")
        since = query.get("sinceTime") or ""
        if since_s:
            since = timestamp(now() - timedelta(seconds=int(since_s)))
        tail = query.get("tailLines")

        def writing() -> bool:
            return kubelet.is_writing(pod, name)

        lines: AsyncIterator[bytes] = lines_of(
            path,
            follow=writing if follow and not previous else None,
            since=since,
            tail=None if tail is None else int(tail),
            limit=int(query.get("limitBytes") or 0),
            timestamps=truth(request, "timestamps"),
        )
        return StreamingResponse(lines, media_type="text/plain")

    async def _evict(self, request: Request, target: Target) -> Response:
        body = await body_of(request) or {}
        self._cluster.operations.get(PODS, target.key)
        if body.get("metadata", {}).get("name", target.name) != target.name:
            raise bad_request("name in URL does not match name in Eviction object")

        def mark(pod: Object) -> None:
            set_condition(
                pod["status"].setdefault("conditions", []),
                "DisruptionTarget",
                "True",
                reason="EvictionByEvictionAPI",
                message="Eviction API: evicting",
            )

        self._cluster.operations.modify(PODS, target.key, mark)
        options = delete_options(body.get("deleteOptions"), {})
        self._cluster.operations.deletion.delete(PODS, target.key, options)
        return JSONResponse(_SUCCESS, 201)

    async def _bind(self, request: Request, target: Target) -> Response:
        body = await body_of(request)
        pod = self._cluster.operations.get(PODS, target.key)
        if pod["spec"].get("nodeName"):
            raise statuses.conflict(PODS, target.name, f"pod {target.name} is already assigned to node")
        self._cluster.scheduler.bind(target.key, body["target"]["name"])
        return JSONResponse(
            {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}, 201
        )

    async def _token(self, request: Request, target: Target) -> Response:
        self._cluster.operations.get(target.resource, target.key)
        body = await body_of(request) or {}
        seconds = (body.get("spec") or {}).get("expirationSeconds") or 3600
        token = self._cluster.users.add(service_account(*target.key))
        return JSONResponse(
            {
                "kind": "TokenRequest",
                "apiVersion": "authentication.k8s.io/v1",
                "metadata": {"name": target.name, "namespace": target.namespace, "creationTimestamp": timestamp()},
                "spec": {**(body.get("spec") or {}), "expirationSeconds": seconds},
                "status": {"token": token, "expirationTimestamp": timestamp(now() + timedelta(seconds=seconds))},
            },
            201,
        )


def _statuses(pod: Object) -> list[Object]:
    status = pod["status"]
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _container_name(pod: Object, name: str) -> str:
    spec = pod["spec"]
    names = [each["name"] for each in spec["containers"]]
    initial = [each["name"] for each in spec.get("initContainers") or ()]
    if name and name not in names + initial:
        raise bad_request(f"container {name} is not valid for pod {pod['metadata']['name']}")
    if not name and len(names) > 1:
        text = (
            f"a container name must be specified for pod {pod['metadata']['name']}, choose one of: [{' '.join(names)}]"
        )
        if initial:
            text += f" or one of the init containers: [{' '.join(initial)}]"
        raise bad_request(text)
    return name or str(names[0])
