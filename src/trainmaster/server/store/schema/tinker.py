"""The sessions of Tinker clients, with their runs and samplers."""

from __future__ import annotations

from sqlalchemy import Column, ForeignKeyConstraint, Index, Integer, Table

from trainmaster.server.store.schema.columns import (
    maybe_number,
    maybe_text,
    metadata,
    number,
    of_a_job,
    partial_index,
    text_column,
)

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
