"""The tables. The migrations under `migrations/` create them; a test checks that both agree.

A unique key always holds the account. It comes after the columns that are looked up, so that one index serves the
scope of an account and the scope of everything. Nodes, queues and the lease belong to the cluster.
Times are Unix seconds; nested values are JSON in text columns.
"""

from trainmaster.server.store.schema.accounts import (
    accounts,
    api_keys,
    cluster_events,
    idempotency,
    leader,
    nodes,
    queues,
    tinker_runs,
    tinker_samplers,
    tinker_sessions,
    webhooks,
)
from trainmaster.server.store.schema.columns import metadata
from trainmaster.server.store.schema.jobs import (
    activity,
    allocated_gpus,
    allocations,
    attempts,
    blob_uses,
    blobs,
    checkpoints,
    events,
    job_labels,
    jobs,
    operations,
    promoted_models,
    secrets,
    usage,
)

__all__ = [
    "accounts",
    "activity",
    "allocated_gpus",
    "allocations",
    "api_keys",
    "attempts",
    "blob_uses",
    "blobs",
    "checkpoints",
    "cluster_events",
    "events",
    "idempotency",
    "job_labels",
    "jobs",
    "leader",
    "metadata",
    "nodes",
    "operations",
    "promoted_models",
    "queues",
    "secrets",
    "tinker_runs",
    "tinker_samplers",
    "tinker_sessions",
    "usage",
    "webhooks",
]
