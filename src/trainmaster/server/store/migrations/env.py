"""The environment of Alembic: migrations run on the connection, in the transaction, of `server.store.database`."""

from __future__ import annotations

from alembic import context

from trainmaster.server.store import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    render_as_batch=True,
)
context.run_migrations()
