"""What a team needs to share a cluster: weights and quotas, node labels, secrets, webhooks, usage, pins."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

from trainmaster.server.store import columns
from trainmaster.server.store.records import label_marks

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add columns with defaults, then tables; nothing that is there changes its meaning."""
    _add_columns()
    _labels_by_age()
    _of_jobs()
    _of_accounts_and_the_cluster()


def _add_columns() -> None:
    none, no = sa.text("''"), sa.false()
    for table, added in (
        ("jobs", columns.maybe_numbers("room_at")),
        ("leader", columns.maybe_numbers("since")),
        ("checkpoints", columns.flags("pinned", server_default=no)),
        ("accounts", columns.maybe_integers("uid")),
        ("api_keys", columns.texts("created_by", server_default=none)),
        ("queues", [*columns.numbers("weight", server_default="1"), *columns.maybe_integers("quota_gpus")]),
        ("nodes", columns.texts("given_labels", "given_capabilities", server_default="[]")),
        ("nodes", columns.texts("drain_reason", server_default=none)),
        ("nodes", columns.flags("drain_force", server_default=no)),
        ("nodes", columns.maybe_numbers("drain_grace_s")),
    ):
        for column in added:
            op.add_column(table, column)
    op.create_index("jobs_with_room", "jobs", ["status"], **columns.where("room_at IS NOT NULL"))
    op.create_index("allocations_by_node", "allocations", ["node_id"])


def _labels_by_age() -> None:
    """Labels know the age and the other labels of their job, so that a filtered list is read off one index."""
    for column in (
        *columns.numbers("created_at", server_default="0"),
        *columns.texts("marks", server_default=sa.text("''")),
    ):
        op.add_column("job_labels", column)
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
    by_age = ["account_id", "status", "created_at", "job_id"]
    op.drop_index("jobs_by_label", "job_labels")
    op.create_index("jobs_by_label", "job_labels", ["account_id", "key", "value", "created_at", "job_id", "marks"])
    op.create_index("jobs_to_purge", "jobs", ["purge", "job_id"], **columns.where("deleted_at IS NOT NULL"))
    op.create_index("jobs_by_status_and_age", "jobs", by_age, **columns.where("deleted_at IS NULL"))


def _of_jobs() -> None:
    op.create_table(
        "secrets",
        *columns.keys("job_id", "name", "account_id"),
        *columns.texts("sealed"),
        *columns.flags("until_end"),
        columns.of_a_job(),
    )
    op.create_table(
        "usage",
        *columns.keys("job_id"),
        *columns.number_keys("attempt"),
        *columns.keys("account_id"),
        *columns.texts("queue"),
        *columns.numbers("started_at", "ended_at"),
        *columns.integers("gpus", "cpu_cores"),
        *columns.texts("labels"),
        columns.of_a_job(),
    )
    resumes, goes_on = columns.where("resume_checkpoint_id IS NOT NULL"), columns.where("ended_at IS NULL")
    op.create_index("usage_by_end", "usage", ["ended_at"])
    op.create_index("usage_by_account", "usage", ["account_id", "ended_at"])
    op.create_index("jobs_by_checkpoint", "jobs", ["resume_checkpoint_id"], **resumes)
    op.create_index("attempts_by_checkpoint", "attempts", ["resume_checkpoint_id"], **goes_on)


def _of_accounts_and_the_cluster() -> None:
    op.create_table(
        "webhooks",
        *columns.keys("webhook_id", "account_id"),
        *columns.texts("url", "statuses", "sealed"),
        *columns.numbers("created_at"),
        *columns.big_integers("cursor"),
        *columns.integers("failures"),
        *columns.numbers("not_before"),
        *columns.maybe_numbers("delivered_at"),
        *columns.texts("problem"),
        *columns.integers("given_up"),
        columns.of_an_account(),
    )
    op.create_table(
        "cluster_events",
        *columns.rising_id(),
        *columns.numbers("at"),
        *columns.texts("type", "subject", "message", "data"),
        sqlite_autoincrement=True,
    )
    op.create_index("cluster_events_by_subject", "cluster_events", ["subject", "id"])
