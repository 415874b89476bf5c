from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sqlalchemy import Connection
from store_records import ACME, EVERYTHING, new_job, stored, submit

from trainmaster.server.core.errors import ConflictError, JobNotFoundError, NotFoundError
from trainmaster.server.core.resources import Gpu, JobQueue, Node, NodeState
from trainmaster.server.store import events, jobs, nodes, queues
from trainmaster.server.store.database import Database

NODE = Node(
    node_id="n1",
    backend="local",
    hostname="machine",
    address="10.0.0.1",
    cpu_cores=64,
    ram_mb=2**33,
    storage_mb=2**34,
    gpus=(
        Gpu(index=0, device="GPU-0", type="H100-80GB", memory_mb=81_000),
        Gpu(index=1, device="GPU-1", type="H100-80GB", memory_mb=81_000, healthy=False),
    ),
    labels=("rack-1",),
    capabilities=("gpu", "infiniband"),
    slots=4,
    last_seen_at=100.0,
)


def put(database: Database, *inventory: Node) -> None:
    database.write_now(lambda connection: nodes.put(connection, EVERYTHING, inventory))


def all_nodes(database: Database) -> list[Node]:
    with database.read() as connection:
        return nodes.all(connection, ACME)


def changed(node: Node, **fields: Any) -> Node:
    return Node(**{**{name: getattr(node, name) for name in Node.__dataclass_fields__}, **fields})


def test_node_that_its_host_reports_no_more_is_gone_and_others_stay(database: Database) -> None:
    elsewhere = changed(NODE, node_id="n3", hostname="another")
    put(database, NODE, changed(NODE, node_id="n2"))
    put(database, elsewhere)
    put(database, NODE)
    assert all_nodes(database) == [NODE, elsewhere]


def test_node_of_a_pool_is_drained_as_its_engine_says_and_events_tell_why(database: Database) -> None:
    member = changed(NODE, pool="hpc")
    put(database, member)
    drained = changed(member, state=NodeState.DRAINED, drain_reason="a broken fan")
    put(database, drained)
    put(database, drained)
    assert all_nodes(database) == [drained]
    put(database, member)
    assert all_nodes(database) == [member]
    with database.read() as connection:
        told = sorted(events.of_subject(connection, ACME, "node/n1"), key=lambda event: event.type)
    assert [(event.type, event.message) for event in told] == [
        ("node_drained", "node n1 is drained on its engine: a broken fan"),
        ("node_enabled", "node n1 accepts jobs again"),
    ]


def test_node_comes_back_as_it_was_reported(database: Database) -> None:
    put(database, NODE)
    assert all_nodes(database) == [NODE]


def test_later_report_replaces_an_earlier_one(database: Database) -> None:
    put(database, NODE)
    later = changed(NODE, gpus=(), slots=1, state=NodeState.OFFLINE, last_seen_at=200.0)
    second = changed(NODE, node_id="n2", last_seen_at=200.0)
    put(database, later, second)
    assert all_nodes(database) == [later, second]
    put(database, NODE)
    assert all_nodes(database)[0].state is NodeState.READY


def test_node_of_another_host_that_nobody_reports_any_more_is_offline(database: Database) -> None:
    put(database, NODE, changed(NODE, node_id="n2", hostname="another"))
    put(database, changed(NODE, last_seen_at=150.0))
    assert [node.state for node in all_nodes(database)] == [NodeState.READY, NodeState.READY]
    put(database, changed(NODE, last_seen_at=200.0))
    assert [node.state for node in all_nodes(database)] == [NodeState.READY, NodeState.OFFLINE]


@pytest.mark.parametrize("state", [NodeState.DRAINING, NodeState.DRAINED])
def test_report_does_not_end_a_drain(database: Database, state: NodeState) -> None:
    put(database, NODE)
    database.write_now(lambda connection: nodes.drain(connection, EVERYTHING, "n1", 1.0, reason="fan", force=True))
    if state is NodeState.DRAINED:
        database.write_now(lambda connection: nodes.drained(connection, EVERYTHING, "n1", 2.0))
    put(database, changed(NODE, last_seen_at=300.0))
    expected = changed(NODE, state=state, last_seen_at=300.0, drain_reason="fan", drain_force=True)
    assert all_nodes(database) == [expected]
    database.write_now(lambda connection: nodes.enable(connection, EVERYTHING, "n1", 3.0))
    assert all_nodes(database) == [changed(NODE, last_seen_at=300.0)]


