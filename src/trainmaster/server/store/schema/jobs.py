"""The tables of jobs: attempts, allocations, events, usage, secrets, checkpoints, promoted models and blobs."""

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
    and_,
    false,
    text,
)

from trainmaster.server.store.schema.columns import (
    big_integer,
    flag,
    integer,
    maybe_number,
    maybe_text,
    metadata,
    number,
    of_a_job,
    partial_index,
    text_column,
)

jobs = Table(
    "jobs",
    metadata,
    text_column("job_id", primary_key=True),
    text_column("account_id", primary_key=True),
    maybe_text("handle"),
    text_column("name"),
    text_column("labels"),
    text_column("created_by"),
    number("created_at"),
    maybe_text("parent_job_id"),
    text_column("root_job_id"),
    integer("spec_version"),
    text_column("spec"),
    text_column("workload_kind"),
    text_column("lifetime"),
    text_column("backend"),
    text_column("queue"),
    integer("priority"),
    number("order_key"),
    text_column("needs"),
    integer("max_retries"),
    flag("preemptible"),
    maybe_number("max_runtime_s"),
    maybe_number("inactivity_timeout_s"),
    maybe_text("best_metric"),
    flag("best_is_greater"),
    text_column("status"),
    text_column("desired"),
    maybe_text("reason"),
    maybe_text("message"),
    integer("version"),
    integer("event_count"),
    flag("can_save"),
    integer("retries_used"),
    integer("preemptions_used"),
    maybe_number("queued_at"),
    number("not_before"),
    maybe_number("started_at"),
    maybe_number("finished_at"),
    maybe_number("paused_at"),
    number("updated_at"),
    number("status_at"),
    number("runtime_s"),
    number("gpu_s"),
    maybe_number("stalled_at"),
    number("last_save_s"),
    text_column("progress"),
    maybe_text("latest_checkpoint_id"),
    maybe_text("best_checkpoint_id"),
    maybe_number("best_metric_value"),
    maybe_text("resume_checkpoint_id"),
    maybe_text("endpoint"),
    maybe_number("last_activity_at"),
    maybe_number("deleted_at"),
    flag("purge"),
    integer("attempt_count"),
    Column("attempt_number", Integer),  # of the current attempt
    maybe_number("room_at"),
)
partial_index(
    "jobs_by_handle", jobs.c.account_id, jobs.c.handle, where="handle IS NOT NULL AND deleted_at IS NULL", unique=True
)
partial_index(
    "jobs_by_handle_once", jobs.c.account_id, jobs.c.handle, where="handle IS NOT NULL AND deleted_at IS NOT NULL"
)
partial_index("jobs_by_age", jobs.c.account_id, jobs.c.created_at, jobs.c.job_id, where="deleted_at IS NULL")
partial_index(
    "jobs_by_status_and_age",
    jobs.c.account_id,
    jobs.c.status,
    jobs.c.created_at,
    jobs.c.job_id,
    where="deleted_at IS NULL",
)
partial_index("jobs_by_checkpoint", jobs.c.resume_checkpoint_id, where="resume_checkpoint_id IS NOT NULL")
partial_index("jobs_to_purge", jobs.c.purge, jobs.c.job_id, where="deleted_at IS NOT NULL")
partial_index("jobs_by_parent", jobs.c.parent_job_id, where="parent_job_id IS NOT NULL")
Index("jobs_by_status", jobs.c.status, jobs.c.queue, jobs.c.order_key, jobs.c.job_id)
partial_index("jobs_with_room", jobs.c.status, where="room_at IS NOT NULL")

