"""Faults on demand: `POST /faults/NAME` on the API's port and on one of its own, which stays open when the API is down.

Each body is the JSON of the arguments of the method of the same name.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kubernetes_server.api.users import Denial, User
from kubernetes_server.deletion import DeleteOptions
from kubernetes_server.objects import Object, clone, set_condition
from kubernetes_server.patches import merge_patch
from kubernetes_server.resources import PODS, Resource
from kubernetes_server.statuses import StatusError, bad_request
from kubernetes_server.store import Store

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster
    from kubernetes_server.kubelet.kubelet import Kubelet
    from kubernetes_server.listener import Listener


class FaultControl:
    def __init__(self, cluster: Cluster, listener: Listener) -> None:
        self._cluster = cluster
        self._listener = listener
        self._back: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        names = [name for name in vars(type(self)) if not name.startswith("_") and name != "routes"]
        return [Route(f"/faults/{name}", self._route(getattr(self, name)), methods=["POST"]) for name in names]

    # -- the API --

    async def api_refuse(self, seconds: float) -> None:
        """Connections are refused, and the present ones break."""
        await self.api_up()

        async def come_back() -> None:
            await asyncio.sleep(seconds)
            await self._listener.open()

        await self._listener.close()
        self._back = asyncio.create_task(come_back())

    async def api_unavailable(self, seconds: float) -> None:
        """Every request is answered with 503."""
        self._cluster.faults.unavailable_until = time.monotonic() + seconds

    async def api_up(self) -> None:
        """End `api_refuse` and `api_unavailable` early."""
        self._cluster.faults.unavailable_until = 0.0
        if self._back is not None and not self._back.done():
            self._back.cancel()
            await asyncio.wait([self._back])
            await self._listener.open()

    async def api_throttle(self, requests: int = -1, retry_after_s: int = 1, every: int = 1) -> None:
        """The next requests (all, if -1), or one in so many of them, are answered with 429; 0 ends it."""
        self._cluster.faults.throttled = requests
        self._cluster.faults.throttled_every = every
        self._cluster.faults.retry_after_s = retry_after_s

    async def api_slow(self, seconds: float) -> None:
        """Every request takes longer; 0 ends it."""
        self._cluster.faults.slow_s = seconds

    async def watches_drop(self) -> int:
        """Break the connections of all watches; how many there were."""
        return self._cluster.watches.drop()

    async def watches_end(self) -> None:
        """End all watches in good order, as their timeout does."""
        self._cluster.watches.end()

    async def compact(self) -> None:
        """Forget all history: watches and lists from before get 410."""
        self._cluster.store.compact()

    async def clear(self) -> None:
        """End all faults of the API, denials and missing images."""
        await self.api_up()
        self._cluster.faults.clear()
        self._cluster.users.denials.clear()

    # -- users --

    async def user_add(self, name: str, groups: list[str] | None = None) -> str:
        """A token for a new user, who may do what roles say."""
        return self._cluster.users.add(User(name, (*(groups or ()), "system:authenticated")))

    async def token_revoke(self, token: str) -> None:
        self._cluster.users.revoke(token)

    async def asked(self, user: str) -> list[tuple[str, str, str, int]]:
        """What a user has tried so far, allowed or not: group, resource and verb of each kind of request, and how
        often."""
        counts: Counter[tuple[str, str, str]] = Counter()
        for each, count in self._cluster.users.asked.get(user, Counter()).items():
            counts[each.group, each.resource, each.verb] += count
        return sorted((*kind, count) for kind, count in counts.items())

    async def deny(self, user: str = "", verb: str = "", resource: str = "", namespace: str = "") -> None:
        """Refuse with 403 what this covers, until `clear`; an empty argument is anything."""
        self._cluster.users.denials.append(Denial(user=user, verb=verb, resource=resource, namespace=namespace))

    # -- nodes --

    async def node_lost(self, name: str) -> None:
        """The kubelet stops and nobody hears of the node; its containers run on."""
        self._kubelet(name).stop()

    async def node_killed(self, name: str) -> None:
        """The node loses power: its containers die as well."""
        self._kubelet(name).kill()

    async def node_back(self, name: str) -> None:
        """The kubelet works again, after either."""
        await self._kubelet(name).start()

    async def disk_full(self, name: str, full: bool = True) -> None:
        """DiskPressure: pods are evicted, and no new ones come, until the disk is not full."""
        self._kubelet(name).fill_disk(full)

    # -- pods and objects --

    async def pod_evict(self, namespace: str, name: str) -> None:
        """The kubelet evicts one pod: it fails with reason Evicted, and stays."""
        pod = self._cluster.operations.get(PODS, (namespace, name))
        self._cluster.kubelet_of(pod).evict((namespace, name))

    async def pod_disrupt(self, namespace: str, name: str, reason: str = "PreemptionByScheduler") -> None:
        """Delete a pod as the scheduler, the taint manager or an eviction does, with a DisruptionTarget condition."""

        def mark(pod: Object) -> None:
            conditions = pod["status"].setdefault("conditions", [])
            set_condition(conditions, "DisruptionTarget", "True", reason=reason, message="on demand of a test")

        self._cluster.operations.get(PODS, (namespace, name))
        self._cluster.operations.modify(PODS, (namespace, name), mark)
        self._cluster.operations.deletion.delete(PODS, (namespace, name), DeleteOptions())

    async def object_delete(self, api_version: str, kind: str, namespace: str, name: str) -> None:
        """Remove an object at once, without grace and in spite of finalizers."""
        resource = self._resource(api_version, kind)
        self._cluster.operations.get(resource, (namespace, name))
        _remove(self._cluster.store, resource, (namespace, name))

    async def object_change(self, api_version: str, kind: str, namespace: str, name: str, merge: Object) -> None:
        """Change any field of an object, also its status, without validation."""
        resource = self._resource(api_version, kind)
        old = self._cluster.operations.get(resource, (namespace, name))
        self._cluster.store.replace(resource.store_key, clone(merge_patch(old, merge)))

    async def image_missing(self, image: str) -> None:
        self._cluster.faults.missing_images.add(image)

    async def image_present(self, image: str) -> None:
        self._cluster.faults.missing_images.discard(image)

    # -- parts --

    def _kubelet(self, name: str) -> Kubelet:
        if name not in self._cluster.kubelets:
            raise bad_request(f"there is no node {name}, only {', '.join(self._cluster.kubelets)}")
        return self._cluster.kubelets[name]

    def _resource(self, api_version: str, kind: str) -> Resource:
        resource = self._cluster.resources.of_kind(api_version, kind)
        if resource is None:
            raise bad_request(f"there is no {kind} in {api_version}")
        return resource

    def _route(self, method: Callable[..., Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            arguments = await request.json() if await request.body() else {}
            try:
                inspect.signature(method).bind(**arguments)
                return JSONResponse({"result": await method(**arguments)})
            except StatusError as error:
                return JSONResponse(error.body(), error.code)
            except TypeError as error:
                return JSONResponse(bad_request(str(error)).body(), 400)

        return answer


def _remove(store: Store, resource: Resource, key: tuple[str, str]) -> None:
    store.remove(resource.store_key, key)