def test_drain_that_is_repeated_keeps_its_reason(database: Database) -> None:
    put(database, NODE)
    database.write_now(lambda connection: nodes.drain(connection, EVERYTHING, "n1", 1.0, reason="fan"))
    database.write_now(lambda connection: nodes.drain(connection, EVERYTHING, "n1", 2.0, force=True))
    assert [(node.drain_reason, node.drain_force) for node in all_nodes(database)] == [("fan", True)]
    database.write_now(lambda connection: nodes.drain(connection, EVERYTHING, "n1", 3.0, reason="disk"))
    assert [(node.drain_reason, node.drain_force) for node in all_nodes(database)] == [("disk", False)]


def test_report_does_not_take_given_labels_away(database: Database) -> None:
    put(database, NODE)
    database.write_now(
        lambda connection: nodes.give(connection, EVERYTHING, "n1", 1.0, labels=["zone=a"], capabilities=["nvlink"])
    )
    put(database, changed(NODE, last_seen_at=300.0))
    (node,) = all_nodes(database)
    assert {"zone=a"} <= node.marks
    assert {"nvlink"} <= node.tags


def test_change_of_an_unknown_node_is_refused(database: Database) -> None:
    for change in (nodes.drain, nodes.enable, nodes.give):
        with pytest.raises(NotFoundError):
            database.write_now(lambda connection, change=change: change(connection, EVERYTHING, "n1", 1.0))


def test_gpu_that_fails_and_recovers_makes_events(database: Database) -> None:
    put(database, NODE)
    first, second = NODE.gpus
    broken = dataclasses.replace(first, healthy=False, problem="Xid 79")
    put(database, changed(NODE, gpus=(broken, second), last_seen_at=200.0))
    put(database, changed(NODE, last_seen_at=300.0))
    with database.read() as connection:
        told = events.of_subject(connection, ACME, "node/n1")
    assert [event.type for event in told] == ["gpu_healthy", "gpu_unhealthy"]
    assert "Xid 79" in told[-1].message


def test_default_queue_is_there_from_the_start_and_others_can_be_made_changed_and_removed(database: Database) -> None:
    for queue in (JobQueue(name="night"), JobQueue(name="night", weight=2.0, quota_gpus=8)):
        database.write_now(lambda connection, queue=queue: queues.put(connection, EVERYTHING, queue, 1.0))
    with database.read() as connection:
        assert [queue.name for queue in queues.all(connection, ACME)] == ["default", "night"]
        assert queues.get(connection, ACME, "night") == JobQueue(name="night", weight=2.0, quota_gpus=8, created_at=1.0)
        assert not queues.exists(connection, ACME, "day")
    database.write_now(lambda connection: queues.remove(connection, EVERYTHING, "night", 2.0))
    for name, error in (("night", NotFoundError), ("default", ConflictError)):
        with pytest.raises(error):
            database.write_now(lambda connection, name=name: queues.remove(connection, EVERYTHING, name, 3.0))


def test_activity_is_the_latest_time_of_use_and_changes_no_job(database: Database) -> None:
    job = submit(database, new_job())
    with database.read() as connection:
        assert jobs.last_use(connection, ACME, "job-1") is None

    def use(connection: Connection) -> None:
        for at in (100.0, 300.0, 200.0):
            jobs.record_use(connection, ACME, "job-1", at)

    database.write_now(use)
    with database.read() as connection:
        assert jobs.last_use(connection, ACME, "job-1") == 300.0
    assert stored(database, "job-1") == job


def test_activity_of_no_job_is_refused(database: Database) -> None:
    with pytest.raises(JobNotFoundError):
        database.write_now(lambda connection: jobs.record_use(connection, EVERYTHING, "job-1", 1.0))
