"""How long the engine of a cluster lets jobs run."""

from __future__ import annotations

from alembic import op

from trainmaster.server.store import columns

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    for column in columns.maybe_numbers("time_limit_s"):
        op.add_column("nodes", column)
