"""Why jobs wait: what was read is kept while nothing changes, and never shown after a change."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from store_records import ACME, EVERYTHING, apply, change_of, new_job, node_of, placement_of, report, submit

from trainmaster.server.coordinator import explain
from trainmaster.server.coordinator.explain import Explainer
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Job
from trainmaster.server.core.reports import EngineOutage
from trainmaster.server.core.resources import JobQueue, Needs, Share
from trainmaster.server.core.states import JobStatus, PendingCode
from trainmaster.server.store import nodes, queues
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

NOW = 2000.0
TWO_GPUS = Needs(gpus_per_node=2)


def why(explainer: Explainer, job: Job, scope: Scope = ACME) -> PendingCode | None:
    told = explainer.explain(scope, job, now=NOW).explanation
    return told.code if told else None


def set_quota(database: Database, queue: str, quota: int | None) -> None:
    database.write_now(
        lambda connection: queues.put(connection, EVERYTHING, JobQueue(name=queue, quota_gpus=quota), now=NOW)
    )


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    function: Callable[..., Any] = getattr(module, name)
    calls: list[str] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        return function(*arguments, **named)

    monkeypatch.setattr(module, name, counted)
    return calls


def test_every_change_is_in_the_next_answer(database: Database) -> None:
    explainer = Explainer(database)
    job = submit(database, new_job("asks", needs=TWO_GPUS))
    assert why(explainer, job) is PendingCode.IMPOSSIBLE
    report(database, node_of("n", gpus=node_of("n").gpus[:2]))
    assert why(explainer, job) is PendingCode.STARTING
    holder = submit(database, new_job("holds", needs=TWO_GPUS, queued_at=900.0))
    assert explainer.explain(ACME, job, now=NOW).queue_position == 2
    holder = apply(database, placement_of(holder, Share(node_id="n", gpus=(0, 1))))
    assert why(explainer, job) is PendingCode.ROOM
    assert explainer.explain(ACME, job, now=NOW).queue_position == 1
    set_quota(database, "default", 1)
    assert why(explainer, job) is PendingCode.QUOTA
    set_quota(database, "default", None)
    database.write_now(lambda connection: nodes.drain(connection, EVERYTHING, "n", NOW))
    assert why(explainer, job) is PendingCode.UNAVAILABLE


def test_outage_of_a_cluster_is_told_while_it_lasts(database: Database) -> None:
    outages: dict[str, EngineOutage] = {}
    explainer = Explainer(database, lambda: outages)
    job = submit(database, new_job("asks", backend="hpc", needs=TWO_GPUS))
    assert why(explainer, job) is PendingCode.IMPOSSIBLE
    outages["hpc"] = EngineOutage(since=NOW - 60, problem="no route")
    assert why(explainer, job) is PendingCode.UNAVAILABLE
    (entry,), _ = explainer.look_into(ACME, "default", now=NOW, page_size=10, page_token=None)
    assert entry.reason is not None
    assert "hpc has not answered for 60 s (no route)" in entry.reason
    outages.clear()
    assert why(explainer, job) is PendingCode.IMPOSSIBLE


def test_cluster_is_read_once_while_nothing_changes(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    explainer = Explainer(database)
    report(database, node_of("n"))
    jobs = [submit(database, new_job(f"job-{number}", needs=Needs(gpus_per_node=4))) for number in range(3)]
    reads = count_calls(monkeypatch, queues, "holding")
    assert [explainer.explain(ACME, job, now=NOW).queue_position for job in jobs * 5] == [1, 2, 3] * 5
    assert len(reads) == 1
    explainer.look_into(EVERYTHING, "default", now=NOW, page_size=10, page_token=None)
    assert len(reads) == 1
    apply(database, change_of(jobs[0], status=JobStatus.CANCELLED))
    assert [explainer.explain(ACME, job, now=NOW).queue_position for job in jobs[1:]] == [1, 2]
    assert len(reads) == 2


def test_job_that_changed_after_the_cluster_was_read_is_explained_as_it_is(database: Database) -> None:
    explainer = Explainer(database)
    report(database, node_of("n"))
    job = submit(database, new_job("asks", needs=TWO_GPUS))
    assert why(explainer, job) is PendingCode.STARTING
    later = job.evolve(version=job.version + 1, not_before=NOW + 60)
    assert why(explainer, later) is PendingCode.BACKOFF
    assert why(explainer, job) is PendingCode.STARTING


def test_threads_that_share_what_was_read_see_their_own_writes(database: Database) -> None:
    explainer = Explainer(database)
    report(database, node_of("n"))

    def change_and_ask(number: int) -> list[str]:
        job = submit(database, new_job(f"job-{number}", queue=f"queue-{number}", needs=Needs(gpus_per_node=40)))
        told = []
        for quota in range(1, 21):
            set_quota(database, job.queue, quota)
            explanation = explainer.explain(ACME, job, now=NOW).explanation
            assert explanation is not None
            told.append(explanation.message.rpartition(" ")[2])
        return told

    with ThreadPoolExecutor(8) as pool:
        for told in pool.map(change_and_ask, range(8)):
            assert told == [str(quota) for quota in range(1, 21)]


def test_behind_more_jobs_than_are_read_position_is_counted_and_those_ahead_are_known(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "FAR", 3)
    explainer = Explainer(database)
    report(database, node_of("n", gpus=node_of("n").gpus[:2]))
    jobs = [
        submit(database, new_job(f"job-{number}", needs=TWO_GPUS, queued_at=1000.0 + number)) for number in range(6)
    ]
    holder = submit(database, new_job("holds", needs=TWO_GPUS, queued_at=900.0))
    apply(database, placement_of(holder, Share(node_id="n", gpus=(0, 1))))
    waits = explainer.explain(ACME, jobs[5], now=NOW)
    assert waits.queue_position == 6
    assert waits.explanation is not None
    assert {blocker.job_id for blocker in waits.explanation.blockers} >= {"holds", "job-0"}


def test_job_of_another_account_is_not_explained(database: Database) -> None:
    job = submit(database, new_job("asks"))
    with pytest.raises(NotFoundError):
        Explainer(database).explain(Scope("other"), job, now=NOW)