launches = Table(
    "launches",
    metadata,
    text_column("job_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("version"),  # of the program that compiled it
    text_column("launch"),
    of_a_job(),
)

job_labels = Table(
    "job_labels",
    metadata,
    text_column("job_id", primary_key=True),
    text_column("key", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("value"),
    Column("created_at", Double, nullable=False, server_default="0"),  # of the job
    Column("marks", Text, nullable=False, server_default=text("''")),  # of all labels of the job
    of_a_job(),
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


# Attempts, and the resources that they hold.

attempts = Table(
    "attempts",
    metadata,
    text_column("job_id", primary_key=True),
    integer("number", primary_key=True, autoincrement=False),
    text_column("account_id", primary_key=True),
    text_column("token"),
    text_column("backend"),
    text_column("shares"),
    number("created_at"),
    maybe_text("resume_checkpoint_id"),
    maybe_text("handle"),
    text_column("claimed"),
    text_column("started"),
    text_column("exits"),
    text_column("offsets"),
    maybe_text("stop"),
    flag("stop_save"),
    number("stop_grace_s"),
    maybe_number("stop_at"),
    flag("stack_dump"),
    maybe_number("started_at"),
    maybe_number("ended_at"),
    maybe_text("reason"),
    maybe_text("message"),
    text_column("evidence"),
    of_a_job(),
)
Index("attempts_by_token", attempts.c.token)
partial_index("attempts_by_checkpoint", attempts.c.resume_checkpoint_id, where="ended_at IS NULL")

is_current_attempt = and_(
    attempts.c.job_id == jobs.c.job_id,
    attempts.c.number == jobs.c.attempt_number,
    attempts.c.account_id == jobs.c.account_id,
)
"""Joins jobs with their current attempt."""

allocations = Table(
    "allocations",
    metadata,
    text_column("job_id", primary_key=True),
    integer("attempt", primary_key=True, autoincrement=False),
    integer("member", primary_key=True, autoincrement=False),  # which node of the gang
    text_column("account_id", primary_key=True),
    text_column("node_id"),
    integer("cpu_cores"),
    big_integer("ram_mb"),
    big_integer("storage_mb"),
    of_a_job(),
)
Index("allocations_by_node", allocations.c.node_id)

allocated_gpus = Table(
    "allocated_gpus",
    metadata,
    # A GPU is held once or not at all, whoever asks: this key is why no two jobs can ever share one.
    text_column("node_id", primary_key=True),
    integer("gpu_index", primary_key=True, autoincrement=False),
    text_column("job_id"),
    integer("attempt"),
    integer("member"),
    text_column("account_id"),
    of_a_job(),
)
Index("allocated_gpus_by_job", allocated_gpus.c.job_id)


# Events, activity, secrets and usage of a job.

events = Table(
    "events",
    metadata,
    # The cursor of the feed: rises in the order of commits and is never used twice.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    text_column("job_id"),
    integer("seq"),
    text_column("account_id"),
    number("at"),
    text_column("type"),
    text_column("actor"),
    integer("attempt"),
    maybe_text("from_status"),
    maybe_text("to_status"),
    maybe_text("reason"),
    text_column("message"),
    text_column("data"),
    of_a_job(),
    UniqueConstraint("job_id", "seq", "account_id", name="events_by_job"),
    sqlite_autoincrement=True,
)

activity = Table(
    "activity",
    metadata,
    text_column("job_id", primary_key=True),
    text_column("account_id", primary_key=True),
    number("at"),
    of_a_job(),
)

secrets = Table(
    "secrets",
    metadata,
    text_column("job_id", primary_key=True),
    text_column("name", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("sealed"),
    flag("until_end"),  # forgotten when the job ends
    of_a_job(),
)

usage = Table(
    "usage",
    metadata,
    text_column("job_id", primary_key=True),
    integer("attempt", primary_key=True, autoincrement=False),
    text_column("account_id", primary_key=True),
    text_column("queue"),
    number("started_at"),
    number("ended_at"),
    integer("gpus"),
    integer("cpu_cores"),
    text_column("labels"),
    of_a_job(),
)
Index("usage_by_end", usage.c.ended_at)
Index("usage_by_account", usage.c.account_id, usage.c.ended_at)


# Checkpoints, and the models promoted from them.

checkpoints = Table(
    "checkpoints",
    metadata,
    text_column("checkpoint_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("job_id"),
    integer("attempt"),
    big_integer("step"),
    maybe_number("epoch"),
    number("created_at"),
    text_column("metrics"),
    big_integer("size_bytes"),
    text_column("root"),
    text_column("path"),
    text_column("status"),
    Column("pinned", Boolean, nullable=False, server_default=false()),
    Column("kind", Text, nullable=False, server_default=text("''")),
    Column("name", Text, nullable=False, server_default=text("''")),
    Column("attributes", Text, nullable=False, server_default="{}"),
    maybe_number("expires_at"),
    Column("public", Boolean, nullable=False, server_default=false()),
    of_a_job(),
)
Index("checkpoints_by_job", checkpoints.c.job_id, checkpoints.c.created_at)
partial_index("checkpoints_by_expiry", checkpoints.c.expires_at, where="expires_at IS NOT NULL")
partial_index("checkpoints_with_a_kind", checkpoints.c.account_id, checkpoints.c.created_at, where="kind <> ''")

promoted_models = Table(
    "promoted_models",
    metadata,
    text_column("model_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("job_id"),
    text_column("checkpoint_id"),
    text_column("base_model"),
    text_column("kind"),
    text_column("details"),
    big_integer("size_bytes"),
    number("created_at"),
    of_a_job(),
)

operations = Table(
    "operations",
    metadata,
    text_column("operation_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("request"),
    flag("done"),
    text_column("error"),
    number("created_at"),
    number("worked_on_at"),
    ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
)


# Files that clients uploaded, and the jobs that use them.

blobs = Table(
    "blobs",
    metadata,
    text_column("sha256", primary_key=True),
    text_column("account_id", primary_key=True),
    big_integer("size_bytes"),
    number("created_at"),
    number("last_used_at"),
)

blob_uses = Table(
    "blob_uses",
    metadata,
    text_column("sha256", primary_key=True),
    text_column("job_id", primary_key=True),
    text_column("account_id", primary_key=True),
    of_a_job(),
    ForeignKeyConstraint(["sha256", "account_id"], ["blobs.sha256", "blobs.account_id"]),
)
