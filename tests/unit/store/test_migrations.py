from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import first_revision
import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, MetaData, Table, UniqueConstraint, create_engine, insert, select, text

import trainmaster.server.store
from postgres_server import PostgresServer
from trainmaster.server.core.errors import NewerDatabaseError
from trainmaster.server.core.job import Attempt, Change, CheckpointRecord, Job, JobEvent
from trainmaster.server.core.resources import Gpu, Node, Share
from trainmaster.server.core.states import Actor, JobStatus
from trainmaster.server.store import (
    accounts,
    attempts,
    checkpoints,
    events,
    job_list,
    jobs,
    leases,
    nodes,
    queues,
    schema,
)
from trainmaster.server.store.database import HEAD, Database
from trainmaster.server.store.records import Records
from trainmaster.server.store.scope import Scope


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of an empty database, as an operator would make it."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 't.db'}"
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        name = server.new_database()
        yield server.url(name)
        server.drop_database(name)


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    """For what the store has no functions for."""
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    yield engine
    engine.dispose()


@pytest.mark.parametrize("first", [pytest.param(True, id="migrated"), pytest.param(False, id="new")])
def test_database_has_the_tables_of_the_schema(url: str, engine: Engine, first: bool) -> None:
    if first:
        with engine.begin() as connection:
            first_revision.create(connection)
    Database.open(url).close()
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, schema.metadata) == []


def test_head_is_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(trainmaster.server.store.__file__).with_name("migrations")))
    assert ScriptDirectory.from_config(config).get_heads() == [HEAD]


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (Job, schema.jobs),
        (Attempt, schema.attempts),
        (JobEvent, schema.events),
        (CheckpointRecord, schema.checkpoints),
        (Node, schema.nodes),
    ],
)
def test_every_field_has_a_column(kind: type, table: Table) -> None:
    assert {field.name for field in dataclasses.fields(kind)} - {"attempt"} <= set(table.c.keys())


def test_unique_keys_hold_the_account() -> None:
    of_the_cluster = {"nodes", "queues", "clusters", "cluster_events", "leader"}
    unique_by_nature = {"allocated_gpus", "events", "api_keys_by_hash"}
    for table in schema.metadata.tables.values():
        if table.name in of_the_cluster:
            continue
        keys = {table.name: table.primary_key.columns}
        keys |= {str(index.name): index.columns for index in table.indexes if index.unique}
        keys |= {str(c.name): c.columns for c in table.constraints if isinstance(c, UniqueConstraint)}
        for name, columns in keys.items():
            assert "account_id" in columns or name in unique_by_nature, name


