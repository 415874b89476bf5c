"""The tables of the first revision, as version 0.1.0 created them."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection

from trainmaster.server.store import schema


def create(connection: Connection) -> None:
    """Create the tables, and what must be there from the start: the default queue and the row of the lease."""
    op = Operations(MigrationContext.configure(connection, opts={"target_metadata": schema.metadata}))
    op.create_table("alembic_version", sa.Column("version_num", sa.String(32), primary_key=True))
    op.bulk_insert(sa.table("alembic_version", sa.column("version_num")), [{"version_num": "0001"}])
    _jobs(op)
    _of_jobs(op)
    _of_accounts(op)
    _of_the_cluster(op)
    queues = sa.table("queues", sa.column("name"), sa.column("created_at"))
    op.bulk_insert(queues, [{"name": "default", "created_at": time.time()}])
    leader = sa.table("leader", *(sa.column(name) for name in ("id", "epoch", "holder", "url", "expires_at")))
    op.bulk_insert(leader, [{"id": 1, "epoch": 0, "holder": None, "url": "", "expires_at": 0.0}])


def _jobs(op: Operations) -> None:
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("handle", sa.Text),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("labels", sa.Text, nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("parent_job_id", sa.Text),
        sa.Column("root_job_id", sa.Text, nullable=False),
        sa.Column("spec_version", sa.Integer, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("workload_kind", sa.Text, nullable=False),
        sa.Column("lifetime", sa.Text, nullable=False),
        sa.Column("backend", sa.Text, nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("order_key", sa.Double, nullable=False),
        sa.Column("needs", sa.Text, nullable=False),
        sa.Column("max_retries", sa.Integer, nullable=False),
        sa.Column("preemptible", sa.Boolean, nullable=False),
        sa.Column("max_runtime_s", sa.Double),
        sa.Column("inactivity_timeout_s", sa.Double),
        sa.Column("best_metric", sa.Text),
        sa.Column("best_is_greater", sa.Boolean, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("desired", sa.Text, nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("message", sa.Text),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("event_count", sa.Integer, nullable=False),
        sa.Column("can_save", sa.Boolean, nullable=False),
        sa.Column("retries_used", sa.Integer, nullable=False),
        sa.Column("preemptions_used", sa.Integer, nullable=False),
        sa.Column("queued_at", sa.Double),
        sa.Column("not_before", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        sa.Column("paused_at", sa.Double),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("status_at", sa.Double, nullable=False),
        sa.Column("runtime_s", sa.Double, nullable=False),
        sa.Column("gpu_s", sa.Double, nullable=False),
        sa.Column("stalled_at", sa.Double),
        sa.Column("last_save_s", sa.Double, nullable=False),
        sa.Column("progress", sa.Text, nullable=False),
        sa.Column("latest_checkpoint_id", sa.Text),
        sa.Column("best_checkpoint_id", sa.Text),
        sa.Column("best_metric_value", sa.Double),
        sa.Column("resume_checkpoint_id", sa.Text),
        sa.Column("endpoint", sa.Text),
        sa.Column("last_activity_at", sa.Double),
        sa.Column("deleted_at", sa.Double),
        sa.Column("purge", sa.Boolean, nullable=False),
        sa.Column("attempt_count", sa.Integer, nullable=False),
        sa.Column("attempt_number", sa.Integer),
        sa.PrimaryKeyConstraint("job_id", "account_id"),
    )
    _partial_index(
        op, "jobs_by_handle", ["account_id", "handle"], "handle IS NOT NULL AND deleted_at IS NULL", unique=True
    )
    _partial_index(op, "jobs_by_age", ["account_id", "created_at", "job_id"], "deleted_at IS NULL")
    _partial_index(op, "jobs_by_parent", ["parent_job_id"], "parent_job_id IS NOT NULL")
    op.create_index("jobs_by_status", "jobs", ["status", "queue", "order_key", "job_id"])


def _of_jobs(op: Operations) -> None:
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "key", "account_id"),
        _of_a_job(),
    )
    op.create_index("jobs_by_label", "job_labels", ["account_id", "key", "value", "job_id"])
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("token", sa.Text, nullable=False),
        sa.Column("backend", sa.Text, nullable=False),
        sa.Column("shares", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("resume_checkpoint_id", sa.Text),
        sa.Column("handle", sa.Text),
        sa.Column("claimed", sa.Text, nullable=False),
        sa.Column("started", sa.Text, nullable=False),
        sa.Column("exits", sa.Text, nullable=False),
        sa.Column("offsets", sa.Text, nullable=False),
        sa.Column("stop", sa.Text),
        sa.Column("stop_save", sa.Boolean, nullable=False),
        sa.Column("stop_grace_s", sa.Double, nullable=False),
        sa.Column("stop_at", sa.Double),
        sa.Column("stack_dump", sa.Boolean, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("reason", sa.Text),
        sa.Column("message", sa.Text),
        sa.Column("evidence", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "number", "account_id"),
        _of_a_job(),
    )
    op.create_index("attempts_by_token", "attempts", ["token"])
    op.create_table(
        "allocations",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("member", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("cpu_cores", sa.Integer, nullable=False),
        sa.Column("ram_mb", sa.BigInteger, nullable=False),
        sa.Column("storage_mb", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", "member", "account_id"),
        _of_a_job(),
    )
    op.create_table(
        "allocated_gpus",
        sa.Column("node_id", sa.Text, nullable=False),
        sa.Column("gpu_index", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("member", sa.Integer, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("node_id", "gpu_index"),
        _of_a_job(),
    )
    op.create_index("allocated_gpus_by_job", "allocated_gpus", ["job_id"])
    op.create_table(
        "checkpoints",
        sa.Column("checkpoint_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.Double),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("root", sa.Text, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("checkpoint_id", "account_id"),
        _of_a_job(),
    )
    op.create_index("checkpoints_by_job", "checkpoints", ["job_id", "created_at"])
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("from_status", sa.Text),
        sa.Column("to_status", sa.Text),
        sa.Column("reason", sa.Text),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sa.UniqueConstraint("job_id", "seq", "account_id", name="events_by_job"),
        _of_a_job(),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "activity",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "account_id"),
        _of_a_job(),
    )


def _of_accounts(op: Operations) -> None:
    op.create_table(
        "accounts",
        sa.Column("account_id", sa.Text, primary_key=True),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "idempotency",
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("key", "account_id"),
    )
    op.create_index("idempotency_by_age", "idempotency", ["created_at"])
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
        sa.PrimaryKeyConstraint("key_id", "account_id"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
        sa.UniqueConstraint("hash", name="api_keys_by_hash"),
    )
    op.create_table(
        "blobs",
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("last_used_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("sha256", "account_id"),
    )
    op.create_table(
        "blob_uses",
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("sha256", "job_id", "account_id"),
        sa.ForeignKeyConstraint(["sha256", "account_id"], ["blobs.sha256", "blobs.account_id"]),
        _of_a_job(),
    )


def _of_the_cluster(op: Operations) -> None:
    op.create_table(
        "nodes",
        sa.Column("node_id", sa.Text, primary_key=True),
        sa.Column("backend", sa.Text, nullable=False),
        sa.Column("hostname", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("cpu_cores", sa.Integer, nullable=False),
        sa.Column("ram_mb", sa.BigInteger, nullable=False),
        sa.Column("storage_mb", sa.BigInteger, nullable=False),
        sa.Column("gpus", sa.Text, nullable=False),
        sa.Column("labels", sa.Text, nullable=False),
        sa.Column("capabilities", sa.Text, nullable=False),
        sa.Column("slots", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("last_seen_at", sa.Double, nullable=False),
    )
    op.create_table(
        "queues",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "leader",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("holder", sa.Text),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
    )


def _of_a_job() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["job_id", "account_id"], ["jobs.job_id", "jobs.account_id"])


def _partial_index(op: Operations, name: str, columns: list[str], where: str, *, unique: bool = False) -> None:
    condition = sa.text(where)
    op.create_index(name, "jobs", columns, unique=unique, sqlite_where=condition, postgresql_where=condition)
