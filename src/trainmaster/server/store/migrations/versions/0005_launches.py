"""The compiled launch of each job. Jobs that were stored before have none, and are compiled when they are launched."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add a table; nothing that is there changes."""
    op.create_table(
        "launches",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("launch", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "account_id"),
        sa.ForeignKeyConstraint(["job_id", "account_id"], ["jobs.job_id", "jobs.account_id"]),
    )
