"""Jobs, and the labels they are found by."""

from __future__ import annotations

from sqlalchemy import Column, Double, Index, Integer, Table, Text, text

from trainmaster.server.store.schema.columns import (
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
