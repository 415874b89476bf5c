"""The compiled launch of each job. Jobs that were stored before have none, and are compiled when they are launched."""

from __future__ import annotations

from alembic import op

from trainmaster.server.store.columns import keys, of_a_job, texts

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table("launches", *keys("job_id", "account_id"), *texts("version", "launch"), of_a_job())
