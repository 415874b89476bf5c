"""What a team needs to share a cluster: weights and quotas, node labels, secrets, webhooks, usage, pins."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add columns with defaults, then tables; nothing that is there changes its meaning."""
    _columns()
    _labels_by_age()
    _of_jobs()
    _of_accounts()
    _of_the_cluster()


def _columns() -> None:
    op.add_column("jobs", sa.Column("room_at", sa.Double))
    op.add_column("checkpoints", sa.Column("pinned", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("accounts", sa.Column("uid", sa.Integer))
    op.add_column("api_keys", sa.Column("created_by", sa.Text, nullable=False, server_default=sa.text("''")))
    op.add_column("queues", sa.Column("weight", sa.Double, nullable=False, server_default="1"))
    op.add_column("queues", sa.Column("quota_gpus", sa.Integer))
    for name in ("given_labels", "given_capabilities"):
        op.add_column("nodes", sa.Column(name, sa.Text, nullable=False, server_default="[]"))
    op.add_column("nodes", sa.Column("drain_reason", sa.Text, nullable=False, server_default=sa.text("''")))
    op.add_column("nodes", sa.Column("drain_force", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("nodes", sa.Column("drain_grace_s", sa.Double))


def _labels_by_age() -> None:
    """Labels know the age of their job, so that a filtered list is read in its order off one index."""
    op.add_column("job_labels", sa.Column("created_at", sa.Double, nullable=False, server_default="0"))
    op.execute(
        "UPDATE job_labels SET created_at = (SELECT jobs.created_at FROM jobs WHERE jobs.job_id = job_labels.job_id"
        " AND jobs.account_id = job_labels.account_id)"
    )
    op.execute(
        "DELETE FROM job_labels WHERE EXISTS (SELECT 1 FROM jobs WHERE jobs.job_id = job_labels.job_id"
        " AND jobs.account_id = job_labels.account_id AND jobs.deleted_at IS NOT NULL)"
    )
    op.drop_index("jobs_by_label", "job_labels")
    op.create_index("jobs_by_label", "job_labels", ["account_id", "key", "value", "created_at", "job_id"])


def _of_jobs() -> None:
    op.create_table(
        "secrets",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("sealed", sa.Text, nullable=False),
        sa.Column("until_end", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "name", "account_id"),
        _of_a_job(),
    )
    op.create_table(
        "usage",
        sa.Column("job_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double, nullable=False),
        sa.Column("gpus", sa.Integer, nullable=False),
        sa.Column("cpu_cores", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", "account_id"),
        _of_a_job(),
    )
    op.create_index("usage_by_end", "usage", ["ended_at"])


def _of_accounts() -> None:
    op.create_table(
        "webhooks",
        sa.Column("webhook_id", sa.Text, nullable=False),
        sa.Column("account_id", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("statuses", sa.Text, nullable=False),
        sa.Column("sealed", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("cursor", sa.BigInteger, nullable=False),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("not_before", sa.Double, nullable=False),
        sa.Column("delivered_at", sa.Double),
        sa.Column("problem", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("webhook_id", "account_id"),
        sa.ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
    )


def _of_the_cluster() -> None:
    op.create_table(
        "cluster_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("cluster_events_by_subject", "cluster_events", ["subject", "id"])


def _of_a_job() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["job_id", "account_id"], ["jobs.job_id", "jobs.account_id"])
