from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import sqlalchemy as sa
from store_records import ACME, EVERYTHING, apply, change_of, new_job, submission_of, submit

from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.states import JobStatus
from trainmaster.server.store import job_list, jobs
from trainmaster.server.store.database import Database
from trainmaster.server.store.job_list import JobPage, JobQuery


def page(database: Database, **query: Any) -> JobPage:
    with database.read() as connection:
        return job_list.page(connection, ACME, JobQuery(**query))


def ids(database: Database, **query: Any) -> list[str]:
    return [job.job_id for job in page(database, **query).jobs]


def fill(database: Database, count: int, **fields: Any) -> None:
    def insert(connection: sa.Connection) -> None:
        for number in range(count):
            job = new_job(f"job-{number:03}", created_at=1000.0 + number // 2, **fields)
            jobs.insert(connection, EVERYTHING, submission_of(job))

    database.write_now(insert)


def test_pages_show_every_job_once_with_the_newest_first(database: Database) -> None:
    fill(database, 25)
    seen: list[str] = []
    token: str | None = None
    sizes = []
    while True:
        found = page(database, page_size=10, page_token=token)
        assert found.total_count == 25
        seen += [job.job_id for job in found.jobs]
        sizes.append(len(found.jobs))
        token = found.next_page_token
        if token is None:
            break
    assert sizes == [10, 10, 5]
    assert seen == [f"job-{number:03}" for number in reversed(range(25))]


def test_page_that_is_exactly_full_is_the_last(database: Database) -> None:
    fill(database, 10)
    assert page(database, page_size=10).next_page_token is None


def test_list_without_jobs_is_one_empty_page(database: Database) -> None:
    assert page(database) == JobPage(jobs=(), next_page_token=None, total_count=0)


def test_jobs_that_arrive_while_paging_shift_nothing(database: Database) -> None:
    fill(database, 20)
    first = page(database, page_size=10)
    submit(database, new_job("job-new", created_at=2000.0))
    submit(database, new_job("job-005-twin", created_at=1002.0))
    second = page(database, page_size=20, page_token=first.next_page_token)
    assert [job.job_id for job in first.jobs] == [f"job-{number:03}" for number in range(19, 9, -1)]
    rest = [f"job-{number:03}" for number in range(9, -1, -1)]
    assert [job.job_id for job in second.jobs if job.job_id in rest] == rest
    assert "job-new" not in [job.job_id for job in second.jobs]


@pytest.mark.parametrize(
    ("order_by", "expected"),
    [
        ("created_at", "abcd"),
        ("-created_at", "dcba"),
        ("updated_at", "dcba"),
        ("-updated_at", "abcd"),
        ("priority", "bdac"),
        ("-priority", "cadb"),
        ("name", "cdab"),
        ("-name", "badc"),
    ],
)
def test_order_holds_over_pages(database: Database, order_by: str, expected: str) -> None:
    for number, (job_id, priority, name) in enumerate([("a", 7, "x"), ("b", 2, "x"), ("c", 7, "A"), ("d", 5, "m")]):
        times = {"created_at": 1000.0 + number, "updated_at": 2000.0 - number}
        submit(database, new_job(job_id, priority=priority, name=name, **times))
    seen = ""
    token = None
    for _ in range(4):
        found = page(database, order_by=order_by, page_size=1, page_token=token)
        seen += found.jobs[0].job_id
        token = found.next_page_token
    assert seen == expected
    assert token is None


def test_filters_are_combined(database: Database) -> None:
    submit(database, new_job("a", status=JobStatus.QUEUED, queue="night", workload_kind="script", name="x"))
    submit(database, new_job("b", status=JobStatus.TRAINING, queue="night"))
    submit(database, new_job("c", status=JobStatus.FAILED, queue="day"))
    assert ids(database, statuses=(JobStatus.QUEUED, JobStatus.FAILED), order_by="created_at") == ["a", "c"]
    assert ids(database, queue="night", order_by="created_at") == ["a", "b"]
    assert ids(database, queue="night", statuses=(JobStatus.TRAINING,)) == ["b"]
    assert ids(database, kinds=("script", "service")) == ["a"]
    assert ids(database, name="x") == ["a"]
    assert page(database, queue="night", page_size=1).total_count == 2


def test_labels_must_all_match_with_any_of_their_values(database: Database) -> None:
    submit(database, new_job("a", labels={"team": "support", "stage": "one"}))
    submit(database, new_job("b", labels={"team": "support", "stage": "two"}))
    submit(database, new_job("c", labels={"team": "search", "stage": "one", "empty": ""}))
    submit(database, new_job("d"))
    for labels, expected in (
        ({"team": ("support",)}, ["a", "b"]),
        ({"team": ("support", "search")}, ["a", "b", "c"]),
        ({"team": ("support", "search"), "stage": ("one",)}, ["a", "c"]),
        ({"team": ("support",), "stage": ("three",)}, []),
        ({"empty": ("",)}, ["c"]),
        ({"stage": ("support",)}, []),
    ):
        assert ids(database, labels=labels, order_by="name") == expected


def test_deleted_jobs_are_not_listed(database: Database) -> None:
    job = submit(database, new_job("a"))
    submit(database, new_job("b"))
    apply(database, change_of(job, deleted_at=1.0))
    found = page(database)
    assert [job.job_id for job in found.jobs] == ["b"]
    assert found.total_count == 1


def test_counting_stops_at_the_cap(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_list, "MAX_TOTAL_COUNT", 4)
    fill(database, 7)
    assert page(database, page_size=2).total_count == 4


def forged(*parts: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode()


@pytest.mark.parametrize(
    "token",
    [
        "",
        "nonsense!",
        "ü",
        forged("-created_at", 1.0),
        forged("-created_at", "1", "job-1"),
        forged("-created_at", True, "job-1"),
        forged("-created_at", 10**400, "job-1"),
        forged("-created_at", float("nan"), "job-1"),
        forged("-created_at", 1.0, "\ud800"),
        forged("-created_at", 1.0, ["job-1"]),
        forged("name", "x", "job-1"),
        base64.urlsafe_b64encode(b"[" * 100_000).decode(),
    ],
)
def test_token_that_was_not_given_out_is_refused(database: Database, token: str) -> None:
    with pytest.raises(SpecError) as refusal:
        page(database, page_token=token)
    assert refusal.value.problems[0].field == "page_token"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"order_by": "spec"}, "order_by"),
        ({"order_by": "--name"}, "order_by"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": 101}, "page_size"),
    ],
)
def test_impossible_query_is_refused(database: Database, query: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as refusal:
        page(database, **query)
    assert refusal.value.problems[0].field == field


def test_list_can_be_ordered_by_handle_where_a_job_without_one_has_its_id(database: Database) -> None:
    for job_id, handle in (("job-1", "zebra"), ("job-2", None), ("job-3", "ape")):
        submit(database, new_job(job_id, handle=handle))
    assert ids(database, order_by="handle") == ["job-3", "job-2", "job-1"]
    first = page(database, order_by="handle", page_size=2)
    assert ids(database, order_by="handle", page_size=2, page_token=first.next_page_token) == ["job-1"]
    assert ids(database, order_by="-handle", page_size=1) == ["job-1"]
