"""Launches are compiled when jobs are launched: to store them took longer. No released version reads the table."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.drop_table("launches")
