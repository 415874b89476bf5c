"""The cluster as a whole: what there is, what of it is used, and who leads."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlalchemy import Connection

from trainmaster.server.core.resources import whole
from trainmaster.server.http.auth import Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, ok
from trainmaster.server.http.router import StrictRoute, errors
from trainmaster.server.http.wire.cluster import ClusterResource, cluster_resource
from trainmaster.server.store import allocations, leases, nodes, queue_view
from trainmaster.server.store.scope import Scope

router = APIRouter(route_class=StrictRoute, tags=["cluster"])


@router.get("/cluster", response_model=Ok[ClusterResource], responses=errors())
async def show_cluster(principal: Viewer, context: Context) -> Response:
    """Show the cluster: nodes, GPUs, jobs, how much of it is used, and which server leads."""
    now = context.clock()

    def find(connection: Connection) -> ClusterResource:
        # Amounts are those of all accounts: what others hold is not free either.
        found = nodes.all(connection, principal.scope)
        free = {node.node_id: whole(node) for node in found}
        for held in allocations.all(connection, Scope.everything()):
            if held.share.node_id in free:
                free[held.share.node_id] = free[held.share.node_id].without(held.share)
        return cluster_resource(
            found,
            free,
            queue_view.by_status(connection, Scope.everything()),
            leases.current(connection, principal.scope),
            version=context.version,
            now=now,
        )

    return ok(await context.read(find))
