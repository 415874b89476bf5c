"""Brings a database to the revision that this version needs."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from trainmaster.server.core.errors import NewerDatabaseError

HEAD = "0004"
"""The newest revision under `migrations/versions`; written here too because Alembic is slow to import."""

_SCRIPTS = Path(__file__).with_name("migrations")


def revision(connection: Connection) -> str | None:
    """The database's revision; None when it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def upgrade(connection: Connection, target: str = HEAD) -> None:
    """Run the migrations that are missing up to a revision, inside the connection's transaction.

    Raises:
        NewerDatabaseError: the database's revision is not one of ours.
    """
    present = revision(connection)
    if present == target:
        return
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if present is not None and present not in known:
        raise NewerDatabaseError(
            f"the database has revision {present}, which only a newer version of Trainmaster knows; upgrade this server"
        )
    command.upgrade(config, target)
