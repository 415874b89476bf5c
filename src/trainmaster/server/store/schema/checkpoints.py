"""Checkpoints, and the models that were made of them."""

from __future__ import annotations

from sqlalchemy import Boolean, Column, ForeignKeyConstraint, Index, Table, Text, false, text

from trainmaster.server.store.schema.columns import (
    big_integer,
    flag,
    integer,
    maybe_number,
    metadata,
    number,
    of_a_job,
    partial_index,
    text_column,
)

checkpoints = Table(
    "checkpoints",
    metadata,
    text_column("checkpoint_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("job_id"),
    integer("attempt"),
    big_integer("step"),
    maybe_number("epoch"),
    number("created_at"),
    text_column("metrics"),
    big_integer("size_bytes"),
    text_column("root"),
    text_column("path"),
    text_column("status"),
    Column("pinned", Boolean, nullable=False, server_default=false()),
    Column("kind", Text, nullable=False, server_default=text("''")),
    Column("name", Text, nullable=False, server_default=text("''")),
    Column("attributes", Text, nullable=False, server_default="{}"),
    maybe_number("expires_at"),
    Column("public", Boolean, nullable=False, server_default=false()),
    of_a_job(),
)
Index("checkpoints_by_job", checkpoints.c.job_id, checkpoints.c.created_at)
partial_index("checkpoints_by_expiry", checkpoints.c.expires_at, where="expires_at IS NOT NULL")
partial_index("checkpoints_with_a_kind", checkpoints.c.account_id, checkpoints.c.created_at, where="kind <> ''")

promoted_models = Table(
    "promoted_models",
    metadata,
    text_column("model_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("job_id"),
    text_column("checkpoint_id"),
    text_column("base_model"),
    text_column("kind"),
    text_column("details"),
    big_integer("size_bytes"),
    number("created_at"),
    of_a_job(),
)

operations = Table(
    "operations",
    metadata,
    text_column("operation_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("request"),
    flag("done"),
    text_column("error"),
    number("created_at"),
    number("worked_on_at"),
    ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
)
