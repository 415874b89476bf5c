"""For trainer services: checkpoints with names and an end, promoted models, operations, handles of deleted jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from trainmaster.server.store import columns

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add columns with defaults, then tables; nothing that is there changes its meaning."""
    for column in (
        *columns.texts("kind", "name", server_default=sa.text("''")),
        *columns.texts("attributes", server_default="{}"),
        *columns.maybe_numbers("expires_at"),
        *columns.flags("public", server_default=sa.false()),
    ):
        op.add_column("checkpoints", column)
    deleted = columns.where("handle IS NOT NULL AND deleted_at IS NOT NULL")
    op.create_index("checkpoints_by_expiry", "checkpoints", ["expires_at"], **columns.where("expires_at IS NOT NULL"))
    op.create_index(
        "checkpoints_with_a_kind", "checkpoints", ["account_id", "created_at"], **columns.where("kind <> ''")
    )
    op.create_index("jobs_by_handle_once", "jobs", ["account_id", "handle"], **deleted)
    op.create_table(
        "promoted_models",
        *columns.keys("model_id", "account_id"),
        *columns.texts("job_id", "checkpoint_id", "base_model", "kind", "details"),
        *columns.big_integers("size_bytes"),
        *columns.numbers("created_at"),
        columns.of_a_job(),
    )
    op.create_table(
        "operations",
        *columns.keys("operation_id", "account_id"),
        *columns.texts("request"),
        *columns.flags("done"),
        *columns.texts("error"),
        *columns.numbers("created_at", "worked_on_at"),
        columns.of_an_account(),
    )
