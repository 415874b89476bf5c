"""Checkpoints of a job that has very many of them: in pages, by id, by place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from store_records import ACME, EVERYTHING, OTHER, apply, change_of, checkpoint_of, new_job, submit

from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.job import CheckpointRecord, Job
from trainmaster.server.store import checkpoints
from trainmaster.server.store.checkpoints import CheckpointPage
from trainmaster.server.store.database import Database
from trainmaster.server.store.page_tokens import token_after

MANY = 2500


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the checkpoints that were read."""
    rows: list[str] = []
    real = checkpoints.RECORDS.from_row

    def counted(row: object) -> CheckpointRecord:
        checkpoint = real(row)  # type: ignore[arg-type]
        rows.append(checkpoint.checkpoint_id)
        return checkpoint

    monkeypatch.setattr(checkpoints.RECORDS, "from_row", counted)
    return rows


def flood(database: Database, count: int = MANY) -> tuple[Job, list[CheckpointRecord]]:
    """A job with many checkpoints, some of them made at the same time, and one more of another job."""
    job = submit(database, new_job())
    made = [replace(checkpoint_of(job, f"c{n}", n), created_at=1000.0 + n // 7) for n in range(count)]
    job = apply(database, change_of(job, checkpoints=tuple(made)))
    other = submit(database, new_job("job-2"))
    apply(database, change_of(other, checkpoints=(checkpoint_of(other, "another", 1),)))
    return job, made


def pages(database: Database, job: Job, page_size: int) -> Iterator[CheckpointPage]:
    token = None
    while True:
        with database.read() as connection:
            found = checkpoints.page(connection, ACME, job.job_id, page_size=page_size, page_token=token)
        yield found
        token = found.next_page_token
        if token is None:
            return


def test_pages_show_every_checkpoint_once_and_read_no_more_than_they_show(database: Database, read: list[str]) -> None:
    job, made = flood(database)
    read.clear()
    found = list(pages(database, job, 1000))
    assert [len(each.checkpoints) for each in found] == [1000, 1000, 500]
    assert [each for page in found for each in page.checkpoints] == made
    assert {each.total_count for each in found} == {MANY}
    assert len(read) == MANY + 2  # one more for each page that is not the last


def test_checkpoint_that_goes_between_two_pages_shifts_nothing(database: Database) -> None:
    job, made = flood(database, 10)
    walk = pages(database, job, 4)
    assert list(next(walk).checkpoints) == made[:4]
    database.write_now(lambda connection: checkpoints.hide(connection, ACME, job, ["c3", "c5"]))
    assert [each.checkpoint_id for page in walk for each in page.checkpoints] == ["c4", "c6", "c7", "c8", "c9"]


def test_page_of_all_has_no_token(database: Database) -> None:
    job, made = flood(database, 3)
    (page,) = pages(database, job, 3)
    assert (list(page.checkpoints), page.next_page_token, page.total_count) == (made, None, 3)


@pytest.mark.parametrize(
    "token",
    ["nonsense", token_after("name", 1.0, "1:c"), token_after("created_at", 1.0, "c")]
    + [token_after("created_at", 1.0, f"{step}:c") for step in ("x", "-1", str(2**63), "9" * 5000)],
)
def test_token_of_nobody_is_refused(database: Database, token: str) -> None:
    with database.read() as connection, pytest.raises(SpecError):
        checkpoints.page(connection, ACME, "job-1", page_size=1, page_token=token)


def test_named_checkpoints_are_those_of_the_job_alone(database: Database, read: list[str]) -> None:
    job, made = flood(database)
    read.clear()
    with database.read() as connection:
        assert checkpoints.named(connection, ACME, job.job_id, ["c7", "another", "nobodys"]) == [made[7]]
        assert checkpoints.named(connection, EVERYTHING, job.job_id, ["c7"]) == [made[7]]
        assert checkpoints.named(connection, OTHER, job.job_id, ["c7"]) == []
        assert len(checkpoints.named(connection, ACME, job.job_id, [f"c{n}" for n in range(700)])) == 700
    assert len(read) == 702


def test_paths_go_on_from_an_id(database: Database) -> None:
    job, made = flood(database, 30)
    elsewhere = replace(checkpoint_of(job, "c0-elsewhere", 1), root="uri", path="s3://bucket/c")
    job = apply(database, change_of(job, checkpoints=(elsewhere,)))
    found: list[tuple[str, str]] = []
    start = ""
    with database.read() as connection:
        while True:
            *some, following = checkpoints.paths(connection, ACME, job.job_id, root="artifacts", start=start, limit=8)
            found += some
            if len(some) < 7:
                break
            start = following[0]
        assert checkpoints.paths(connection, OTHER, job.job_id, root="artifacts", start="", limit=8) == []
    found.append(following)
    assert sorted(found) == sorted((each.checkpoint_id, each.path) for each in made)
    assert len(found) == len(set(found))


def test_what_users_saved_is_found_by_name_id_and_kind_without_reading_the_rest(
    database: Database, read: list[str]
) -> None:
    job, made = flood(database)
    kept = [
        replace(checkpoint_of(job, f"k{n}", 3000 + n), kind=kind, name=f"step-{n}", size_bytes=n)
        for n, kind in enumerate(("training", "sampler", "training"))
    ]
    job = apply(database, change_of(job, checkpoints=tuple(kept)))
    read.clear()
    with database.read() as connection:
        assert checkpoints.called(connection, ACME, job.job_id, "step-1") == [kept[1]]
        assert checkpoints.called(connection, ACME, job.job_id, "k2") == [kept[2]]
        assert checkpoints.called(connection, ACME, job.job_id, "c7") == []  # nobody asked for it by name
        assert checkpoints.newest_of_kind(connection, ACME, job.job_id, "training", most=9) == [kept[2], kept[0]]
        assert checkpoints.newest_of_kind(connection, ACME, job.job_id, "training", most=1) == [kept[2]]
        total = sum(each.size_bytes for each in [*made, *kept])
        assert checkpoints.total_size(connection, ACME, job.job_id, root="artifacts") == total
        assert checkpoints.total_size(connection, ACME, job.job_id, root="uri") is None
    assert read == ["k1", "k2", "k2", "k0", "k2"]
