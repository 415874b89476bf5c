"""Accounts, their keys, and those whom they want told."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKeyConstraint, Index, Integer, Table, Text, UniqueConstraint, text

from trainmaster.server.store.schema.columns import integer, maybe_number, metadata, number, text_column

accounts = Table(
    "accounts",
    metadata,
    text_column("account_id", primary_key=True),
    number("created_at"),
    Column("uid", Integer),  # of the system's user as whom its jobs run here
)

api_keys = Table(
    "api_keys",
    metadata,
    text_column("key_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("name"),
    text_column("scopes"),
    text_column("hash"),
    number("created_at"),
    maybe_number("revoked_at"),
    Column("created_by", Text, nullable=False, server_default=text("''")),
    ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
    UniqueConstraint("hash", name="api_keys_by_hash"),  # a key belongs to one account
)

webhooks = Table(
    "webhooks",
    metadata,
    text_column("webhook_id", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("url"),
    text_column("statuses"),
    text_column("sealed"),  # what deliveries are signed with
    number("created_at"),
    Column("cursor", BigInteger, nullable=False),  # the last event of the feed that is dealt with
    integer("failures"),
    number("not_before"),
    maybe_number("delivered_at"),
    text_column("problem"),
    integer("given_up"),
    ForeignKeyConstraint(["account_id"], ["accounts.account_id"]),
)

idempotency = Table(
    "idempotency",
    metadata,
    text_column("key", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("fingerprint"),
    text_column("job_id"),
    number("created_at"),
)
Index("idempotency_by_age", idempotency.c.created_at)
