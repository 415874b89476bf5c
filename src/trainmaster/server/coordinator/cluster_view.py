"""The leader's view of the cluster: read from the database and kept up to date, with the nodes that backends report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from sqlalchemy import Connection

from trainmaster.backends.base import Backend
from trainmaster.server.core.job import Change
from trainmaster.server.core.resources import Node
from trainmaster.server.scheduling.placement import judge
from trainmaster.server.scheduling.view import ClusterView
from trainmaster.server.store import events, jobs, nodes, queues
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)
_EVERYTHING = Scope.everything()


class StoredView:
    """Reads the view from the database, and updates it with what others have committed since."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cursor = 0
        self._cluster_cursor = 0

    def read(self) -> ClusterView:
        with self._database.read() as connection:
            self._cursor = events.last_id(connection, _EVERYTHING)
            self._cluster_cursor = events.last_cluster_id(connection, _EVERYTHING)
            unfinished = jobs.unfinished(connection, _EVERYTHING)
            known = nodes.all(connection, _EVERYTHING)
            there = queues.all(connection, _EVERYTHING)
        return ClusterView().with_nodes(known).with_queues(there).with_jobs(unfinished)

    def caught_up(self, view: ClusterView) -> tuple[ClusterView, set[str]]:
        """The view with what others committed since the last call, and the ids of the jobs that they changed."""
        with self._database.read() as connection:
            cursor, seen = events.changed_jobs(connection, _EVERYTHING, self._cursor)
            stale = [
                job_id
                for job_id, seq in seen.items()
                if (job := view.jobs.get(job_id)) is None or job.event_count < seq
            ]
            if stale:
                view = view.with_jobs(jobs.load(connection, _EVERYTHING, stale))
            view, cluster_cursor = self._with_cluster(connection, view)
        self._cursor, self._cluster_cursor = cursor, cluster_cursor
        return view, set(stale)

    def with_cluster(self, view: ClusterView) -> ClusterView:
        """The view with the changes that operators and the inventory made to nodes and queues."""
        with self._database.read() as connection:
            view, cursor = self._with_cluster(connection, view)
        self._cluster_cursor = cursor
        return view

    def _with_cluster(self, connection: Connection, view: ClusterView) -> tuple[ClusterView, int]:
        cursor = events.last_cluster_id(connection, _EVERYTHING)
        if cursor == self._cluster_cursor:
            return view, cursor
        known, there = nodes.all(connection, _EVERYTHING), queues.all(connection, _EVERYTHING)
        return view.with_nodes(known).with_queues(there), cursor


class ReportingBackends(Protocol):
    """The backends of a coordinator, which may come and go."""

    def values(self) -> Iterable[Backend]: ...

    def refresh(self) -> None: ...

    def take_news(self) -> bool: ...


class NodeReports:
    """Stores the nodes that backends report, judged by the jobs that the leader knows on them."""

    def __init__(
        self,
        database: Database,
        backends: ReportingBackends,
        on_report: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._backends = backends
        self._on_report = on_report
        """Called when nodes were reported, before anything is placed on them."""

    def refresh(self) -> None:
        """Have the backends be those that are declared now."""
        self._backends.refresh()

    def is_due(self) -> bool:
        """Whether a cluster has reported other nodes than before."""
        return self._backends.take_news()

    def take(self) -> None:
        """Store the nodes for a server that starts and knows of no jobs yet."""
        self.refresh()
        self._store(inventory_of(self._backends.values()))

    def take_into(self, view: ClusterView, judged_by: ClusterView) -> ClusterView:
        """Store the nodes, judged by the jobs of one view; returns the other view with these nodes."""
        self.refresh()
        self._store(judge(inventory_of(self._backends.values()), judged_by.holding.values()))
        with self._database.read() as connection:
            return view.with_nodes(nodes.all(connection, _EVERYTHING))

    def _store(self, found: list[Node]) -> None:
        self._database.write_now(lambda connection: nodes.put(connection, _EVERYTHING, found))
        self._on_report()


def inventory_of(backends: Iterable[Backend]) -> list[Node]:
    """The nodes of all backends, once each; a backend that cannot report now keeps its known nodes."""
    found: dict[str, Node] = {}
    for backend in backends:
        try:
            found |= {node.node_id: node for node in backend.inventory()}
        except Exception:
            _log.exception("backend %s cannot report its nodes", backend.name)
    return list(found.values())


def freed_real_gpus(view: ClusterView, changes: Iterable[Change]) -> bool:
    """Whether attempts have ended on GPUs whose memory can be checked before another job gets them."""
    freed = {share.node_id for change in changes if change.ended for share in change.ended.shares if share.gpus}
    found = (view.nodes[node_id] for node_id in freed if node_id in view.nodes)
    return any(gpu.used_mb is not None for node in found for gpu in node.gpus)
