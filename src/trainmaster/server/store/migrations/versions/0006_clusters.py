"""Clusters that operators declare, and what their engines report of nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from trainmaster.server.store import columns

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "clusters",
        *columns.keys("name"),
        *columns.texts("kind", "options", "sealed", "instance"),
        *columns.numbers("created_at", "changed_at"),
    )
    for column in (
        *columns.texts("pool", server_default=sa.text("''")),
        *columns.integers("held_gpus", "held_cpu_cores", server_default="0"),
        *columns.big_integers("held_ram_mb", server_default="0"),
    ):
        op.add_column("nodes", column)
