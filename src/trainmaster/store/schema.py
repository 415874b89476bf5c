"""The tables. A migration under `migrations/` makes each of them; a test sees to it that both agree.

A unique key always holds the account. It comes after the columns that are looked up, so that one index serves the
scope of an account and the scope of everything. Nodes, queues and the lease belong to the cluster.
Times are Unix seconds; nested values are JSON in text columns.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

metadata = MetaData(
    naming_convention={"pk": "pk_%(table_name)s", "fk": "fk_%(table_name)s_%(referred_table_name)s"},
)


def _text(name: str, **options: Any) -> Column[str]:
    return Column(name, Text, nullable=False, **options)


def _integer(name: str, **options: Any) -> Column[int]:
    return Column(name, Integer, nullable=False, **options)


def _bytes(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _number(name: str) -> Column[float]:
    return Column(name, Double, nullable=False)


def _flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False)


def _maybe_text(name: str) -> Column[str | None]:
    return Column(name, Text)


def _maybe_number(name: str) -> Column[float | None]:
    return Column(name, Double)


def _of_a_job() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["job_id", "account_id"], ["jobs.job_id", "jobs.account_id"])


accounts = Table(
    "accounts",
    metadata,
    _text("account_id", primary_key=True),
    _number("created_at"),
    Column("uid", Integer),  # of the system's user as whom its jobs run here
)

jobs = Table(
    "jobs",
    metadata,
    _text("job_id", primary_key=True),
    _text("account_id", primary_key=True),
    _maybe_text("handle"),
    _text("name"),
    _text("labels"),
    _text("created_by"),
    _number("created_at"),
    _maybe_text("parent_job_id"),
    _text("root_job_id"),
    _integer("spec_version"),
    _text("spec"),
    _text("workload_kind"),
    _text("lifetime"),
    _text("backend"),
    _text("queue"),
    _integer("priority"),
    _number("order_key"),
    _text("needs"),
    _integer("max_retries"),
    _flag("preemptible"),
    _maybe_number("max_runtime_s"),
    _maybe_number("inactivity_timeout_s"),
    _maybe_text("best_metric"),
    _flag("best_is_greater"),
    _text("status"),
    _text("desired"),
    _maybe_text("reason"),
    _maybe_text("message"),
    _integer("version"),
    _integer("event_count"),
    _flag("can_save"),
    _integer("retries_used"),
    _integer("preemptions_used"),
    _maybe_number("queued_at"),
    _number("not_before"),
    _maybe_number("started_at"),
    _maybe_number("finished_at"),
    _maybe_number("paused_at"),
    _number("updated_at"),
    _number("status_at"),
    _number("runtime_s"),
    _number("gpu_s"),
    _maybe_number("stalled_at"),
    _number("last_save_s"),
    _text("progress"),
    _maybe_text("latest_checkpoint_id"),
    _maybe_text("best_checkpoint_id"),
    _maybe_number("best_metric_value"),
    _maybe_text("resume_checkpoint_id"),
    _maybe_text("endpoint"),
    _maybe_number("last_activity_at"),
    _maybe_number("deleted_at"),
    _flag("purge"),
    _integer("attempt_count"),
    Column("attempt_number", Integer),  # of the current attempt
    _maybe_number("room_at"),
)


def _partial_index(name: str, *columns: Column[Any], where: str, unique: bool = False) -> Index:
    condition = text(where)
    return Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


_partial_index(
    "jobs_by_handle", jobs.c.account_id, jobs.c.handle, where="handle IS NOT NULL AND deleted_at IS NULL", unique=True
)
_partial_index(
    "jobs_by_handle_once", jobs.c.account_id, jobs.c.handle, where="handle IS NOT NULL AND deleted_at IS NOT NULL"
)
_partial_index("jobs_by_age", jobs.c.account_id, jobs.c.created_at, jobs.c.job_id, where="deleted_at IS NULL")
_partial_index(
    "jobs_by_status_and_age",
    jobs.c.account_id,
    jobs.c.status,
    jobs.c.created_at,
    jobs.c.job_id,
    where="deleted_at IS NULL",
)
_partial_index("jobs_by_checkpoint", jobs.c.resume_checkpoint_id, where="resume_checkpoint_id IS NOT NULL")
_partial_index("jobs_to_purge", jobs.c.purge, jobs.c.job_id, where="deleted_at IS NOT NULL")
_partial_index("jobs_by_parent", jobs.c.parent_job_id, where="parent_job_id IS NOT NULL")
Index("jobs_by_status", jobs.c.status, jobs.c.queue, jobs.c.order_key, jobs.c.job_id)
_partial_index("jobs_with_room", jobs.c.status, where="room_at IS NOT NULL")

job_labels = Table(
    "job_labels",
    metadata,
    _text("job_id", primary_key=True),
    _text("key", primary_key=True),
    _text("account_id", primary_key=True),
    _text("value"),
    Column("created_at", Double, nullable=False, server_default="0"),  # of the job
    Column("marks", Text, nullable=False, server_default=text("''")),  # of all labels of the job
    _of_a_job(),
)
Index(
    "jobs_by_label",
    job_labels.c.account_id,
    job_labels.c.key,
    job_labels.c.value,
    job_labels.c.created_at,
    job_labels.c.job_id,
    job_labels.c.marks,
)

attempts = Table(
    "attempts",
    metadata,
    _text("job_id", primary_key=True),
    _integer("number", primary_key=True, autoincrement=False),
    _text("account_id", primary_key=True),
    _text("token"),
    _text("backend"),
    _text("shares"),
    _number("created_at"),
    _maybe_text("resume_checkpoint_id"),
    _maybe_text("handle"),
    _text("claimed"),
    _text("started"),
    _text("exits"),
    _text("offsets"),
    _maybe_text("stop"),
    _flag("stop_save"),
    _number("stop_grace_s"),
    _maybe_number("stop_at"),
    _flag("stack_dump"),
    _maybe_number("started_at"),
    _maybe_number("ended_at"),
    _maybe_text("reason"),
    _maybe_text("message"),
    _text("evidence"),
    _of_a_job(),
)
Index("attempts_by_token", attempts.c.token)
_partial_index("attempts_by_checkpoint", attempts.c.resume_checkpoint_id, where="ended_at IS NULL")

allocations = Table(
    "allocations",
    metadata,
    _text("job_id", primary_key=True),
    _integer("attempt", primary_key=True, autoincrement=False),
    _integer("member", primary_key=True, autoincrement=False),  # which node of the gang
    _text("account_id", primary_key=True),
    _text("node_id"),
    _integer("cpu_cores"),
    _bytes("ram_mb"),
    _bytes("storage_mb"),
    _of_a_job(),
)
Index("allocations_by_node", allocations.c.node_id)

allocated_gpus = Table(
    "allocated_gpus",
    metadata,
    # A GPU is held once or not at all, whoever asks: this key is why no two jobs can ever share one.
    _text("node_id", primary_key=True),
    _integer("gpu_index", primary_key=True, autoincrement=False),
    _text("job_id"),
    _integer("attempt"),
    _integer("member"),
    _text("account_id"),
    _of_a_job(),
)
Index("allocated_gpus_by_job", allocated_gpus.c.job_id)

checkpoints = Table(
    "checkpoints",
    metadata,
    _text("checkpoint_id", primary_key=True),
    _text("account_id", primary_key=True),
    _text("job_id"),
    _integer("attempt"),
    _bytes("step"),
    _maybe_number("epoch"),
    _number("created_at"),
    _text("metrics"),
    _bytes("size_bytes"),
    _text("root"),
    _text("path"),
    _text("status"),
    Column("pinned", Boolean, nullable=False, server_default=false()),
    Column("kind", Text, nullable=False, server_default=text("''")),
    Column("name", Text, nullable=False, server_default=text("''")),
    Column("attributes", Text, nullable=False, server_default="{}"),
    _maybe_number("expires_at"),
    Column("public", Boolean, nullable=False, server_default=false()),
    _of_a_job(),
)
Index("checkpoints_by_job", checkpoints.c.job_id, checkpoints.c.created_at)
_partial_index("checkpoints_by_expiry", checkpoints.c.expires_at, where="expires_at IS NOT NULL")
_partial_index("checkpoints_with_a_kind", checkpoints.c.account_id, checkpoints.c.created_at, where="kind <> ''")

promoted_models = Table(
    "promoted_models",
    metadata,
    _text("model_id", primary_key=True),
    _text("account_id", primary_key=True),
    _text("job_id"),
    _text("checkpoint_id"),
    _text("base_model"),
    _text("kind"),
    _text("details"),
    _bytes("size_bytes"),
    _number("created_at"),
    _of_a_job(),
)

operations = Table(
    "operations",
    metadata,
    _text("operation_id", primary_key=True),
    _text("account_id", primary_key=True),
    _text("request"),
    _flag("done"),
    _text("error"),
    _number("created_at"),
    _number("worked_on_at"),
    ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
)

events = Table(
    "events",
    metadata,
    # The cursor of the feed: rises in the order of commits and is never used twice.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    _text("job_id"),
    _integer("seq"),
    _text("account_id"),
    _number("at"),
    _text("type"),
    _text("actor"),
    _integer("attempt"),
    _maybe_text("from_status"),
    _maybe_text("to_status"),
    _maybe_text("reason"),
    _text("message"),
    _text("data"),
    _of_a_job(),
    UniqueConstraint("job_id", "seq", "account_id", name="events_by_job"),
    sqlite_autoincrement=True,
)

activity = Table(
    "activity",
    metadata,
    _text("job_id", primary_key=True),
    _text("account_id", primary_key=True),
    _number("at"),
    _of_a_job(),
)

secrets = Table(
    "secrets",
    metadata,
    _text("job_id", primary_key=True),
    _text("name", primary_key=True),
    _text("account_id", primary_key=True),
    _text("sealed"),
    _flag("until_end"),  # forgotten when the job ends
    _of_a_job(),
)

usage = Table(
    "usage",
    metadata,
    _text("job_id", primary_key=True),
    _integer("attempt", primary_key=True, autoincrement=False),
    _text("account_id", primary_key=True),
    _text("queue"),
    _number("started_at"),
    _number("ended_at"),
    _integer("gpus"),
    _integer("cpu_cores"),
    _text("labels"),
    _of_a_job(),
)
Index("usage_by_end", usage.c.ended_at)
Index("usage_by_account", usage.c.account_id, usage.c.ended_at)

idempotency = Table(
    "idempotency",
    metadata,
    _text("key", primary_key=True),
    _text("account_id", primary_key=True),
    _text("fingerprint"),
    _text("job_id"),
    _number("created_at"),
)
Index("idempotency_by_age", idempotency.c.created_at)

api_keys = Table(
    "api_keys",
    metadata,
    _text("key_id", primary_key=True),
    _text("account_id", primary_key=True),
    _text("name"),
    _text("scopes"),
    _text("hash"),
    _number("created_at"),
    _maybe_number("revoked_at"),
    Column("created_by", Text, nullable=False, server_default=text("''")),
    ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
    UniqueConstraint("hash", name="api_keys_by_hash"),  # a key belongs to one account
)

tinker_sessions = Table(
    "tinker_sessions",
    metadata,
    _text("session_id", primary_key=True),
    _text("account_id", primary_key=True),
    _number("created_at"),
    _maybe_text("idempotency_key"),
    _text("tags"),
    _text("user_metadata"),
    _text("sdk_version"),
    _maybe_text("project_id"),
    _maybe_text("display_name"),
    _number("heartbeat_at"),
    _maybe_number("finished_at"),
    _text("finish"),
    ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
)
Index("tinker_sessions_by_age", tinker_sessions.c.account_id, tinker_sessions.c.created_at)
_partial_index("tinker_sessions_open", tinker_sessions.c.heartbeat_at, where="finished_at IS NULL")
_partial_index(
    "tinker_sessions_by_key",
    tinker_sessions.c.idempotency_key,
    tinker_sessions.c.account_id,
    where="idempotency_key IS NOT NULL",
    unique=True,
)

tinker_runs = Table(
    "tinker_runs",
    metadata,
    _text("model_id", primary_key=True),
    _text("account_id", primary_key=True),
    _text("session_id"),
    _text("base_model"),
    _text("mode"),
    _text("request"),
    _number("created_at"),
    _number("used_at"),
    _text("state"),
    _maybe_text("job_id"),
    Column("attempt", Integer),  # of the job, whose trainer has the model
    _text("error"),
    _text("category"),
    ForeignKeyConstraint(["session_id", "account_id"], ["tinker_sessions.session_id", "tinker_sessions.account_id"]),
    _of_a_job(),
)
Index("tinker_runs_by_age", tinker_runs.c.account_id, tinker_runs.c.created_at)
Index("tinker_runs_by_session", tinker_runs.c.session_id)

tinker_samplers = Table(
    "tinker_samplers",
    metadata,
    _text("sampler_id", primary_key=True),
    _text("account_id", primary_key=True),
    _text("session_id"),
    _text("base_model"),
    _maybe_text("model_path"),
    _number("created_at"),
    ForeignKeyConstraint(["session_id", "account_id"], ["tinker_sessions.session_id", "tinker_sessions.account_id"]),
)
Index("tinker_samplers_by_session", tinker_samplers.c.session_id)

webhooks = Table(
    "webhooks",
    metadata,
    _text("webhook_id", primary_key=True),
    _text("account_id", primary_key=True),
    _text("url"),
    _text("statuses"),
    _text("sealed"),  # what deliveries are signed with
    _number("created_at"),
    Column("cursor", BigInteger, nullable=False),  # the last event of the feed that is dealt with
    _integer("failures"),
    _number("not_before"),
    _maybe_number("delivered_at"),
    _text("problem"),
    _integer("given_up"),
    ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
)

blobs = Table(
    "blobs",
    metadata,
    _text("sha256", primary_key=True),
    _text("account_id", primary_key=True),
    _bytes("size_bytes"),
    _number("created_at"),
    _number("last_used_at"),
)

blob_uses = Table(
    "blob_uses",
    metadata,
    _text("sha256", primary_key=True),
    _text("job_id", primary_key=True),
    _text("account_id", primary_key=True),
    _of_a_job(),
    ForeignKeyConstraint(["sha256", "account_id"], ["blobs.sha256", "blobs.account_id"]),
)

nodes = Table(
    "nodes",
    metadata,
    _text("node_id", primary_key=True),
    _text("backend"),
    _text("hostname"),
    _text("address"),
    _integer("cpu_cores"),
    _bytes("ram_mb"),
    _bytes("storage_mb"),
    _text("gpus"),
    _text("labels"),
    _text("capabilities"),
    _integer("slots"),
    _text("state"),
    _number("last_seen_at"),
    Column("given_labels", Text, nullable=False, server_default="[]"),
    Column("given_capabilities", Text, nullable=False, server_default="[]"),
    Column("drain_reason", Text, nullable=False, server_default=text("''")),
    Column("drain_force", Boolean, nullable=False, server_default=false()),
    _maybe_number("drain_grace_s"),
)

queues = Table(
    "queues",
    metadata,
    _text("name", primary_key=True),
    _number("created_at"),
    Column("weight", Double, nullable=False, server_default="1"),
    Column("quota_gpus", Integer),
)

cluster_events = Table(
    "cluster_events",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    _number("at"),
    _text("type"),
    _text("subject"),
    _text("message"),
    _text("data"),
    sqlite_autoincrement=True,
)
Index("cluster_events_by_subject", cluster_events.c.subject, cluster_events.c.id)

leader = Table(
    "leader",
    metadata,
    _integer("id", primary_key=True, autoincrement=False),  # there is one row
    _integer("epoch"),
    _maybe_text("holder"),
    _text("url"),
    _number("expires_at"),
    _maybe_number("since"),
)
