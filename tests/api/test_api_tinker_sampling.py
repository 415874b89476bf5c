"""The root Tinker door: sampling sessions, and samples that reach their trainer without a look into the database."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
from api_world import wait_for
from tinker_world import ALIAS, MODEL, Client, StandIn

from patience import PATIENCE_S
from trainmaster.server.doors.tinker import sampling
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope


def wanted(session_id: str, **fields: Any) -> dict[str, Any]:
    return {"session_id": session_id, "sampling_session_seq_id": 0, "type": "create_sampling_session", **fields}


def sample(sampler_id: str, seq_id: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 5},
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        **fields,
    }


@pytest.fixture
def sampler_id(client: Client, trainer: StandIn) -> str:
    """A sampling session of a base model, whose trainer runs."""
    client.model(trainer)
    return str(
        client.post("create_sampling_session", wanted(client.session(), base_model=MODEL))["sampling_session_id"]
    )


def test_sampling_session_of_a_base_model_starts_its_trainer_and_waits_for_it(client: Client, trainer: StandIn) -> None:
    session_id = client.session()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "create_sampling_session", wanted(session_id, base_model=ALIAS))
        job = client.trainer_job()
        client.start_trainer(trainer)
        made = asked.result(PATIENCE_S)
    assert made["sampling_session_id"] == f"{session_id}:sample:0@{job.job_id}.1"
    assert trainer.of("create_sampling_session")[0].json()["base_model"] == ALIAS
    assert client.get(f"samplers/{made['sampling_session_id']}") == {
        "sampler_id": made["sampling_session_id"],
        "base_model": ALIAS,
        "model_path": None,
    }
    assert client.get(f"sessions/{session_id}")["sampler_ids"] == [made["sampling_session_id"]]


def test_client_is_told_to_come_back_when_the_trainer_takes_long(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "HOLD_S", 0.1)
    response = client.http.post("create_sampling_session", json=wanted(client.session(), base_model=MODEL))
    assert response.status_code == 503
    assert response.headers["Retry-After"]
    assert client.trainer_job().job_id in response.text


def test_sampling_session_of_weights_names_them_to_the_trainer(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    where = client.save(model_id, "s-1", "sampler")
    path = f"tinker://{model_id}/sampler_weights/s-1"
    made = client.post("create_sampling_session", wanted(client.session(), model_path=path))
    (sent,) = trainer.of("create_sampling_session")
    assert sent.headers["x-trainmaster-source"] == where
    assert sent.json()["model_path"] == path
    told = client.get(f"samplers/{made['sampling_session_id']}")
    assert (told["base_model"], told["model_path"]) == (MODEL, path)


def test_weights_of_others_are_sampled_from_when_they_are_public(
    client: Client, stranger: Client, trainer: StandIn
) -> None:
    theirs = stranger.model(trainer)
    where = stranger.save(theirs, "s-1", "sampler")
    path = f"tinker://{theirs}/sampler_weights/s-1"
    with StandIn().serving() as own:
        client.model(own)
        session_id = client.session()
        client.post("create_sampling_session", wanted(session_id, model_path=path), expect=404)
        stranger.post(f"training_runs/{theirs}/checkpoints/sampler_weights/s-1/publish")
        client.post("create_sampling_session", wanted(session_id, model_path=path))
        assert own.of("create_sampling_session")[-1].headers["x-trainmaster-source"] == where
        assert not trainer.of("create_sampling_session")


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"base_model": "unknown/model"}, 400), ({"model_path": "tinker://nobody/weights/x"}, 404), ({}, 422)],
)
def test_sampling_session_of_nothing_is_refused(client: Client, fields: dict[str, Any], status: int) -> None:
    assert client.post("create_sampling_session", wanted(client.session(), **fields), expect=status)["error"]["message"]
    assert client.jobs() == []


def test_sample_reaches_the_trainer_that_has_the_session(client: Client, trainer: StandIn, sampler_id: str) -> None:
    ack = client.post("asample", sample(sampler_id), X_Tinker_Sampling_Backpressure="1")
    assert len(ack["sample_sequence_ids"]) == 2
    (sent,) = trainer.of("asample")
    assert sent.json() == sample(sampler_id)
    assert sent.headers["x-tinker-sampling-backpressure"] == "1"
    trainer.results[":0"] = b"\x0a\x02\x08\x01"
    response = client.http.post("retrieve_future", json={"request_id": ack["request_id"]})
    assert response.content == b"\x0a\x02\x08\x01"


def test_large_prompt_finds_its_trainer(client: Client, trainer: StandIn, sampler_id: str) -> None:
    prompt = {"chunks": [{"tokens": [7] * 200_000, "type": "encoded_text"}]}
    client.post("asample", sample(sampler_id, 1, prompt=prompt))
    assert [sent.json()["seq_id"] for sent in trainer.of("asample")] == [1]


def test_sample_needs_no_database(
    client: Client, trainer: StandIn, sampler_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.post("asample", sample(sampler_id))
    reads: list[str] = []
    read = Database.read

    def counted(self: Database) -> Any:
        reads.append(threading.current_thread().name)
        return read(self)

    monkeypatch.setattr(Database, "read", counted)
    for seq_id in range(1, 51):
        ack = client.post("asample", sample(sampler_id, seq_id))
        client.post("retrieve_future", {"request_id": ack["request_id"]})
    assert len(reads) <= 2  # the key is looked up anew every few seconds


def test_samples_by_the_hundred_come_back_to_whom_they_belong(
    client: Client, trainer: StandIn, sampler_id: str
) -> None:
    for seq_id in range(200):
        trainer.results[f":{seq_id}"] = {"seq": seq_id}

    def one(own: Client, seq_id: int) -> int:
        ack = own.post("asample", sample(sampler_id, 1000 + seq_id))
        trainer.results[f":{1000 + seq_id}"] = {"seq": seq_id}
        return int(own.post("retrieve_future", {"request_id": ack["request_id"]})["seq"])

    def some(first: int) -> list[int]:
        # Connections of its own: a client that threads share closes them under one another.
        given = client.http
        with httpx.Client(base_url=given.base_url, headers=given.headers, timeout=given.timeout, verify=False) as http:
            return [one(replace(client, http=http), seq_id) for seq_id in range(first, 200, 32)]

    trainer.results.clear()
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(some, range(32))) == [list(range(first, 200, 32)) for first in range(32)]


def test_backpressure_of_the_trainer_reaches_the_client(client: Client, trainer: StandIn, sampler_id: str) -> None:
    trainer.refuse_samples = True
    response = client.http.post("asample", json=sample(sampler_id))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"


def test_sampling_session_of_another_account_is_not_there(
    client: Client, stranger: Client, trainer: StandIn, sampler_id: str
) -> None:
    count = len(trainer.sent)
    stranger.post("asample", sample(sampler_id), expect=404)
    stranger.get(f"samplers/{sampler_id}", expect=404)
    stranger.post("retrieve_futures", {"target": {"sampling_session_id": sampler_id}}, expect=404)
    assert len(trainer.sent) == count
    client.post("asample", sample("sess-x:sample:0"), expect=404)


def test_sample_of_a_session_that_is_lost_fails_through_its_future(
    client: Client, trainer: StandIn, sampler_id: str
) -> None:
    client.world.end(client.trainer_job().job_id, "KILLED_BY_SIGNAL", "killed by signal 9")
    trainer.stop()
    ack = client.post("asample", sample(sampler_id, num_samples=3))
    assert len(ack["sample_sequence_ids"]) == 3
    answer = client.result(ack)
    assert answer["category"] == "server"
    assert "killed by signal 9" in answer["error"]
    assert "sampling session" in answer["error"]


def test_sampler_that_was_saved_without_a_name_is_told_of_by_its_trainer(client: Client, trainer: StandIn) -> None:
    client.model(trainer)
    job = client.trainer_job()
    unnamed = f"sess-x:sample:7@{job.job_id}.1"
    assert client.get(f"samplers/{unnamed}") == {"sampler_id": unnamed, "base_model": MODEL}


def test_trainer_that_ended_is_resumed_for_a_sampling_session(client: Client, trainer: StandIn) -> None:
    client.model(trainer)
    job = client.trainer_job()
    client.world.end(job.job_id, "KILLED_BY_SIGNAL")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "create_sampling_session", wanted(client.session(), base_model=MODEL))
        wait_for(lambda: client.world.job(job.job_id).status == "QUEUED")
        client.start_trainer(trainer, job.job_id)
        assert asked.result(PATIENCE_S)["sampling_session_id"].endswith(f"@{job.job_id}.2")


def test_trainer_that_fails_is_not_started_again_and_again(client: Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            client.http.post, "create_sampling_session", json=wanted(client.session(), base_model=MODEL)
        )
        job = client.trainer_job()
        client.world.start(job.job_id)
        client.world.end(job.job_id, "EXITED_NONZERO", "no such weights")
        response = asked.result(PATIENCE_S)
    assert response.status_code == 400
    assert "no such weights" in response.text
    assert client.world.job(job.job_id).attempt_count == 1
    assert client.world.commands.resume(Scope(client.account_id), job.job_id).result().job.status == "QUEUED"
