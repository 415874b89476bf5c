"""What belongs to the cluster and to no account: nodes, queues, their events, and the lease."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, Table, Text, false, text

from trainmaster.server.store.schema.columns import (
    big_integer,
    integer,
    maybe_number,
    maybe_text,
    metadata,
    number,
    text_column,
)

nodes = Table(
    "nodes",
    metadata,
    text_column("node_id", primary_key=True),
    text_column("backend"),
    text_column("hostname"),
    text_column("address"),
    integer("cpu_cores"),
    big_integer("ram_mb"),
    big_integer("storage_mb"),
    text_column("gpus"),
    text_column("labels"),
    text_column("capabilities"),
    integer("slots"),
    text_column("state"),
    number("last_seen_at"),
    Column("given_labels", Text, nullable=False, server_default="[]"),
    Column("given_capabilities", Text, nullable=False, server_default="[]"),
    Column("drain_reason", Text, nullable=False, server_default=text("''")),
    Column("drain_force", Boolean, nullable=False, server_default=false()),
    maybe_number("drain_grace_s"),
)

queues = Table(
    "queues",
    metadata,
    text_column("name", primary_key=True),
    number("created_at"),
    Column("weight", Double, nullable=False, server_default="1"),
    Column("quota_gpus", Integer),
)

cluster_events = Table(
    "cluster_events",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    number("at"),
    text_column("type"),
    text_column("subject"),
    text_column("message"),
    text_column("data"),
    sqlite_autoincrement=True,
)
Index("cluster_events_by_subject", cluster_events.c.subject, cluster_events.c.id)

leader = Table(
    "leader",
    metadata,
    integer("id", primary_key=True, autoincrement=False),  # there is one row
    integer("epoch"),
    maybe_text("holder"),
    text_column("url"),
    number("expires_at"),
    maybe_number("since"),
)
