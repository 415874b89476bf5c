"""The tables, as a new database gets them. A test checks that older databases have the same after their migrations.

A unique key always holds the account. It comes after the columns that are looked up, so that one index serves the
scope of an account and the scope of everything. Nodes, queues and the lease belong to the cluster.
Times are Unix seconds; nested values are JSON in text columns.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

from trainmaster.server.store.schema.columns import (
    big_integer,
    integer,
    maybe_number,
    maybe_text,
    metadata,
    number,
    of_a_job,
    partial_index,
    text_column,
)
from trainmaster.server.store.schema.jobs import (
    activity,
    allocated_gpus,
    allocations,
    attempts,
    blob_uses,
    blobs,
    checkpoints,
    events,
    is_current_attempt,
    job_labels,
    jobs,
    launches,
    operations,
    promoted_models,
    secrets,
    usage,
)

__all__ = [
    "activity",
    "allocated_gpus",
    "allocations",
    "attempts",
    "blob_uses",
    "blobs",
    "checkpoints",
    "events",
    "is_current_attempt",
    "job_labels",
    "jobs",
    "launches",
    "metadata",
    "operations",
    "promoted_models",
    "secrets",
    "usage",
]
"""The tables of jobs beside those below."""

# Accounts: API keys, webhooks and idempotency keys.

accounts = Table(
    "accounts",
    metadata,
    text_column("account_id", primary_key=True),
    number("created_at"),
    Column("uid", Integer),  # the system user that runs its jobs on this machine
)

api_keys = Table(
    "api_keys",
    metadata,
    text_column("key_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("name"),
    text_column("scopes"),
    text_column("hash"),
    number("created_at"),
    maybe_number("revoked_at"),
    Column("created_by", Text, nullable=False, server_default=text("''")),
    ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
    UniqueConstraint("hash", name="api_keys_by_hash"),  # a key belongs to one account
)

webhooks = Table(
    "webhooks",
    metadata,
    text_column("webhook_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("url"),
    text_column("statuses"),
    text_column("sealed"),  # the encrypted secret that signs deliveries
    number("created_at"),
    Column("cursor", BigInteger, nullable=False),  # the last event that was delivered or given up
    integer("failures"),
    number("not_before"),
    maybe_number("delivered_at"),
    text_column("problem"),
    integer("given_up"),
    ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
)

idempotency = Table(
    "idempotency",
    metadata,
    text_column("key", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("fingerprint"),
    text_column("job_id"),
    number("created_at"),
)
Index("idempotency_by_age", idempotency.c.created_at)


# The cluster: nodes, queues, their events, and the leader's lease. These belong to no account.

nodes = Table(
    "nodes",
    metadata,
    text_column("node_id", primary_key=True),
    text_column("backend"),
    text_column("hostname"),
    text_column("address"),
    integer("cpu_cores"),
    big_integer("ram_mb"),
    big_integer("storage_mb"),
    text_column("gpus"),
    text_column("labels"),
    text_column("capabilities"),
    integer("slots"),
    text_column("state"),
    number("last_seen_at"),
    Column("given_labels", Text, nullable=False, server_default="[]"),
    Column("given_capabilities", Text, nullable=False, server_default="[]"),
    Column("drain_reason", Text, nullable=False, server_default=text("''")),
    Column("drain_force", Boolean, nullable=False, server_default=false()),
    maybe_number("drain_grace_s"),
)

queues = Table(
    "queues",
    metadata,
    text_column("name", primary_key=True),
    number("created_at"),
    Column("weight", Double, nullable=False, server_default="1"),
    Column("quota_gpus", Integer),
)

cluster_events = Table(
    "cluster_events",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    number("at"),
    text_column("type"),
    text_column("subject"),
    text_column("message"),
    text_column("data"),
    sqlite_autoincrement=True,
)
Index("cluster_events_by_subject", cluster_events.c.subject, cluster_events.c.id)

leader = Table(
    "leader",
    metadata,
    integer("id", primary_key=True, autoincrement=False),  # there is one row
    integer("epoch"),
    maybe_text("holder"),
    text_column("url"),
    number("expires_at"),
    maybe_number("since"),
)


# Sessions of Tinker clients, with their runs and samplers.

tinker_sessions = Table(
    "tinker_sessions",
    metadata,
    text_column("session_id", primary_key=True),
    text_column("account_id", primary_key=True),
    number("created_at"),
    maybe_text("idempotency_key"),
    text_column("tags"),
    text_column("user_metadata"),
    text_column("sdk_version"),
    maybe_text("project_id"),
    maybe_text("display_name"),
    number("heartbeat_at"),
    maybe_number("finished_at"),
    text_column("finish"),
    ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
)
Index("tinker_sessions_by_age", tinker_sessions.c.account_id, tinker_sessions.c.created_at)
partial_index("tinker_sessions_open", tinker_sessions.c.heartbeat_at, where="finished_at IS NULL")
partial_index(
    "tinker_sessions_by_key",
    tinker_sessions.c.idempotency_key,
    tinker_sessions.c.account_id,
    where="idempotency_key IS NOT NULL",
    unique=True,
)

tinker_runs = Table(
    "tinker_runs",
    metadata,
    text_column("model_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("session_id"),
    text_column("base_model"),
    text_column("mode"),
    text_column("request"),
    number("created_at"),
    number("used_at"),
    text_column("state"),
    maybe_text("job_id"),
    Column("attempt", Integer),  # of the job, whose trainer has the model
    text_column("error"),
    text_column("category"),
    ForeignKeyConstraint(["session_id", "account_id"], ["tinker_sessions.session_id", "tinker_sessions.account_id"]),
    of_a_job(),
)
Index("tinker_runs_by_age", tinker_runs.c.account_id, tinker_runs.c.created_at)
Index("tinker_runs_by_session", tinker_runs.c.session_id)

tinker_samplers = Table(
    "tinker_samplers",
    metadata,
    text_column("sampler_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("session_id"),
    text_column("base_model"),
    maybe_text("model_path"),
    number("created_at"),
    ForeignKeyConstraint(["session_id", "account_id"], ["tinker_sessions.session_id", "tinker_sessions.account_id"]),
)
Index("tinker_samplers_by_session", tinker_samplers.c.session_id)
