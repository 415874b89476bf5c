"""For trainer services: checkpoints with names and an end, promoted models, operations, handles of deleted jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add columns with defaults, then tables; nothing that is there changes its meaning."""
    for name in ("kind", "name"):
        op.add_column("checkpoints", sa.Column(name, sa.Text, nullable=False, server_default=sa.text("''")))
    op.add_column("checkpoints", sa.Column("attributes", sa.Text, nullable=False, server_default="{}"))
    op.add_column("checkpoints", sa.Column("expires_at", sa.Double))
    op.add_column("checkpoints", sa.Column("public", sa.Boolean, nullable=False, server_default=sa.false()))
    _partial_index("checkpoints_by_expiry", "checkpoints", ["expires_at"], "expires_at IS NOT NULL")
    _partial_index("checkpoints_with_a_kind", "checkpoints", ["account_id", "created_at"], "kind <> ''")
    _partial_index(
        "jobs_by_handle_once", "jobs", ["account_id", "handle"], "handle IS NOT NULL AND deleted_at IS NOT NULL"
    )
    op.create_table(
        "promoted_models",
        sa.Column("model_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("checkpoint_id", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("details", sa.Text, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("model_id", "account_id"),
        sa.ForeignKeyConstraint(["job_id", "account_id"], ["jobs.job_id", "jobs.account_id"]),
    )
    op.create_table(
        "operations",
        sa.Column("operation_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("done", sa.Boolean, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("worked_on_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("operation_id", "account_id"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
    )


def _partial_index(name: str, table: str, columns: list[str], where: str) -> None:
    condition = sa.text(where)
    op.create_index(name, table, columns, sqlite_where=condition, postgresql_where=condition)
