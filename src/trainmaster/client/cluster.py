"""client.cluster and client.runtimes: nodes, queues, backends, activity, and the training runtimes of the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

from trainmaster.client.connection import Connection
from trainmaster.client.types import (
    Backend,
    BackendSummary,
    Node,
    NodeEvent,
    Queue,
    QueueEntry,
    RuntimeDocument,
    RuntimeList,
    Summary,
)


class Cluster:
    """The routes about nodes and queues. What changes them needs a key with the scope `cluster_admin`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def summary(self) -> Summary:
        """The cluster as a whole."""
        return cast(Summary, self._connection.call("GET", "/v1/cluster"))

    def backends(self) -> Sequence[BackendSummary]:
        """Where jobs can run, the default first."""
        return cast(Sequence[BackendSummary], self._connection.call("GET", "/v1/backends")["backends"])

    def backend(self, name: str) -> Backend:
        """One backend; the engine that runs its jobs is asked now."""
        return cast(Backend, self._connection.call("GET", f"/v1/backends/{quote(name, safe='')}"))

    def nodes(self) -> Sequence[Node]:
        """Every node, and what is free on it."""
        return cast(Sequence[Node], self._connection.call("GET", "/v1/nodes")["nodes"])

    def node(self, node: str) -> Node:
        """One node."""
        return cast(Node, self._connection.call("GET", _node(node)))

    def node_events(self, node: str, *, limit: int = 100) -> Sequence[NodeEvent]:
        """What happened to a node, the newest first."""
        found = self._connection.call("GET", _node(node, "events"), params={"limit": limit})
        return cast(Sequence[NodeEvent], found["events"])

    def drain(self, node: str, *, reason: str = "", force: bool = False, grace_seconds: float | None = None) -> Node:
        """Give a node no more work; with `force`, preempt what runs there. It is DRAINED when nothing is left."""
        body = {"reason": reason, "force": force, "grace_seconds": grace_seconds}
        return cast(Node, self._connection.call("POST", _node(node, "drain"), json=body))

    def enable(self, node: str) -> Node:
        """Give a node work again."""
        return cast(Node, self._connection.call("POST", _node(node, "enable"), json={}))

    def change_node(
        self, node: str, *, labels: Sequence[str] | None = None, capabilities: Sequence[str] | None = None
    ) -> Node:
        """Set the labels or capabilities that a node has beside those that its backend reports; None leaves them."""
        wanted = {"labels": labels, "capabilities": capabilities}
        body = {name: list(value) for name, value in wanted.items() if value is not None}
        return cast(Node, self._connection.call("PATCH", _node(node), json=body))

    def queues(self) -> Sequence[Queue]:
        """Every queue, and what is in it."""
        return cast(Sequence[Queue], self._connection.call("GET", "/v1/queues")["queues"])

    def put_queue(self, name: str, *, weight: float = 1.0, quota_gpus: int | None = None) -> Queue:
        """Make a queue, or set both its weight and its quota."""
        body = {"weight": weight, "quota_gpus": quota_gpus}
        return cast(Queue, self._connection.call("PUT", _queue(name), json=body))

    def delete_queue(self, name: str) -> None:
        """Remove a queue in which no job waits or runs."""
        self._connection.call("DELETE", _queue(name))

    def queue(self, name: str = "default", *, page_size: int = 100) -> Iterator[QueueEntry]:
        """The jobs that wait in a queue, in the order of the scheduler; pages are fetched as they are needed."""
        params: dict[str, Any] = {"queue": name, "page_size": page_size}
        while True:
            page: Mapping[str, Any] = self._connection.call("GET", "/v1/queue", params=params)
            yield from page["entries"]
            if not page["next_page_token"]:
                return
            params["page_token"] = page["next_page_token"]


def _node(node: str, route: str = "") -> str:
    return f"/v1/nodes/{quote(node, safe='')}" + (f"/{route}" if route else "")


def _queue(name: str) -> str:
    return f"/v1/queues/{quote(name, safe='')}"


class Runtimes:
    """The server's runtimes. Those that are built in, and those of a client's own sources, are not among them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> RuntimeList:
        """Every runtime, and which files cannot be used."""
        return cast(RuntimeList, self._connection.call("GET", "/v1/runtimes"))

    def get(self, name: str) -> RuntimeDocument:
        """One runtime."""
        return cast(RuntimeDocument, self._connection.call("GET", f"/v1/runtimes/{quote(name, safe='')}"))
