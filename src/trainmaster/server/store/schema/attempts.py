"""What belongs to a job while it runs: its attempts, and what they hold."""

from __future__ import annotations

from sqlalchemy import Index, Table

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
