"""What is noted of a job: events, use, secrets."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, Table, UniqueConstraint

from trainmaster.server.store.schema.columns import flag, integer, maybe_text, metadata, number, of_a_job, text_column

events = Table(
    "events",
    metadata,
    # The cursor of the feed: rises in the order of commits and is never used twice.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    text_column("job_id"),
    integer("seq"),
    text_column("account_id"),
    number("at"),
    text_column("type"),
    text_column("actor"),
    integer("attempt"),
    maybe_text("from_status"),
    maybe_text("to_status"),
    maybe_text("reason"),
    text_column("message"),
    text_column("data"),
    of_a_job(),
    UniqueConstraint("job_id", "seq", "account_id", name="events_by_job"),
    sqlite_autoincrement=True,
)

activity = Table(
    "activity",
    metadata,
    text_column("job_id", primary_key=True),
    text_column("account_id", primary_key=True),
    number("at"),
    of_a_job(),
)

secrets = Table(
    "secrets",
    metadata,
    text_column("job_id", primary_key=True),
    text_column("name", primary_key=True),
    text_column("account_id", primary_key=True),
    text_column("sealed"),
    flag("until_end"),  # forgotten when the job ends
    of_a_job(),
)

usage = Table(
    "usage",
    metadata,
    text_column("job_id", primary_key=True),
    integer("attempt", primary_key=True, autoincrement=False),
    text_column("account_id", primary_key=True),
    text_column("queue"),
    number("started_at"),
    number("ended_at"),
    integer("gpus"),
    integer("cpu_cores"),
    text_column("labels"),
    of_a_job(),
)
Index("usage_by_end", usage.c.ended_at)
Index("usage_by_account", usage.c.account_id, usage.c.ended_at)
