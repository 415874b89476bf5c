"""Metrics and events over HTTP, as pages and as streams."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from api_world import COMMAND, Api, World

from trainmaster.server.core.job import JobProgress


def metrics(api: Api, job_id: str, **query: Any) -> Any:
    return api.call("GET", f"/v1/jobs/{job_id}/metrics", params=query)


def points(answer: Any) -> dict[str, list[tuple[int | None, float | None]]]:
    return {series["name"]: [(step, value) for step, _, value in series["points"]] for series in answer["series"]}


def test_job_without_metrics_has_none(api: Api) -> None:
    job_id = api.submit()
    answer = metrics(api, job_id)
    assert (answer["job_id"], answer["status"], answer["step"], answer["series"]) == (job_id, "QUEUED", None, [])


def test_metrics_show_the_present_and_the_way_there(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    for step in range(3):
        world.measure(job, step=step, values={"loss": 3.0 - step, "lr": 0.1})
    world.measure(job, step=2, values={"eval_loss": 9})
    world.report(job_id, JobProgress(step=2, epoch=0.5, metrics={"loss": 1.0}))
    world.save(job_id, "m1", 2)
    answer = metrics(api, job_id)
    assert (answer["step"], answer["epoch"], answer["latest"]) == (2, 0.5, {"loss": 1.0})
    assert points(answer) == {
        "eval_loss": [(2, 9.0)],
        "loss": [(0, 3.0), (1, 2.0), (2, 1.0)],
        "lr": [(0, 0.1), (1, 0.1), (2, 0.1)],
    }
    assert answer["checkpoints"][0]["checkpoint_id"] == "m1"
    assert points(metrics(api, job_id, names="loss,lr", since_step=2)) == {"loss": [(2, 1.0)], "lr": [(2, 0.1)]}
    assert points(metrics(api, job_id, names=["lr"], limit=2)) == {"lr": [(1, 0.1), (2, 0.1)]}


def test_later_attempt_replaces_what_an_earlier_one_said_of_a_step(api: Api, world: World) -> None:
    job_id = api.submit(scheduling_config={"max_retries": 1})
    job = world.start(job_id)
    for step in range(4):
        world.measure(job, step=step, values={"loss": 1.0})
    world.end(job_id, "WORKER_LOST")
    job = world.start(job_id)
    for step in range(2, 4):
        world.measure(job, step=step, values={"loss": 2.0})
    assert points(metrics(api, job_id)) == {"loss": [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)]}


def test_nonsense_that_a_job_reports_does_no_harm(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    path = world.directory(job).path / "nodes/0/rank-0.metrics.jsonl"
    path.write_bytes(
        b'{"t": NaN, "step": 1e400, "values": {"a": NaN, "b": "x", "\\ud800": 1, "c": true}}\n'
        b"torn {\n[1]\n"
        b'{"t": 1e300, "step": "x", "values": [1]}\n'
        b'{"step": 2, "values": {"a": 1}}\n{"step": 3, "val'
    )
    assert points(metrics(api, job_id))["a"] == [(None, None), (2, 1.0)]
    world.end(job_id)
    with api.stream(f"/v1/jobs/{job_id}/metrics/stream") as events:
        first, second, third, end, done = events
    assert first.json()["values"]["?"] == 1.0
    assert (second.json()["step"], third.json()["step"]) == (None, 2)
    assert (end.event, done.data) == ("end", "[DONE]")


def test_long_history_is_read_from_its_end(api: Api, world: World) -> None:
    job_id = api.submit()
    job = world.start(job_id)
    path = world.directory(job).path / "nodes/0/rank-0.metrics.jsonl"
    path.write_text("".join(f'{{"t": 1, "step": {n}, "values": {{"loss": {n}}}}}\n' for n in range(20_000)))
    assert points(metrics(api, job_id, limit=2)) == {"loss": [(19_998, 19_998.0), (19_999, 19_999.0)]}
    assert len(points(metrics(api, job_id, limit=100_000))["loss"]) == 20_000


def test_metrics_can_be_followed_and_resumed(api: Api, world: World) -> None:
    job_id = api.submit(scheduling_config={"max_retries": 1})
    job = world.start(job_id)
    world.measure(job, step=1, total_steps=4, values={"loss": 2.0})
    with api.stream(f"/v1/jobs/{job_id}/metrics/stream") as events:
        first = next(events)
        assert first.event == "metrics"
        assert first.json() | {"ts": None} == {
            "ts": None,
            "attempt": 1,
            "step": 1,
            "total_steps": 4,
            "epoch": None,
            "percent": None,
            "eta_seconds": None,
            "values": {"loss": 2.0},
        }
        world.measure(job, step=2, values={"loss": 1.0})
        assert next(events).json()["step"] == 2
        world.end(job_id, "WORKER_LOST")
        job = world.start(job_id)
        world.measure(job, step=3, values={"loss": 0.5})
        assert next(events).json()["attempt"] == 2
        world.end(job_id)
        end, done = events
    assert (end.event, end.json(), done.data) == ("end", {"status": "COMPLETED"}, "[DONE]")
    with api.stream(f"/v1/jobs/{job_id}/metrics/stream", **{"Last-Event-ID": str(first.id)}) as events:
        assert [event.json()["step"] for event in islice(events, 2)] == [2, 3]
    with api.stream(f"/v1/jobs/{job_id}/metrics/stream?since_step=3&names=loss") as events:
        assert [event.json()["step"] for event in events if event.event == "metrics"] == [3]
    with api.stream(f"/v1/jobs/{job_id}/metrics/stream?names=nothing") as events:
        assert [event.event for event in events] == ["end", "message"]


def test_bad_metrics_cursor_is_refused(api: Api) -> None:
    assert api.call("GET", f"/v1/jobs/{api.submit()}/metrics/stream?cursor=x", 422)["details"][0]["field"] == "cursor"


def test_events_tell_a_jobs_story(api: Api, world: World) -> None:
    job_id = api.submit()
    world.start(job_id)
    world.end(job_id, "EXITED_NONZERO", "exit code 1")
    answer = api.call("GET", f"/v1/jobs/{job_id}/events")
    story = answer["events"]
    assert [event["seq"] for event in story] == list(range(1, len(story) + 1))
    assert [event["to"] for event in story if event["type"] == "status"] == [
        "PENDING",
        "QUEUED",
        "SCHEDULING",
        "PREPARING",
        "TRAINING",
        "FAILED",
    ]
    last = story[-1]
    assert set(last) == {
        *("job_id", "seq", "ts", "type", "from", "to", "actor", "reason", "attempt", "message", "data"),
    }
    assert (last["from"], last["reason"], last["attempt"], last["message"]) == (
        "TRAINING",
        "EXITED_NONZERO",
        1,
        "exit code 1",
    )
    assert answer["next_cursor"] == last["seq"]
    page = api.call("GET", f"/v1/jobs/{job_id}/events?after=2&limit=2")
    assert [event["seq"] for event in page["events"]] == [3, 4]
    assert page["next_cursor"] == 4
    assert api.call("GET", f"/v1/jobs/{job_id}/events?after=100") == {"events": [], "next_cursor": 100}


def test_events_can_be_followed_to_the_end(api: Api, world: World) -> None:
    job_id = api.submit()
    with api.stream(f"/v1/jobs/{job_id}/events") as events:
        assert next(events).json()["to"] == "PENDING"
        second = next(events)
        assert (second.id, second.json()["to"]) == ("2", "QUEUED")
        world.start(job_id)
        world.end(job_id)
        rest = [event for event in events if event.event == "event"]
        assert rest[-1].json()["to"] == "COMPLETED"
    with api.stream(f"/v1/jobs/{job_id}/events", **{"Last-Event-ID": "2"}) as events:
        assert [event.json() for event in events if event.event == "event"] == [event.json() for event in rest]


def test_feed_shows_the_accounts_events_in_order(api: Api, world: World) -> None:
    a = api.submit()
    other = {"Authorization": f"Bearer {world.key('feed-other')}"}
    api.call("POST", "/v1/jobs", 201, json=COMMAND, headers=other)
    b = api.submit()
    world.place(a)
    whole = api.call("GET", "/v1/events")["events"]
    assert {(event["job_id"], event["to"]) for event in whole} == {
        *((a, "PENDING"), (a, "QUEUED"), (a, "SCHEDULING"), (b, "PENDING"), (b, "QUEUED")),
    }
    assert [event["id"] for event in whole] == sorted(event["id"] for event in whole)
    page = api.call("GET", "/v1/events?limit=2")
    assert page["events"] == whole[:2]
    assert api.call("GET", f"/v1/events?after={page['next_cursor']}")["events"] == whole[2:]


def test_feed_can_be_followed_from_now_and_from_a_cursor(api: Api, world: World) -> None:
    first = api.submit()
    with api.stream("/v1/events") as events:
        second = api.submit()
        world.place(second)
        seen = list(islice(events, 3))
        assert [event.json()["job_id"] for event in seen] == [second] * 3
    with api.stream("/v1/events?after=0") as events:
        assert next(events).json()["job_id"] == first
    with api.stream("/v1/events", **{"Last-Event-ID": str(seen[1].id)}) as events:
        assert next(events).json()["to"] == "SCHEDULING"


@pytest.mark.parametrize("cursor", ["x", "-1", "9" * 40])
def test_bad_event_cursor_is_refused(api: Api, cursor: str) -> None:
    headers = {"Last-Event-ID": cursor, "Accept": "text/event-stream"}
    assert api.call("GET", "/v1/events", 422, headers=headers)["details"][0]["field"] == "Last-Event-ID"
