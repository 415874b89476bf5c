"""The root Tinker door: sessions, which need no trainer, and what clients ask before anything else."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from api_world import Served, wait_for
from tinker_world import MODEL, Client, StandIn, TinkerWorld

from patience import PATIENCE_S
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import StoreUnavailableError
from trainmaster.server.core.states import JobStatus
from trainmaster.server.doors import bodies
from trainmaster.server.doors.tinker import door, records, sessions
from trainmaster.server.doors.tinker.records import RunState, TinkerRun
from trainmaster.server.doors.tinker.sessions import Sessions
from trainmaster.server.doors.tinker.trainer_jobs import UNWANTED
from trainmaster.server.doors.trainers import Trainers
from trainmaster.server.http.proxy import BrokenOffError
from trainmaster.server.store.scope import Scope


def stored(client: Client, session_id: str) -> Any:
    with client.world.database.read() as connection:
        return records.get_session(connection, Scope(client.account_id), session_id)


def run_of(client: Client, ack: Any) -> TinkerRun:
    with client.world.database.read() as connection:
        return records.get_run(connection, Scope(client.account_id), ack["model_id"])


def test_request_for_a_session_that_comes_twice_makes_one(client: Client, stranger: Client) -> None:
    first = client.post("create_session", {"sdk_version": "1"}, X_Idempotency_Key="k")
    assert client.post("create_session", {"sdk_version": "1"}, X_Idempotency_Key="k") == first
    assert client.post("create_session", {"sdk_version": "1"}, X_Idempotency_Key="other") != first
    assert client.post("create_session", {"sdk_version": "1"}) != client.post("create_session", {"sdk_version": "1"})
    assert stranger.post("create_session", {"sdk_version": "1"}, X_Idempotency_Key="k") != first


def test_session_is_shown_with_what_is_in_it(client: Client, trainer: StandIn) -> None:
    about = {"tags": ["x", "y"], "sdk_version": "0.36.0"}
    session_id = client.session(user_metadata={"a": 1}, display_name="mine", project_id="p", **about)
    assert client.get(f"sessions/{session_id}") == {
        "training_run_ids": [],
        "sampler_ids": [],
        "user_metadata": {"a": "1"},
        "display_name": "mine",
        **about,
    }
    client.ask_for_model(session_id, 0)
    assert client.get(f"sessions/{session_id}")["training_run_ids"] == [f"{session_id}:train:0"]


def test_sessions_are_listed_newest_first_and_in_pages(client: Client, stranger: Client) -> None:
    stranger.session()
    made = [client.session() for _ in range(5)]
    assert client.get("sessions")["sessions"] == made[::-1]
    assert client.get("sessions", limit=2, offset=1)["sessions"] == made[::-1][1:3]
    client.get("sessions", limit=0, expect=422)
    client.get("sessions", offset="x", expect=422)
    client.get("sessions", limit="000000000001999999", expect=422)


def test_sessions_of_another_account_are_not_there(client: Client, stranger: Client) -> None:
    session_id = client.session()
    stranger.get(f"sessions/{session_id}", expect=404)
    stranger.post("session_heartbeat", {"session_id": session_id}, expect=404)
    stranger.post(f"sessions/{session_id}/finish", expect=404)
    stranger.call("PUT", f"sessions/{session_id}/project", {"project_id": "p"}, expect=404)
    assert stranger.post("sessions/search", {"session_id": session_id})["sessions"] == []
    client.post("session_heartbeat", {"session_id": session_id})


def test_finished_session_tells_its_client_to_stop(client: Client) -> None:
    session_id = client.session()
    assert client.post("session_heartbeat", {"session_id": session_id}) == {"type": "session_heartbeat"}
    client.post(f"sessions/{session_id}/finish", {"reason": {"type": "errored"}, "detail": "oh"})
    client.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": "done"})
    client.post("session_heartbeat", {"session_id": session_id}, expect=410)
    client.post("session_heartbeat", {"session_id": "sess-none"}, expect=404)
    assert stored(client, session_id).finish == {"reason": {"type": "errored"}, "detail": "oh"}


def test_trainers_let_go_of_a_session_that_is_finished(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    session_id = model_id.partition(":")[0]
    client.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    (sent,) = wait_for(lambda: trainer.of(f"sessions/{session_id}/finish"))
    assert sent.headers["x-trainmaster-door"] == "tinker"


def test_model_that_is_made_after_its_session_was_finished_is_let_go(client: Client, trainer: StandIn) -> None:
    session_id = client.session()
    trainer.gate.clear()
    client.ask_for_model(session_id)
    client.start_trainer(trainer)
    wait_for(lambda: trainer.of("create_model"))
    client.post(f"sessions/{session_id}/finish", {"reason": {"type": "interrupted"}})
    assert not trainer.of(f"sessions/{session_id}/finish")
    trainer.gate.set()
    wait_for(lambda: trainer.of(f"sessions/{session_id}/finish"))


def finish_elsewhere(client: Client, session_id: str) -> None:
    """As another server does that dies before it says so to anybody."""
    everything, finish = Scope.everything(), {"reason": {"type": "interrupted"}}
    client.world.database.write_now(
        lambda connection: records.finish_session(connection, everything, session_id, at=1.0, finish=finish)
    )


def test_model_whose_session_another_server_ended_fails_though_its_trainer_does_not_answer(
    tinker_world: TinkerWorld, trainer: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "REMEMBER_S", 0.1)
    with Served.serve(tinker_world.context()) as served, Client.of(served, tinker_world) as client:
        session_id = client.session()
        trainer.gate.clear()
        ack = client.ask_for_model(session_id)
        client.start_trainer(trainer)
        wait_for(lambda: trainer.of("retrieve_future"))
        finish_elsewhere(client, session_id)
        assert "its session ended before the model was made" in client.result(ack)["error"]
        trainer.gate.set()
        wait_for(lambda: trainer.of(f"sessions/{session_id}/finish"))


def test_model_that_was_given_up_does_not_become_pending_again(client: Client) -> None:
    """Whoever follows it notes its trainer at the same moment."""
    session_id = client.session()
    ack = client.ask_for_model(session_id)
    pending = wait_for(lambda: run if (run := run_of(client, ack)).job_id else None)
    client.post(f"sessions/{session_id}/finish", {"reason": {"type": "interrupted"}})
    scope = Scope(client.account_id)
    client.world.database.write_now(lambda connection: records.settle_run(connection, scope, pending))
    assert run_of(client, ack).state is RunState.FAILED


def test_model_of_a_session_that_a_server_finished_with_its_last_breath_is_given_up(tinker_world: TinkerWorld) -> None:
    with Served.serve(tinker_world.context()) as first, Client.of(first, tinker_world) as client:
        session_id = client.session()
        ack = client.ask_for_model(session_id)
        wait_for(lambda: run_of(client, ack).job_id)
    finish_elsewhere(client, session_id)
    with Served.serve(tinker_world.context()) as second:
        second.loop.call_soon_threadsafe(second.front.open)
        wait_for(lambda: run_of(client, ack).state is RunState.FAILED)
        wait_for(lambda: client.jobs()[0].status is JobStatus.CANCELLED)


def test_trainer_that_only_a_finished_session_waits_for_is_not_started(client: Client, trainer: StandIn) -> None:
    session_id = client.session()
    ack = client.ask_for_model(session_id)
    job = client.trainer_job()
    wait_for(lambda: run_of(client, ack).job_id)
    client.post(f"sessions/{session_id}/finish", {"reason": {"type": "interrupted"}})
    (job,) = client.jobs()
    assert (job.status, job.message) == (JobStatus.CANCELLED, UNWANTED)
    answer = client.result(ack)
    assert "its session ended" in answer["error"]
    assert answer["category"] == "user"
    # The next session has it started, as any trainer that has ended.
    again = client.ask_for_model(client.session())
    wait_for(lambda: client.jobs()[0].status is JobStatus.QUEUED)
    client.start_trainer(trainer, job.job_id)
    assert client.result(again)["model_id"] == again["model_id"]
    assert not any(sent.json()["session_id"] == session_id for sent in trainer.of("create_model"))


def test_trainer_that_another_session_waits_for_stays_in_the_queue(client: Client, trainer: StandIn) -> None:
    leaving, staying = client.session(), client.session()
    client.ask_for_model(leaving)
    ack = client.ask_for_model(staying)
    wait_for(lambda: run_of(client, ack).job_id)
    client.post(f"sessions/{leaving}/finish", {"reason": {"type": "success"}})
    (job,) = client.jobs()
    assert job.status is JobStatus.QUEUED
    client.start_trainer(trainer, job.job_id)
    assert client.result(ack)["model_id"] == ack["model_id"]
    assert [sent.json()["session_id"] for sent in trainer.of("create_model")] == [staying]


def test_trainer_that_a_sampler_waits_for_is_queued_again(client: Client, trainer: StandIn) -> None:
    """Who waits for a sampler is not on record; it asks anew."""
    leaving, staying = client.session(), client.session()
    ack = client.ask_for_model(leaving)
    wait_for(lambda: run_of(client, ack).job_id)
    document = {"session_id": staying, "sampling_session_seq_id": 0, "base_model": MODEL}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "create_sampling_session", document)
        time.sleep(0.5)  # it has seen the trainer in the queue
        client.post(f"sessions/{leaving}/finish", {"reason": {"type": "success"}})
        wait_for(lambda: client.jobs()[0].status is JobStatus.QUEUED)
        client.start_trainer(trainer, client.jobs()[0].job_id)
        assert asked.result(PATIENCE_S)["sampling_session_id"].startswith(staying)


def test_model_that_waits_is_given_up_with_its_client_whichever_server_it_asked(
    tinker_world: TinkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that it asked is gone; another one finds its session silent without being asked anything."""
    monkeypatch.setattr(sessions, "WRITE_EVERY_S", 0.05)
    with Served.serve(tinker_world.context()) as first, Client.of(first, tinker_world) as client:
        ack = client.ask_for_model(client.session())
        wait_for(lambda: run_of(client, ack).job_id)
    with Served.serve(tinker_world.context(tinker_silent_s=0.5)) as second:
        second.loop.call_soon_threadsafe(second.front.open)
        wait_for(lambda: run_of(client, ack).state is RunState.FAILED)
        wait_for(lambda: client.jobs()[0].status is JobStatus.CANCELLED)


