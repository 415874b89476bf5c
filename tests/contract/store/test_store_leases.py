from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection
from store_records import EVERYTHING

from trainmaster.server.core.errors import NotLeaderError
from trainmaster.server.core.resources import JobQueue
from trainmaster.server.store import leases, queues
from trainmaster.server.store.database import Database
from trainmaster.server.store.leases import Lease

TTL_S = 5.0


def acquire(database: Database, holder: str, now: float) -> Lease | None:
    return database.write_now(
        lambda connection: leases.acquire(connection, EVERYTHING, holder, f"http://{holder}", now, TTL_S)
    )


def must_acquire(database: Database, holder: str, now: float) -> Lease:
    lease = acquire(database, holder, now)
    assert lease is not None
    return lease


def renew(database: Database, lease: Lease, now: float) -> Lease | None:
    return database.write_now(lambda connection: leases.renew(connection, EVERYTHING, lease, now, TTL_S))


def current(database: Database) -> Lease | None:
    with database.read() as connection:
        return leases.current(connection, EVERYTHING)


def check(database: Database, lease: Lease) -> None:
    with database.read() as connection:
        leases.check(connection, EVERYTHING, lease.epoch)


def test_nobody_leads_at_first(database: Database) -> None:
    assert current(database) is None


def test_second_holder_waits_until_the_lease_is_over(database: Database) -> None:
    first = must_acquire(database, "one", 100.0)
    assert first == Lease(epoch=1, holder="one", url="http://one", expires_at=105.0, since=100.0)
    assert acquire(database, "two", 104.9) is None
    second = must_acquire(database, "two", 105.0)
    assert second.epoch == 2
    assert current(database) == second
    assert acquire(database, "one", 106.0) is None


def test_same_holder_keeps_its_epoch(database: Database) -> None:
    first = must_acquire(database, "one", 100.0)
    again = Lease(epoch=1, holder="one", url="http://one", expires_at=108.0, since=100.0)
    assert must_acquire(database, "one", 103.0) == again
    assert must_acquire(database, "one", 900.0).epoch == first.epoch


def test_renewed_lease_lasts_longer(database: Database) -> None:
    lease = must_acquire(database, "one", 100.0)
    renewed = renew(database, lease, 104.0)
    assert renewed is not None
    assert renewed.expires_at == 109.0
    assert acquire(database, "two", 108.0) is None


def test_lease_that_changed_hands_cannot_be_renewed_nor_used(database: Database) -> None:
    old = must_acquire(database, "one", 100.0)
    check(database, old)
    new = must_acquire(database, "two", 200.0)
    assert renew(database, old, 201.0) is None
    with pytest.raises(NotLeaderError):
        check(database, old)
    check(database, new)
    database.write_now(lambda connection: leases.release(connection, EVERYTHING, old))
    assert current(database) == new


def test_transaction_of_a_former_leader_writes_nothing(database: Database) -> None:
    old = must_acquire(database, "one", 100.0)
    must_acquire(database, "two", 200.0)

    def lead(connection: Connection) -> None:
        queues.put(connection, EVERYTHING, JobQueue(name="led by one"), 1.0)
        leases.check(connection, EVERYTHING, old.epoch)

    with pytest.raises(NotLeaderError):
        database.write_now(lead)
    with database.read() as connection:
        assert not queues.exists(connection, EVERYTHING, "led by one")


def test_released_lease_is_free_at_once_under_a_new_epoch(database: Database) -> None:
    lease = must_acquire(database, "one", 100.0)
    database.write_now(lambda connection: leases.release(connection, EVERYTHING, lease))
    assert current(database) is None
    with pytest.raises(NotLeaderError):
        check(database, lease)
    assert must_acquire(database, "two", 100.5).epoch == 2


def test_one_of_many_that_want_to_lead_does(database_url: str) -> None:
    servers = [Database.open(database_url, lock_timeout_s=60.0) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        won = list(pool.map(lambda number: acquire(servers[number], f"server-{number}", 100.0), range(3)))
    for server in servers:
        server.close()
    assert [lease is not None for lease in won].count(True) == 1