def test_newer_database_is_refused_and_left_as_it_is(url: str, engine: Engine) -> None:
    Database.open(url).close()
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(NewerDatabaseError, match="9999"):
        Database.open(url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"


RUNNING = Job(
    account_id="acme",
    job_id="job-1",
    root_job_id="job-1",
    name="first",
    spec_version=1,
    spec={"name": "first", "workload": {"kind": "command", "argv": ["true"]}},
    workload_kind="command",
    backend="local",
    status=JobStatus.TRAINING,
    created_at=1000.0,
    updated_at=1000.0,
    status_at=1000.0,
    labels={"team": "a"},
    handle="tuner",
    event_count=1,
    attempt_count=1,
    attempt=Attempt(
        number=1,
        token="t",
        backend="local",
        created_at=1001.0,
        shares=(Share(node_id="n1", gpus=(0,), cpu_cores=2),),
    ),
)
DELETED = RUNNING.evolve(
    job_id="job-0", status=JobStatus.COMPLETED, handle=None, attempt=None, created_at=900.0, deleted_at=950.0
)
CHECKPOINT = CheckpointRecord(
    checkpoint_id="c-1",
    job_id="job-1",
    attempt=1,
    step=5,
    created_at=1002.0,
    metrics={"loss": 0.5},
    size_bytes=2**40,
    root="artifacts",
    path="job-1/c-1",
)
EVENT = JobEvent(
    job_id="job-1", seq=1, at=1000.0, type="status", actor=Actor.API, attempt=1, to_status=JobStatus.TRAINING
)
NODE = Node(
    node_id="n1",
    backend="local",
    hostname="h",
    cpu_cores=8,
    ram_mb=8000,
    storage_mb=100,
    gpus=(Gpu(index=0, device="0", type="H100", memory_mb=80_000),),
)


def job_row(job: Job) -> dict[str, Any]:
    number = None if job.attempt is None else job.attempt.number
    rows = Records(Job, schema.jobs, without=["attempt"])
    return rows.to_row(job, order_key=job.order_key, attempt_number=number)


def fill_first_revision(connection: Connection) -> None:
    """What the first version could have stored, in the tables as they were then."""
    tables = MetaData()
    tables.reflect(connection)
    owned = {"account_id": "acme", "job_id": "job-1"}
    labels = [{**owned, "job_id": job_id, "key": "team", "value": "a"} for job_id in ("job-0", "job-1")]
    share = {**owned, "attempt": 1, "member": 0, "node_id": "n1"}
    rows: dict[str, list[dict[str, Any]]] = {
        "accounts": [{"account_id": "acme", "created_at": 1.0}],
        "jobs": [job_row(DELETED), job_row(RUNNING)],
        "job_labels": labels,
        "attempts": [Records(Attempt, schema.attempts).to_row(RUNNING.live, **owned)],
        "allocations": [{**share, "cpu_cores": 2, "ram_mb": 0, "storage_mb": 0}],
        "allocated_gpus": [{**share, "gpu_index": 0}],
        "checkpoints": [Records(CheckpointRecord, schema.checkpoints).to_row(CHECKPOINT, account_id="acme")],
        "events": [Records(JobEvent, schema.events).to_row(EVENT, account_id="acme")],
        "activity": [{**owned, "at": 1003.0}],
        "idempotency": [{**owned, "key": "k", "fingerprint": "f", "created_at": 1000.0}],
        "api_keys": [
            {"key_id": "k1", "account_id": "acme", "name": "n", "scopes": '["view"]', "hash": "h", "created_at": 1.0}
        ],
        "blobs": [{"sha256": "a" * 64, "account_id": "acme", "size_bytes": 1, "created_at": 1.0, "last_used_at": 1.0}],
        "blob_uses": [{**owned, "sha256": "a" * 64}],
        "nodes": [Records(Node, schema.nodes).to_row(NODE)],
    }
    for name, found in rows.items():
        table = tables.tables[name]
        connection.execute(insert(table), [{key: row[key] for key in row if key in table.c} for row in found])
    connection.execute(text("UPDATE leader SET epoch = 7, holder = 'somebody', url = 'u', expires_at = 5"))


def test_database_of_the_first_revision_keeps_all_that_is_in_it(url: str, engine: Engine) -> None:
    with engine.begin() as connection:
        first_revision.create(connection)
    with engine.begin() as connection:
        fill_first_revision(connection)
    database = Database.open(url)
    scope = Scope("acme")
    with database.read() as connection:
        assert jobs.get(connection, scope, "tuner") == RUNNING
        page = job_list.page(connection, scope, job_list.JobQuery(labels={"team": ("a",)}))
        assert ([job.job_id for job in page.jobs], page.total_count) == (["job-1"], 1)
        assert checkpoints.get(connection, scope, "c-1") == CHECKPOINT
        assert [event for _, event in events.feed(connection, scope, 0, 10)] == [EVENT]
        assert accounts.find_request(connection, scope, "k", "f") is not None
        key = accounts.find_key(connection, scope, "h")
        assert key is not None
        assert key.scopes == ("view",)
        assert nodes.all(connection, scope) == [NODE]
        assert [(queue.name, queue.weight, queue.quota_gpus) for queue in queues.all(connection, scope)] == [
            ("default", 1.0, None)
        ]
        assert jobs.last_use(connection, scope, "job-1") == 1003.0
        lease = leases.current(connection, scope)
        assert lease is not None
        assert (lease.epoch, lease.holder) == (7, "somebody")
        aged = connection.execute(select(schema.job_labels.c.job_id, schema.job_labels.c.created_at)).all()
        assert [tuple(row) for row in aged] == [("job-1", 1000.0)]
    ended = RUNNING.evolve(
        version=RUNNING.version + 1, event_count=2, status=JobStatus.COMPLETED, attempt=None, finished_at=1010.0
    )
    change = Change(
        job=ended,
        events=(dataclasses.replace(EVENT, seq=2),),
        ended=RUNNING.live.evolve(started_at=1001.0, ended_at=1010.0),
    )
    assert database.write_now(lambda connection: jobs.apply(connection, scope, change))
    with database.read() as connection:
        assert attempts.all_allocations(connection, scope) == []
        assert events.last_id(connection, scope) == 2
    database.close()
