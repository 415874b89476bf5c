"""What a settings file says of the cluster, applied to a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainmaster.server.coordinator.clusters import Clusters
from trainmaster.server.coordinator.operator_files import DeclaredCluster
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.core.resources import JobQueue, Node
from trainmaster.server.core.states import JobStatus
from trainmaster.server.settings.declared import (
    Declared,
    DeclaredAccount,
    DeclaredNode,
    DeclaredQueue,
    DeclaredWebhook,
)
from trainmaster.server.settings.encryption import Sealer
from trainmaster.server.store import accounts, events, nodes, queues, webhooks
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

EVERYTHING = Scope.everything()
SECRET = "sixteen characters"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    yield database
    database.close()


@pytest.fixture
def subscriptions(database: Database) -> Subscriptions:
    return Subscriptions(database, Sealer(bytes(32)), private_addresses=True)


def cluster_of(database: Database, subscriptions: Subscriptions, **tables: Any) -> DeclaredCluster:
    return DeclaredCluster(
        database, Declared(**tables), subscriptions, Clusters(database, Sealer(bytes(32))), clock=lambda: 1000.0
    )


def report(database: Database, *names: str, pool: str = "") -> None:
    amounts = {"cpu_cores": 1, "ram_mb": 1, "storage_mb": 1, "last_seen_at": 1000.0}
    found = [Node(node_id=name, backend=pool or "b", hostname=name, pool=pool, **amounts) for name in names]
    database.write_now(lambda connection: nodes.put(connection, EVERYTHING, found))


def labels(database: Database, name: str) -> tuple[str, ...]:
    with database.read() as connection:
        return nodes.get(connection, EVERYTHING, name).given_labels


def test_webhook_of_an_account_that_is_not_there_stops_the_start(
    database: Database, subscriptions: Subscriptions
) -> None:
    hook = DeclaredWebhook(url="http://a.example/", secret=SECRET, account="visoin")
    with pytest.raises(RefusedError, match=r"webhooks.x.account: there is no account 'visoin'"):
        cluster_of(database, subscriptions, webhooks={"x": hook}).apply()
    known = {"visoin": DeclaredAccount()}
    cluster_of(database, subscriptions, accounts=known, webhooks={"x": hook}).apply()


def test_queues_and_accounts_are_made_or_changed_and_others_stay(
    database: Database, subscriptions: Subscriptions
) -> None:
    def before(connection: Any) -> None:
        queues.put(connection, EVERYTHING, JobQueue(name="research", weight=9.0), 1.0)
        queues.put(connection, EVERYTHING, JobQueue(name="other", weight=7.0), 1.0)
        accounts.ensure(connection, EVERYTHING, "vision", 1.0)

    database.write_now(before)
    tables = {
        "queues": {"research": DeclaredQueue(weight=2.0, quota_gpus=8), "new": DeclaredQueue()},
        "accounts": {"vision": DeclaredAccount(uid=1500), "speech": DeclaredAccount()},
    }
    cluster_of(database, subscriptions, **tables).apply()
    with database.read() as connection:
        found = {queue.name: (queue.weight, queue.quota_gpus) for queue in queues.all(connection, EVERYTHING)}
        assert found == {"default": (1.0, None), "research": (2.0, 8), "new": (1.0, None), "other": (7.0, None)}
        assert accounts.get(connection, EVERYTHING, "vision").uid == 1500
        assert accounts.get(connection, EVERYTHING, "speech").uid is None
        told = events.last_cluster_id(connection, EVERYTHING)
    cluster_of(database, subscriptions, **tables).apply()
    with database.read() as connection:
        assert events.last_cluster_id(connection, EVERYTHING) == told


def test_node_has_its_labels_when_it_is_reported_and_routes_may_change_them(
    database: Database, subscriptions: Subscriptions
) -> None:
    report(database, "a")
    given = {"a": DeclaredNode(labels=("x",)), "b": DeclaredNode(labels=("y",), capabilities=("ib",))}
    first = cluster_of(database, subscriptions, nodes=given)
    first.apply()
    assert labels(database, "a") == ("x",)
    report(database, "a", "b")
    first.settle_nodes()
    assert labels(database, "b") == ("y",)
    database.write_now(lambda connection: nodes.give(connection, EVERYTHING, "b", 1001.0, labels=["mine"]))
    first.settle_nodes()
    assert labels(database, "b") == ("mine",)
    cluster_of(database, subscriptions, nodes=given).apply()
    assert labels(database, "b") == ("y",)


def test_node_that_nobody_reports_is_told_once(
    database: Database, subscriptions: Subscriptions, caplog: pytest.LogCaptureFixture
) -> None:
    with_typo = cluster_of(database, subscriptions, nodes={"gpu-1O": DeclaredNode(labels=("x",))})
    with_typo.apply()
    assert caplog.messages == []  # nobody has reported anything yet
    report(database, "gpu-10")
    for _ in range(2):
        with_typo.settle_nodes()
    (told,) = caplog.messages
    assert "gpu-1O; there are: gpu-10" in told


def test_labels_of_a_node_of_a_cluster_have_no_effect_and_the_log_says_so(
    database: Database, subscriptions: Subscriptions, caplog: pytest.LogCaptureFixture
) -> None:
    report(database, "hpc:n1", pool="hpc")
    cluster_of(database, subscriptions, nodes={"hpc:n1": DeclaredNode(labels=("x",))}).apply()
    assert labels(database, "hpc:n1") == ()
    (told,) = caplog.messages
    assert "hpc:n1 in the settings file has no effect" in told
    assert "set labels and features there" in told


def test_webhook_keeps_its_place_while_the_file_changes_it(database: Database, subscriptions: Subscriptions) -> None:
    def declare(**fields: Any) -> webhooks.Webhook:
        hook = DeclaredWebhook(**{"url": "http://a.example/", "secret": SECRET, **fields})
        owners = {name: DeclaredAccount() for name in ("default", "vision")}
        cluster_of(database, subscriptions, accounts=owners, webhooks={"chat": hook}).apply()
        with database.read() as connection:
            (found,) = webhooks.all(connection, EVERYTHING)
            return found

    first = declare()
    assert declare() == first
    assert subscriptions.secret_of(first) == SECRET
    changed = declare(url="http://b.example/", statuses=(JobStatus.FAILED,), secret="another sixteen ones")
    assert (changed.url, changed.statuses, changed.cursor) == ("http://b.example/", ("FAILED",), first.cursor)
    assert subscriptions.secret_of(changed) == "another sixteen ones"
    assert declare(account="vision").account_id == "vision"


@pytest.mark.parametrize("fields", [{"url": "ftp://a"}, {"secret": "short"}])
def test_webhook_that_cannot_be_stops_the_start(
    database: Database, subscriptions: Subscriptions, fields: dict[str, str]
) -> None:
    hook = DeclaredWebhook(**{"url": "http://a.example/", "secret": SECRET, **fields})
    with pytest.raises(RefusedError, match=r"webhooks\.chat: "):
        cluster_of(database, subscriptions, accounts={"default": DeclaredAccount()}, webhooks={"chat": hook}).apply()
