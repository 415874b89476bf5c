"""Files that clients sent, and the jobs that use them."""

from __future__ import annotations

from sqlalchemy import ForeignKeyConstraint, Table

from trainmaster.server.store.schema.columns import big_integer, metadata, number, of_a_job, text_column

blobs = Table(
    "blobs",
    metadata,
    text_column("sha256", primary_key=True),
    text_column("account_id", primary_key=True),
    big_integer("size_bytes"),
    number("created_at"),
    number("last_used_at"),
)

blob_uses = Table(
    "blob_uses",
    metadata,
    text_column("sha256", primary_key=True),
    text_column("job_id", primary_key=True),
    text_column("account_id", primary_key=True),
    of_a_job(),
    ForeignKeyConstraint(["sha256", "account_id"], ["blobs.sha256", "blobs.account_id"]),
)