def test_session_whose_client_is_gone_is_finished_for_it(
    tinker_world: TinkerWorld, trainer: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "WRITE_EVERY_S", 0.05)
    monkeypatch.setattr(sessions, "LOOK_EVERY_S", 0.2)
    with Served.serve(tinker_world.context()) as served, Client.of(served, tinker_world) as client:
        model_id = client.model(trainer)
        silent = model_id.partition(":")[0]
        lively = client.session()

        def age(connection: Any) -> None:
            ages = {silent: 0.0, lively: 0.0}
            records.note_use(connection, Scope.everything(), sessions_heard=ages, runs_used={})

        tinker_world.database.write_now(age)
        client.post("session_heartbeat", {"session_id": lively})
        (told,) = wait_for(lambda: trainer.of(f"sessions/{silent}/finish"))
        assert told.json()["reason"] == {"type": "interrupted"}  # upon which a trainer saves first
        assert stored(client, silent).finish["reason"] == {"type": "interrupted"}
        client.post("session_heartbeat", {"session_id": lively})
        assert stored(client, lively).finished_at is None


def test_trainers_hear_of_a_session_that_a_server_finished_with_its_last_breath(
    tinker_world: TinkerWorld, trainer: StandIn
) -> None:
    """It was on record, and the trainer was not told; the next server tells it."""
    with Served.serve(tinker_world.context()) as first, Client.of(first, tinker_world) as client:
        session_id = client.model(trainer).partition(":")[0]
        everything, finish = Scope.everything(), {"reason": {"type": "success"}}
        tinker_world.database.write_now(
            lambda connection: records.finish_session(connection, everything, session_id, at=1.0, finish=finish)
        )
    assert not trainer.of(f"sessions/{session_id}/finish")
    with Served.serve(tinker_world.context()) as second:
        second.loop.call_soon_threadsafe(second.front.open)
        (told,) = wait_for(lambda: trainer.of(f"sessions/{session_id}/finish"))
    assert told.json() == {"reason": {"type": "success"}}


