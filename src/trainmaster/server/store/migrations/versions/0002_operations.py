"""What a team needs to share a cluster: weights and quotas, node labels, secrets, webhooks, usage, pins."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

from trainmaster.server.store.records import label_marks

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
    with_room = sa.text("room_at IS NOT NULL")
    op.create_index("jobs_with_room", "jobs", ["status"], sqlite_where=with_room, postgresql_where=with_room)
    op.add_column("leader", sa.Column("since", sa.Double))
    op.create_index("allocations_by_node", "allocations", ["node_id"])
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
    """Labels know the age and the other labels of their job, so that a filtered list is read off one index."""
    op.add_column("job_labels", sa.Column("created_at", sa.Double, nullable=False, server_default="0"))
    op.add_column("job_labels", sa.Column("marks", sa.Text, nullable=False, server_default=sa.text("''")))
    jobs = sa.table(
        "jobs", *(sa.column(name) for name in ("job_id", "account_id", "labels", "created_at", "deleted_at"))
    )
    labels = sa.table("job_labels", *(sa.column(name) for name in ("job_id", "account_id", "created_at", "marks")))
    connection = op.get_bind()
    for job in connection.execute(sa.select(jobs).where(jobs.c.labels != "{}")).all():
        of_job = sa.and_(labels.c.job_id == job.job_id, labels.c.account_id == job.account_id)
        if job.deleted_at is not None:
            connection.execute(sa.delete(labels).where(of_job))
        else:
            marks = label_marks(json.loads(job.labels))
            connection.execute(sa.update(labels).where(of_job).values(created_at=job.created_at, marks=marks))
    op.drop_index("jobs_by_label", "job_labels")
    op.create_index("jobs_by_label", "job_labels", ["account_id", "key", "value", "created_at", "job_id", "marks"])
    deleted = sa.text("deleted_at IS NOT NULL")
    op.create_index("jobs_to_purge", "jobs", ["purge", "job_id"], sqlite_where=deleted, postgresql_where=deleted)
    live = sa.text("deleted_at IS NULL")
    op.create_index(
        "jobs_by_status_and_age",
        "jobs",
        ["account_id", "status", "created_at", "job_id"],
        sqlite_where=live,
        postgresql_where=live,
    )


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
        sa.Column("labels", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "attempt", "account_id"),
        _of_a_job(),
    )
    op.create_index("usage_by_end", "usage", ["ended_at"])
    op.create_index("usage_by_account", "usage", ["account_id", "ended_at"])
    resumes, goes_on = sa.text("resume_checkpoint_id IS NOT NULL"), sa.text("ended_at IS NULL")
    op.create_index(
        "jobs_by_checkpoint", "jobs", ["resume_checkpoint_id"], sqlite_where=resumes, postgresql_where=resumes
    )
    op.create_index(
        "attempts_by_checkpoint", "attempts", ["resume_checkpoint_id"], sqlite_where=goes_on, postgresql_where=goes_on
    )


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
        sa.Column("given_up", sa.Integer, nullable=False),
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
