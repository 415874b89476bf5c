"""What the root Tinker door keeps: sessions, runs and samplers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add tables; nothing that is there changes."""
    _sessions()
    _runs()
    _samplers()


def _sessions() -> None:
    op.create_table(
        "tinker_sessions",
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("idempotency_key", sa.Text),
        sa.Column("tags", sa.Text, nullable=False),
        sa.Column("user_metadata", sa.Text, nullable=False),
        sa.Column("sdk_version", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text),
        sa.Column("display_name", sa.Text),
        sa.Column("heartbeat_at", sa.Double, nullable=False),
        sa.Column("finished_at", sa.Double),
        sa.Column("finish", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("session_id", "account_id"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
    )
    op.create_index("tinker_sessions_by_age", "tinker_sessions", ["account_id", "created_at"])
    goes_on = sa.text("finished_at IS NULL")
    op.create_index(
        "tinker_sessions_open",
        "tinker_sessions",
        ["heartbeat_at"],
        sqlite_where=goes_on,
        postgresql_where=goes_on,
    )
    keyed = sa.text("idempotency_key IS NOT NULL")
    op.create_index(
        "tinker_sessions_by_key",
        "tinker_sessions",
        ["idempotency_key", "account_id"],
        unique=True,
        sqlite_where=keyed,
        postgresql_where=keyed,
    )


def _runs() -> None:
    op.create_table(
        "tinker_runs",
        sa.Column("model_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("mode", sa.Text, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("used_at", sa.Double, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text),
        sa.Column("attempt", sa.Integer),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("category", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("model_id", "account_id"),
        _of_a_session(),
        sa.ForeignKeyConstraint(["job_id", "account_id"], ["jobs.job_id", "jobs.account_id"]),
    )
    op.create_index("tinker_runs_by_age", "tinker_runs", ["account_id", "created_at"])
    op.create_index("tinker_runs_by_session", "tinker_runs", ["session_id"])


def _samplers() -> None:
    op.create_table(
        "tinker_samplers",
        sa.Column("sampler_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("model_path", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("sampler_id", "account_id"),
        _of_a_session(),
    )
    op.create_index("tinker_samplers_by_session", "tinker_samplers", ["session_id"])


def _of_a_session() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["session_id", "account_id"], ["tinker_sessions.session_id", "tinker_sessions.account_id"]
    )