@pytest.mark.parametrize("trouble", [StoreUnavailableError("away"), BrokenOffError("no answer")])
def test_trainers_are_told_of_a_finished_session_until_they_have_heard(
    client: Client, trainer: StandIn, tinker_served: Served, monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    """The database, or the trainer, is away for a moment."""
    monkeypatch.setattr(door, "NOTIFY_AGAIN_S", 0.05)
    model_id = client.model(trainer)
    session_id = model_id.partition(":")[0]
    troubles = [trouble, trouble]
    ask = Trainers.ask

    async def asks(self: Trainers, *arguments: Any, **options: Any) -> Any:
        if troubles:
            raise troubles.pop()
        return await ask(self, *arguments, **options)

    with monkeypatch.context() as change:
        change.setattr(Trainers, "ask", asks)
        client.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
        wait_for(lambda: trainer.of(f"sessions/{session_id}/finish"))
    assert len(trainer.of(f"sessions/{session_id}/finish")) == 1


def test_trainer_that_is_too_busy_for_a_farewell_hears_it_later(
    client: Client, trainer: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "NOTIFY_AGAIN_S", 0.05)
    session_id = client.model(trainer).partition(":")[0]
    trainer.busy = [f"sessions/{session_id}/finish"]
    client.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    wait_for(lambda: len(trainer.of(f"sessions/{session_id}/finish")) == 2)


def test_silent_sessions_are_ended_though_the_database_is_away_in_between(
    tinker_world: TinkerWorld, trainer: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are finished in one transaction, and looked up in others; a mistake in one of these is no end of it."""
    monkeypatch.setattr(sessions, "WRITE_EVERY_S", 0.05)
    read = Sessions.end
    troubles: list[Exception] = [
        StoreUnavailableError("away"),
        StoreUnavailableError("away"),
        RuntimeError("a mistake"),
    ]

    async def end(self: Sessions, session_id: str) -> Any:
        if troubles:
            raise troubles.pop()
        return await read(self, session_id)

    monkeypatch.setattr(Sessions, "end", end)
    with Served.serve(tinker_world.context(tinker_silent_s=3.0)) as served, Client.of(served, tinker_world) as client:
        model_id = client.model(trainer)
        # A mistake ends the first that it meets for good; there are two more.
        silent = [model_id.partition(":")[0]]
        for number in (1, 2):
            ack = client.ask_for_model(client.session(), number)
            silent.append(str(client.result(ack)["model_id"]).partition(":")[0])
        served.loop.call_soon_threadsafe(served.front.open)
        wait_for(lambda: sum(bool(trainer.of(f"sessions/{each}/finish")) for each in silent) >= 2)
    assert troubles == []


def test_client_that_was_heard_of_while_the_database_was_away_is_not_silent(
    tinker_world: TinkerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "WRITE_EVERY_S", 0.05)
    note = records.note_use
    troubles = [StoreUnavailableError("away")] * 3

    def note_use(*arguments: Any, **options: Any) -> None:
        if troubles:
            raise troubles.pop()
        note(*arguments, **options)

    monkeypatch.setattr(records, "note_use", note_use)
    with Served.serve(tinker_world.context()) as served, Client.of(served, tinker_world) as client:
        session_id = client.session()
        before = stored(client, session_id).heartbeat_at
        client.post("session_heartbeat", {"session_id": session_id})
        wait_for(lambda: stored(client, session_id).heartbeat_at > before)


def test_heartbeats_are_kept(tinker_world: TinkerWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "WRITE_EVERY_S", 0.05)
    with Served.serve(tinker_world.context()) as served, Client.of(served, tinker_world) as client:
        session_id = client.session()
        before = stored(client, session_id).heartbeat_at
        client.post("session_heartbeat", {"session_id": session_id})
        wait_for(lambda: stored(client, session_id).heartbeat_at > before)


def test_search_finds_by_name_metadata_project_and_status(client: Client) -> None:
    plain = client.session()
    named = client.session(display_name="Nightly run of the new model", user_metadata={"team": "a", "seed": 1})
    moved = client.session(user_metadata={"team": "a", "seed": 2})
    client.call("PUT", f"sessions/{moved}/project", {"project_id": "archive"})
    client.post(f"sessions/{moved}/finish", {"reason": {"type": "success"}, "detail": "done"})

    def search(**query: Any) -> list[str]:
        return [each["session_id"] for each in client.post("sessions/search", query)["sessions"]]

    assert search() == [moved, named, plain]
    assert search(display_name="model NIGHTLY") == [named]
    assert search(display_name="nightly", session_id=plain) == [named, plain]
    assert search(session_id=plain) == [plain]
    assert search(user_metadata={"team": "a"}) == [moved, named]
    assert search(user_metadata={"team": "a", "seed": "1"}) == [named]
    assert search(project_ids=["archive"]) == [moved]
    assert search(statuses=[{"type": "active"}]) == [named, plain]
    assert search(statuses=[{"type": "client_finished"}]) == [moved]
    assert search(statuses=[{"type": "client_finished", "reasons": ["errored"]}]) == []
    assert search(statuses=[{"type": "failed"}]) == []
    assert search(owner={"type": "user", "owner_urns": ["nobody"]}) == []
    assert search(owner={"type": "accessible"}) == [moved, named, plain]
    client.post("sessions/search", {"limit": 1000}, expect=422)


def test_search_goes_on_where_a_page_ended(client: Client) -> None:
    made = [client.session() for _ in range(5)]
    found: list[str] = []
    cursor = None
    while True:
        page = client.post("sessions/search", {"limit": 2, **({"cursor": cursor} if cursor else {})})
        found += [each["session_id"] for each in page["sessions"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == made[::-1]


def test_search_counts_what_a_session_saved(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    client.save(model_id, "a")
    client.save(model_id, "a", "sampler")
    (found,) = client.post("sessions/search", {})["sessions"]
    assert (found["checkpoints_count"], found["checkpoint_storage_bytes"]) == (2, 20)
    assert found["status"] == {"type": "active"}
    assert found["owner"] == client.account_id
    assert found["project_id"]


def test_clients_are_left_at_their_defaults(client: Client) -> None:
    assert client.post("client/config", {"sdk_version": "0.36.0"}) == {}
    assert client.post("client/dynamic_config", {"sdk_version": "0.36.0"}) == {"sample_cancel_enabled": True}
    assert client.post("telemetry", {"events": [{"a": 1}] * 100}) == {"status": "accepted"}
    assert client.get("healthz") == {"status": "ok"}


def test_key_says_whose_it_is(client: Client) -> None:
    told = client.get("auth/apikey/me")
    assert isinstance(told["key_id"], int)
    assert told["details"]["org_details"]["name"] == client.account_id


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "audit"),
        ("GET", "billing/usage/events"),
        ("POST", "auth/token"),
        ("DELETE", "auth/apikey/me"),
        ("POST", "copy_weights"),
        ("POST", "join_sampling_session"),
    ],
)
def test_what_is_not_done_here_says_why(client: Client, method: str, path: str) -> None:
    """With a status that clients do not take for a fault of the moment."""
    assert len(client.call(method, path, expect=400)["error"]["message"]) > 20


def test_trace_export_and_custom_losses_are_refused_where_clients_look(client: Client) -> None:
    assert client.get(f"sessions/{client.session()}/trace_export")["status"] == "failed"
    answer = client.result(client.post("create_custom_loss", {"session_id": "s", "name": "n"}))
    assert answer["category"] == "user"


def test_custom_loss_without_end_is_cut_off(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 1 << 20)
    assert client.http.post("create_custom_loss", content=bytes(3 << 20)).status_code == 413


def test_door_needs_a_key_and_its_scope(tinker_served: Served, tinker_world: TinkerWorld) -> None:
    with httpx.Client(base_url=f"{tinker_served.url}/api/v1/", verify=False) as http:
        assert http.post("create_session", json={}).status_code == 401
        assert http.post("create_session", json={}, headers={"X-API-Key": "tml-wrong"}).status_code == 401
        only_reads = {"X-API-Key": tinker_world.key("viewer", KeyScope.VIEW)}
        assert http.post("create_session", json={}, headers=only_reads).status_code == 403
        assert http.get("training_runs", headers=only_reads).status_code == 200
        document = {"session_id": "s", "model_seq_id": 0, "base_model": MODEL}
        assert http.post("create_model", json=document, headers=only_reads).status_code == 403
