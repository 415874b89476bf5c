"""How Alembic runs the migrations: on the connection, and in the transaction, of `trainmaster.server.store.migrate`."""

from __future__ import annotations

from alembic import context

from trainmaster.server.store import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    render_as_batch=True,
)
context.run_migrations()
