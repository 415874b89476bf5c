"""The tables. A migration under `migrations/` makes each of them; a test sees to it that both agree.

A unique key always holds the account. It comes after the columns that are looked up, so that one index serves the
scope of an account and the scope of everything. Nodes, queues and the lease belong to the cluster.
Times are Unix seconds; nested values are JSON in text columns.
"""

from trainmaster.server.store.schema.accounts import accounts, api_keys, idempotency, webhooks
from trainmaster.server.store.schema.attempts import allocated_gpus, allocations, attempts
from trainmaster.server.store.schema.blobs import blob_uses, blobs
from trainmaster.server.store.schema.checkpoints import checkpoints, operations, promoted_models
from trainmaster.server.store.schema.cluster import cluster_events, leader, nodes, queues
from trainmaster.server.store.schema.columns import metadata
from trainmaster.server.store.schema.jobs import job_labels, jobs
from trainmaster.server.store.schema.records import activity, events, secrets, usage
from trainmaster.server.store.schema.tinker import tinker_runs, tinker_samplers, tinker_sessions

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
