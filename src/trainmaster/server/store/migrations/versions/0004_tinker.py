"""What the root Tinker door keeps: sessions, runs and samplers."""

from __future__ import annotations

from alembic import op

from trainmaster.server.store import columns

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    sessions = "tinker_sessions"
    op.create_table(
        sessions,
        *columns.keys("session_id", "account_id"),
        *columns.numbers("created_at"),
        *columns.maybe_texts("idempotency_key"),
        *columns.texts("tags", "user_metadata", "sdk_version"),
        *columns.maybe_texts("project_id", "display_name"),
        *columns.numbers("heartbeat_at"),
        *columns.maybe_numbers("finished_at"),
        *columns.texts("finish"),
        columns.of_an_account(),
    )
    keyed = columns.where("idempotency_key IS NOT NULL")
    op.create_index("tinker_sessions_by_age", sessions, ["account_id", "created_at"])
    op.create_index("tinker_sessions_open", sessions, ["heartbeat_at"], **columns.where("finished_at IS NULL"))
    op.create_index("tinker_sessions_by_key", sessions, ["idempotency_key", "account_id"], unique=True, **keyed)
    op.create_table(
        "tinker_runs",
        *columns.keys("model_id", "account_id"),
        *columns.texts("session_id", "base_model", "mode", "request"),
        *columns.numbers("created_at", "used_at"),
        *columns.texts("state"),
        *columns.maybe_texts("job_id"),
        *columns.maybe_integers("attempt"),
        *columns.texts("error", "category"),
        columns.of_a_session(),
        columns.of_a_job(),
    )
    op.create_index("tinker_runs_by_age", "tinker_runs", ["account_id", "created_at"])
    op.create_index("tinker_runs_by_session", "tinker_runs", ["session_id"])
    op.create_table(
        "tinker_samplers",
        *columns.keys("sampler_id", "account_id"),
        *columns.texts("session_id", "base_model"),
        *columns.maybe_texts("model_path"),
        *columns.numbers("created_at"),
        columns.of_a_session(),
    )
    op.create_index("tinker_samplers_by_session", "tinker_samplers", ["session_id"])
