"""The nodes as the backends report them: stored, and judged by what the leader knows of the jobs on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from trainmaster.backends.base import Backend
from trainmaster.server.core.job import Change
from trainmaster.server.core.resources import Node
from trainmaster.server.scheduling.nodes import judge
from trainmaster.server.scheduling.view import ClusterView
from trainmaster.server.store import nodes
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)
_EVERYTHING = Scope.everything()


class NodeReports:
    """Takes in what the backends report."""

    def __init__(
        self, database: Database, backends: Iterable[Backend], on_report: Callable[[], None] = lambda: None
    ) -> None:
        self._database = database
        self._backends = tuple(backends)
        self._on_report = on_report
        """Called when nodes were reported, before anything is placed on them."""

    def take(self) -> None:
        """Store what is there now, for a server that starts; it knows of no jobs yet."""
        self._store(inventory_of(self._backends))

    def take_into(self, view: ClusterView, jobs: ClusterView) -> ClusterView:
        """Store what is there now, seen with the jobs of a view; the other view with these nodes."""
        self._store(judge(inventory_of(self._backends), jobs))
        with self._database.read() as connection:
            return view.with_nodes(nodes.all(connection, _EVERYTHING))

    def _store(self, found: list[Node]) -> None:
        self._database.write_now(lambda connection: nodes.put(connection, _EVERYTHING, found))
        self._on_report()


def inventory_of(backends: Iterable[Backend]) -> list[Node]:
    """The nodes of all backends, once each; one that cannot tell now keeps those that are known."""
    found: dict[str, Node] = {}
    for backend in backends:
        try:
            found |= {node.node_id: node for node in backend.inventory()}
        except Exception:
            _log.exception("backend %s cannot tell its nodes", backend.name)
    return list(found.values())


def freed_real_gpus(view: ClusterView, changes: Iterable[Change]) -> bool:
    """Whether attempts have ended on GPUs whose memory can be looked at before somebody else gets them."""
    freed = {share.node_id for change in changes if change.ended for share in change.ended.shares if share.gpus}
    found = (view.nodes[node_id] for node_id in freed if node_id in view.nodes)
    return any(gpu.used_mb is not None for node in found for gpu in node.gpus)
