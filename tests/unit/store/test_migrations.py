from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Table, UniqueConstraint, create_engine, text

import trainmaster.store
from trainmaster.core.errors import NewerDatabaseError
from trainmaster.core.job import Attempt, Checkpoint, Event, Job
from trainmaster.core.resources import Node
from trainmaster.store import migrate, schema
from trainmaster.store.database import Database


def test_migrations_make_the_tables_of_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    Database.open(f"sqlite:///{path}").close()
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, schema.metadata) == []
    engine.dispose()


def test_head_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(trainmaster.store.__file__).with_name("migrations")))
    assert ScriptDirectory.from_config(config).get_heads() == [migrate.HEAD]


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (Job, schema.jobs),
        (Attempt, schema.attempts),
        (Event, schema.events),
        (Checkpoint, schema.checkpoints),
        (Node, schema.nodes),
    ],
)
def test_every_field_has_a_column(kind: type, table: Table) -> None:
    assert {field.name for field in dataclasses.fields(kind)} - {"attempt"} <= set(table.c.keys())


def test_unique_keys_hold_the_account() -> None:
    of_the_cluster = {"nodes", "queues", "cluster_events", "leader"}
    unique_by_nature = {"allocated_gpus", "events", "api_keys_by_hash"}
    for table in schema.metadata.tables.values():
        if table.name in of_the_cluster:
            continue
        keys = {table.name: table.primary_key.columns}
        keys |= {str(index.name): index.columns for index in table.indexes if index.unique}
        keys |= {str(c.name): c.columns for c in table.constraints if isinstance(c, UniqueConstraint)}
        for name, columns in keys.items():
            assert "account_id" in columns or name in unique_by_nature, name


def test_newer_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    Database.open(url).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(NewerDatabaseError, match="9999"):
        Database.open(url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"
    engine.dispose()
