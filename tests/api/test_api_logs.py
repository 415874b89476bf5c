"""Logs over HTTP: pages, filters, cursors, and following."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import httpx
import pytest
from api_world import Api, Served, ServerEvent, World, server_events

from patience import PATIENCE_S
from trainmaster.schema.reports import LogPage
from trainmaster.server.http import log_files
from trainmaster.server.http.envelope import Ok
from trainmaster.server.http.log_reader import LogReader, LogSnapshot


def lines(api: Api, job_id: str, **query: Any) -> list[str]:
    return [line["message"] for line in page(api, job_id, **query)["lines"]]


def page(api: Api, job_id: str, **query: Any) -> Any:
    return api.call("GET", f"/v1/jobs/{job_id}/logs", params=query)


def messages(events: Iterator[ServerEvent]) -> Iterator[str]:
    for event in events:
        if event.event == "end":
            return
        assert event.event == "log", event
        yield event.json()["message"]


def test_job_without_a_log_has_an_empty_page(api: Api, world: World) -> None:
    job_id = api.submit()
    empty = page(api, job_id)
    assert (empty["lines"], empty["complete"]) == ([], False)
    world.write(world.start(job_id), "late\n")
    assert lines(api, job_id, cursor=empty["next_cursor"]) == ["late"]


def test_line_tells_where_and_when_it_was_written(api: Api, world: World) -> None:
    job_id = api.submit()
    world.write(world.start(job_id), "one\n", at=1_700_000_000.25, rank=1, channel="err", step="prepare")
    assert page(api, job_id)["lines"] == [
        {
            "ts": "2023-11-14T22:13:20.250000Z",
            "attempt": 1,
            "node": 0,
            "rank": 1,
            "step": "prepare",
            "stream": "stderr",
            "message": "one",
        }
    ]


def test_lines_of_several_files_are_merged_by_time(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    world.write(job, "a1\na2\n", at=100)
    world.write(job, "b1\n", at=150, rank=1)
    world.write(job, "a3\n", at=200)
    world.write(job, "e1\n", at=175, channel="err")
    assert lines(api, job_id) == ["a1", "a2", "b1", "e1", "a3"]
    assert lines(api, job_id, rank=1) == ["b1"]
    assert lines(api, job_id, stream="stderr") == ["e1"]
    assert lines(api, job_id, step="main", rank=0, stream="stdout") == ["a1", "a2", "a3"]
    assert lines(api, job_id, step="other") == []
    world.write(job, "c1\n", at=300, node=1, rank=2)
    assert lines(api, job_id, node=1) == ["c1"]
    assert lines(api, job_id, node=0, tail=1) == ["a3"]


def test_open_line_counts_when_the_attempt_has_ended(api: Api, world: World) -> None:
    job_id = api.submit()
    world.write(world.start(job_id), "whole\nhal")
    first = page(api, job_id)
    assert [line["message"] for line in first["lines"]] == ["whole"]
    world.write(world.job(job_id), "f")
    world.end(job_id)
    last = page(api, job_id, cursor=first["next_cursor"])
    assert [line["message"] for line in last["lines"]] == ["half"]
    assert last["complete"] is True
    assert lines(api, job_id, cursor=last["next_cursor"]) == []


def test_bytes_that_are_no_text_are_replaced(api: Api, world: World) -> None:
    job_id = api.submit()
    world.write(world.start(job_id), b"\xff\x00 \xe2\x82\xac\r\n")
    assert lines(api, job_id) == ["\ufffd\x00 \u20ac"]


def test_tail_gives_the_last_lines_over_all_files(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    for n in range(50):
        world.write(job, f"line {n}\n", at=1000 + n, rank=n % 3)
    assert lines(api, job_id, tail=4) == [f"line {n}" for n in range(46, 50)]
    assert lines(api, job_id, tail=0) == []
    assert len(lines(api, job_id, tail=500)) == 50
    assert lines(api, job_id, tail=2, rank=0) == ["line 45", "line 48"]


def test_tail_of_a_large_file_does_not_need_the_rest(api: Api, world: World) -> None:
    job_id = api.submit()
    world.write(world.start(job_id), "".join(f"{n:099d}\n" for n in range(30_000)))
    assert lines(api, job_id, tail=2) == [f"{29_998:099d}", f"{29_999:099d}"]


def test_tail_reaches_into_earlier_attempts_only_when_all_are_wanted(api: Api, world: World) -> None:
    job_id = api.submit(scheduling_config={"max_retries": 1})
    world.write(world.start(job_id), "a\nb\n")
    world.end(job_id, "WORKER_LOST")
    world.write(world.start(job_id), "c\n")
    assert lines(api, job_id, tail=2) == ["c"]
    assert lines(api, job_id, tail=2, attempt="all") == ["b", "c"]


def test_since_skips_older_lines(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    for n in range(10):
        world.write(job, f"{n}\n", at=1_700_000_000 + n)
    assert lines(api, job_id, since="1700000007") == ["7", "8", "9"]
    assert lines(api, job_id, since="2023-11-14T22:13:28Z") == ["8", "9"]
    assert lines(api, job_id, since="2023-11-14T23:13:28+01:00") == ["8", "9"]
    assert lines(api, job_id, since="1800000000") == []


def test_since_finds_its_place_in_a_large_index(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    path = world.directory(job).path / "nodes/0/logs/main.0.out"
    path.write_text("".join(f"{n:09d}\n" for n in range(20_000)))
    path.with_name("main.0.out.times").write_text("".join(f"{1000 + n}.000 {10 * n + 10}\n" for n in range(20_000)))
    found = page(api, job_id, since="15000", limit=2)
    assert [line["message"] for line in found["lines"]] == [f"{14_000:09d}", f"{14_001:09d}"]
    assert found["lines"][0]["ts"] == "1970-01-01T04:10:00Z"


def test_pages_show_every_line_once(api: Api, world: World) -> None:
    job_id = api.submit(scheduling_config={"max_retries": 1})
    job = world.start(job_id)
    for n in range(25):
        world.write(job, f"1/{n}\n", at=1000 + n // 5, rank=n % 2)
    world.end(job_id, "WORKER_LOST")
    job = world.start(job_id)
    for n in range(25):
        world.write(job, f"2/{n}\n", at=1000 + n // 5, rank=n % 2)
    world.end(job_id)
    seen: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        found = page(api, job_id, attempt="all", limit=7, **cursor)
        seen += [line["message"] for line in found["lines"]]
        cursor = {"cursor": found["next_cursor"]}
        if found["complete"]:
            break
    assert sorted(seen) == sorted(f"{attempt}/{n}" for attempt in (1, 2) for n in range(25))
    assert [line[0] for line in seen] == ["1"] * 25 + ["2"] * 25


def test_attempt_can_be_chosen(api: Api, world: World) -> None:
    job_id = api.submit(scheduling_config={"max_retries": 1})
    world.write(world.start(job_id), "first\n")
    world.end(job_id, "WORKER_LOST")
    world.write(world.start(job_id), "second\n")
    assert lines(api, job_id) == ["second"]
    chosen = page(api, job_id, attempt=1)
    assert ([line["message"] for line in chosen["lines"]], chosen["complete"]) == (["first"], True)
    assert lines(api, job_id, attempt="all") == ["first", "second"]
    assert api.call("GET", f"/v1/jobs/{job_id}/logs?attempt=3", 404)["code"] == "NOT_FOUND"


def test_long_line_is_shown_in_pieces(api: Api, world: World) -> None:
    job_id = api.submit()
    length = log_files.MAX_LINE_BYTES
    world.write(world.start(job_id), b"x" * length + b"\n" + b"y" * (2 * length + 1) + b"\nz\n")
    assert [len(line) for line in lines(api, job_id)] == [length, length, length, 1, 1]
    with api.stream(f"/v1/jobs/{job_id}/logs") as events:
        assert [len(line) for line in islice(messages(events), 5)] == [length, length, length, 1, 1]


@pytest.mark.parametrize(
    "query",
    [
        {"cursor": "garbage"},
        {"cursor": "WzEsIHsiLi4vLi4vZXRjL3Bhc3N3ZCI6IDB9XQ"},
        {"attempt": "0"},
        {"attempt": "two"},
        {"since": "yesterday"},
        {"stream": "stdin"},
        {"rank": "-1"},
        {"limit": "0"},
        {"tail": "1e5"},
    ],
)
def test_bad_query_is_refused(api: Api, query: dict[str, str]) -> None:
    error = api.call("GET", f"/v1/jobs/{api.submit()}/logs", 422, params=query)
    assert error["details"][0]["field"] in query


def test_follower_sees_lines_as_they_come_until_the_end(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    world.write(job, "one\n")
    with api.stream(f"/v1/jobs/{job_id}/logs") as events:
        seen = messages(events)
        assert next(seen) == "one"
        world.write(job, "two\nthr")
        assert next(seen) == "two"
        world.write(job, "ee")
        world.end(job_id)
        assert list(seen) == ["three"]
        assert next(events).data == "[DONE]"
        assert list(events) == []


def test_follow_parameter_is_as_good_as_the_header(api: Api, world: World) -> None:
    job_id = api.submit()
    world.write(world.start(job_id), "one\n")
    world.end(job_id)
    response = api.http.get(f"/v1/jobs/{job_id}/logs?follow=true")
    assert response.headers["content-type"].startswith("text/event-stream")
    log, end, done = server_events(iter(response.text.split("\n")))
    assert (log.event, end.event, done.data) == ("log", "end", "[DONE]")
    assert end.json() == {"status": "COMPLETED"}


def test_follower_goes_on_into_the_next_attempt(api: Api, world: World) -> None:
    job_id = api.submit(scheduling_config={"max_retries": 2})
    with api.stream(f"/v1/jobs/{job_id}/logs") as events:
        seen = messages(events)
        for attempt in range(3):
            job = world.start(job_id)
            world.write(job, f"{attempt} begins\n")
            assert next(seen) == f"{attempt} begins"
            world.write(job, f"{attempt} ends")
            world.end(job_id, "WORKER_LOST")
            assert next(seen) == f"{attempt} ends"
        assert list(seen) == []


def test_follower_of_one_attempt_stops_at_its_end(api: Api, world: World) -> None:
    job_id = api.submit(scheduling_config={"max_retries": 1})
    world.write(world.start(job_id), "first\n")
    world.end(job_id, "WORKER_LOST")
    with api.stream(f"/v1/jobs/{job_id}/logs?attempt=1") as events:
        assert list(messages(events)) == ["first"]


def test_interrupted_follower_goes_on_after_any_line(api: Api, world: World) -> None:
    job_id = api.submit(scheduling_config={"max_retries": 1})
    job = world.start(job_id)
    for n in range(6):
        world.write(job, f"{n}\n", at=1000 + n, rank=n % 2)
    world.end(job_id, "WORKER_LOST")
    job = world.start(job_id)
    for n in range(6, 9):
        world.write(job, f"{n}\n", at=1000 + n)
    world.end(job_id)
    with api.stream(f"/v1/jobs/{job_id}/logs?attempt=all") as events:
        whole = [event for event in events if event.event == "log"]
    assert [event.json()["message"] for event in whole] == [str(n) for n in range(9)]
    for place, event in enumerate(whole):
        assert event.id is not None
        with api.stream(f"/v1/jobs/{job_id}/logs?attempt=all", **{"Last-Event-ID": event.id}) as events:
            assert list(messages(events)) == [str(n) for n in range(place + 1, 9)]


def test_follower_can_begin_with_the_last_lines(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    world.write(job, "1\n2\n3\n")
    with api.stream(f"/v1/jobs/{job_id}/logs?tail=1") as events:
        seen = messages(events)
        assert next(seen) == "3"
        world.write(job, "4\n")
        assert next(seen) == "4"


def test_follower_survives_a_restart_of_the_server(world: World) -> None:
    key = world.key("restart")
    with httpx.Client(headers={"X-API-Key": key}, timeout=PATIENCE_S, verify=False) as http:
        last = ""
        seen: list[str] = []
        job = None
        for round_ in range(3):
            with Served.serve(world.context()) as served:
                http.base_url = served.url
                api = Api(http=http, world=world, account_id="restart", key=key)
                job = job or world.start(api.submit())
                for n in range(3):
                    world.write(job, f"{round_}/{n}\n", rank=n % 2)
                with api.stream(f"/v1/jobs/{job.job_id}/logs", **({"Last-Event-ID": last} if last else {})) as events:
                    for event in islice(events, 2 + round_ % 2):
                        seen.append(event.json()["message"])
                        last = str(event.id)
                    served.loop.call_soon_threadsafe(served.front.close)
                    rest = list(events)
                    assert all(event.event == "log" for event in rest)
                    for event in rest:
                        seen.append(event.json()["message"])
                        last = str(event.id)
    assert sorted(seen) == sorted({f"{round_}/{n}" for round_ in range(3) for n in range(3)})


def test_many_followers_miss_nothing(api: Api, served: Served, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    expected = [f"line {n}" for n in range(200)]
    seen: dict[int, list[str]] = {}

    def follow(number: int) -> None:
        with (
            httpx.Client(base_url=served.url, headers={"X-API-Key": api.key}, timeout=PATIENCE_S, verify=False) as http,
            Api(http=http, world=world, account_id="", key="").stream(f"/v1/jobs/{job_id}/logs") as events,
        ):
            seen[number] = list(messages(events))

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for begin in range(0, 200, 10):
        world.write(job, "".join(f"{line}\n" for line in expected[begin : begin + 10]))
        time.sleep(0.02)  # not for luck: so that there are many looks, and followers at many places
    world.end(job_id)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert seen == dict.fromkeys(range(40), expected)


def test_quiet_stream_has_heartbeats(api: Api, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmaster.server.http.followers.HEARTBEAT_S", 0.2)
    job_id = api.submit()
    with api.http.stream("GET", f"/v1/jobs/{job_id}/logs?follow=1") as response:
        quiet = response.iter_lines()
        assert next(line for line in quiet if line).startswith(":")


def test_failure_in_the_middle_of_a_stream_is_told(
    api: Api, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    world.write(job, "one\n")
    with api.stream(f"/v1/jobs/{job_id}/logs") as events:
        assert next(events).event == "log"

        def explode(*arguments: object, **options: object) -> object:
            raise PermissionError("no")

        monkeypatch.setattr("trainmaster.server.http.log_reader.LogReader.read", explode)
        world.write(job, "two\n")
        failed, done = events
    assert (failed.event, failed.json()["code"], done.data) == ("error", "INTERNAL", "[DONE]")


def test_deleted_job_ends_its_followers(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    with api.stream(f"/v1/jobs/{job_id}/logs") as events:
        world.write(job, "last words\n")
        api.call("DELETE", f"/v1/jobs/{job_id}")
        world.end(job_id, "DELETED")
        assert list(messages(events)) == ["last words"]


def test_source_that_cannot_be_looked_at_disturbs_no_other(
    api: Api, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken_id, sound_id = api.submit(), api.submit()
    world.start(broken_id)
    sound = world.start(sound_id)
    look = LogReader.look_again

    def fails(reader: LogReader, snapshot: LogSnapshot) -> LogSnapshot:
        if reader.job_id == broken_id:
            raise PermissionError("no")
        return look(reader, snapshot)

    with api.stream(f"/v1/jobs/{sound_id}/logs") as sounds, api.stream(f"/v1/jobs/{broken_id}/logs") as broken:
        monkeypatch.setattr(LogReader, "look_again", fails)
        assert next(broken).json()["code"] == "INTERNAL"
        world.write(sound, "still here\n")
        assert next(sounds).json()["message"] == "still here"


def text(api: Api, job_id: str, **query: Any) -> httpx.Response:
    return api.http.get(f"/v1/jobs/{job_id}/logs", params=query, headers={"Accept": "text/plain"}).raise_for_status()


def test_plain_text_has_the_lines_of_all_files_by_time(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    world.write(job, "a1\n\na2 €\n", at=1_700_000_000)
    world.write(job, "b1\n", at=1_700_000_001.5, rank=1)
    world.write(job, b"a3\xff\n", at=1_700_000_002)
    answer = text(api, job_id)
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == "a1\n\na2 €\nb1\na3\ufffd\n"
    assert answer.headers["x-log-end"] == "true"
    assert text(api, job_id, ranks=True, times=True).text == (
        "2023-11-14T22:13:20Z [rank 0] a1\n2023-11-14T22:13:20Z [rank 0] \n2023-11-14T22:13:20Z [rank 0] a2 €\n"
        "2023-11-14T22:13:21.500000Z [rank 1] b1\n2023-11-14T22:13:22Z [rank 0] a3\ufffd\n"
    )
    assert text(api, job_id, tail=2).text == "b1\na3\ufffd\n"
    assert text(api, job_id, rank=1).text == "b1\n"
    world.write(job, "a4\n")
    assert text(api, job_id, cursor=answer.headers["x-next-cursor"]).text == "a4\n"


def test_plain_text_goes_on_where_a_page_ended(api: Api, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmaster.server.http.routes.logs.TEXT_PAGE_BYTES", 1)
    job_id = api.submit(scheduling_config={"max_retries": 1})
    job = world.start(job_id)
    for n in range(6):
        world.write(job, f"1/{n}\n", at=1000 + n, rank=n % 2)
    world.end(job_id, "WORKER_LOST")
    world.write(world.start(job_id), "2/0\n")
    world.end(job_id)
    seen, query = "", {}
    while True:
        answer = text(api, job_id, attempt="all", **query)
        seen += answer.text
        if answer.headers["x-log-end"] == "true":
            break
        query = {"cursor": answer.headers["x-next-cursor"]}
    assert seen == "".join(f"1/{n}\n" for n in range(6)) + "2/0\n"


def test_page_is_what_its_schema_says(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    world.write(job, 'quote " backslash \\ control \x07 line \u2028 separator\nsecond\n', at=1000)
    world.write(job, "\r10%", at=1001, rank=1)
    found = page(api, job_id)
    assert Ok[LogPage](data=found).data == found
    assert found["lines"][0]["message"] == 'quote " backslash \\ control \x07 line \u2028 separator'


def test_line_that_was_overwritten_is_shown_in_its_last_state(api: Api, world: World) -> None:
    job_id = api.submit()
    world.write(world.start(job_id), b"\r 0%\r 50%\r100%\ndone\r\n1/2\r2/2\r\n")
    assert lines(api, job_id) == ["100%", "done", "2/2"]
    assert text(api, job_id).text == "100%\ndone\n2/2\n"


def test_open_line_that_is_overwritten_is_shown_after_the_others(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    world.write(job, "begins\nhalf a plain li", rank=1)
    world.write(job, "begins\n\r10%\r20%")
    found = page(api, job_id)
    assert [line["message"] for line in found["lines"]] == ["begins", "begins"]
    assert [(line["message"], line["rank"]) for line in found["open_lines"]] == [("20%", 0)]
    assert text(api, job_id).text == "begins\nbegins\n20%\n"
    world.write(job, "\r30%\n")
    after = page(api, job_id, cursor=found["next_cursor"])
    assert ([line["message"] for line in after["lines"]], after["open_lines"]) == (["30%"], [])


def test_open_line_of_an_attempt_that_has_ended_is_a_line(api: Api, world: World) -> None:
    job_id = api.submit()
    world.write(world.start(job_id), "\r10%\r20%")
    world.end(job_id)
    found = page(api, job_id)
    assert ([line["message"] for line in found["lines"]], found["open_lines"]) == (["20%"], [])


def test_long_line_that_is_overwritten_is_cut_between_two_states(api: Api, world: World) -> None:
    job_id = api.submit()
    states = [f"{n:099d}\r" for n in range(2 * log_files.MAX_LINE_BYTES // 100)]
    world.write(world.start(job_id), "".join(states))
    found = page(api, job_id)
    assert [line["message"] for line in found["lines"]] == [states[log_files.MAX_LINE_BYTES // 100 - 1].strip()]
    assert [line["message"] for line in found["open_lines"]] == [states[-1].strip()]


def test_follower_sees_the_newest_state_of_a_line_as_it_changes(
    api: Api, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmaster.server.http.followers.PASSING_EVERY_S", 0.3)
    job_id = api.submit()
    job = world.start(job_id)
    with api.stream(f"/v1/jobs/{job_id}/logs") as events:
        world.write(job, "\r  0%")
        first = next(events)
        assert (first.event, first.json()["message"], first.json()["open"]) == ("progress", "0%".rjust(4), True)
        began = time.monotonic()
        for n in range(1, 100):
            world.write(job, f"\r{n:3d}%")
            time.sleep(0.005)  # a bar that changes faster than anybody is told
        took_s = time.monotonic() - began
        states: list[str] = []
        while (event := next(events)).json()["message"] != " 99%":
            assert (event.event, event.id) == ("progress", first.id)
            states.append(event.json()["message"])
        assert states == sorted(states)
        assert len(states) <= took_s / 0.3 + 1
        world.write(job, "\r100%\n")
        last = next(events)
        assert (last.event, last.json()["message"]) == ("log", "100%")
        assert "open" not in last.json()
