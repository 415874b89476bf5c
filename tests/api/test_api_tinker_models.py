"""The root Tinker door: models are made with trainers that the server starts for them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api_world import COMMAND, Served, wait_for
from tinker_world import ALIAS, CONTEXT_LENGTH, MODEL, OTHER, Client, StandIn, TinkerWorld

from model_config import model_config
from patience import PATIENCE_S
from trainmaster.server.coordinator.base_models import BaseModel
from trainmaster.server.core.job import Change
from trainmaster.server.core.states import JobStatus
from trainmaster.server.doors.tinker import model_creation, operations, records
from trainmaster.server.doors.tinker.trainer_jobs import TinkerTrainers, TrainerStatus
from trainmaster.server.store.scope import Scope


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls that tell at once what they wait for."""
    monkeypatch.setattr(operations, "HOLD_S", 0.3)


def test_models_that_wait_for_one_trainer_share_the_looks_at_it(
    client: Client, trainer: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    ensure = TinkerTrainers.ensure

    def counted(supply: TinkerTrainers, *args: Any, **options: Any) -> TrainerStatus:
        nonlocal looks
        looks += 1
        return ensure(supply, *args, **options)

    monkeypatch.setattr(TinkerTrainers, "ensure", counted)
    monkeypatch.setattr(model_creation, "LOOK_EVERY_S", 0.1)
    session_id = client.session()
    acks = [client.ask_for_model(session_id, number) for number in range(30)]
    job = client.trainer_job()

    def begun() -> bool:
        with client.world.database.read() as connection:
            runs = records.runs_of_session(connection, Scope(client.account_id), session_id)
        return [run.job_id for run in runs] == [job.job_id] * len(acks)

    wait_for(begun)
    before = looks
    time.sleep(0.6)
    assert looks - before < 30
    client.start_trainer(trainer, job.job_id)
    assert [client.result(ack)["model_id"] for ack in acks] == [ack["model_id"] for ack in acks]


def test_disk_of_a_model_that_does_not_answer_keeps_nobody_waiting(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, answers = threading.Event(), threading.Event()
    read = BaseModel.config

    def config(model: BaseModel) -> Mapping[str, Any]:
        reached.set()
        answers.wait(PATIENCE_S)
        return read(model)

    monkeypatch.setattr(BaseModel, "config", config)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.get, "get_server_capabilities")
        try:
            assert reached.wait(PATIENCE_S)
            assert client.http.get("healthz", timeout=PATIENCE_S).status_code == 200
        finally:
            answers.set()
        assert len(asked.result()["supported_models"]) == 3


@pytest.fixture
def other_says(client: Client) -> Iterator[Callable[..., None]]:
    """Changes what the files of one of the models say."""
    found = client.world.models.find(OTHER, client.account_id)
    assert found is not None
    file = found.path / "config.json"
    before = file.read_text()
    yield lambda **changes: file.write_text(json.dumps(model_config(**changes)))
    file.write_text(before)


def lengths(client: Client) -> dict[str, int]:
    models = client.get("get_server_capabilities")["supported_models"]
    assert all(model["trainable"] and model["sampleable"] for model in models)
    return {model["model_name"]: model["max_context_length"] for model in models}


def test_capabilities_list_every_name_with_the_context_length_of_its_model(client: Client) -> None:
    found = lengths(client)
    assert list(found) == sorted([MODEL, ALIAS, OTHER])
    assert set(found.values()) == {CONTEXT_LENGTH}


def test_context_length_is_at_most_what_the_trainer_has(client: Client, other_says: Callable[..., None]) -> None:
    other_says(max_position_embeddings=131_072)
    assert lengths(client)[OTHER] == 32_768  # of the built-in shapes
    client.ask_for_model(client.session(), base_model=OTHER)
    assert client.trainer_job().spec["workload"]["max_context_length"] == 32_768
    # One that was made stays as it is.
    other_says(max_position_embeddings=100)
    assert lengths(client)[OTHER] == 32_768


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"model_type": "mamba"}, "architecture 'mamba'"), ({"quantization_config": {"bits": 4}}, "quantized")],
)
def test_model_that_no_trainer_can_hold_is_not_offered_and_refused(
    client: Client, other_says: Callable[..., None], changes: dict[str, Any], why: str
) -> None:
    other_says(**changes)
    assert list(lengths(client)) == sorted([MODEL, ALIAS])
    answer = client.result(client.ask_for_model(client.session(), base_model=OTHER))
    assert answer["category"] == "user"
    assert why in answer["error"]
    assert OTHER in answer["error"]
    asked = {"session_id": client.session(), "sampling_session_seq_id": 0, "base_model": OTHER}
    assert why in json.dumps(client.post("create_sampling_session", asked, expect=400))
    assert client.jobs() == []


def test_first_model_starts_a_trainer_and_is_made_when_it_runs(client: Client, trainer: StandIn) -> None:
    session_id = client.session()
    ack = client.ask_for_model(session_id, user_metadata={"a": "b"})
    assert ack["model_id"] == f"{session_id}:train:0"
    job = client.trainer_job()
    assert (job.workload_kind, job.handle and job.handle.startswith("tinker-")) == ("trainer_service", True)
    assert job.spec["workload"]["base_model"] == MODEL
    # On a GPU where a node has one, which trainers of other tests may have brought.
    shape = job.spec["workload"]["training_shape"].partition("/trainingShapes/")[2]
    assert shape in ("cpu/versions/1", "one-gpu/versions/1")
    client.start_trainer(trainer)
    assert client.result(ack) == {"model_id": ack["model_id"], "type": "create_model"}
    (asked,) = trainer.of("create_model")
    assert asked.json()["lora_config"]["rank"] == 8
    assert asked.json()["user_metadata"] == {"a": "b"}
    assert asked.headers["x-trainmaster-door"] == "tinker"


def test_setting_has_trainers_give_tempered_logprobs(tinker_world: TinkerWorld) -> None:
    with (
        Served.serve(tinker_world.context(tinker_tempered_logprobs=True)) as served,
        Client.of(served, tinker_world) as client,
    ):
        client.ask_for_model(client.session())
        assert client.trainer_job().spec["workload"]["extra_args"] == ["--tempered-logprobs"]


@pytest.mark.usefixtures("impatient")
def test_model_that_waits_for_its_trainer_says_what_for(client: Client) -> None:
    ack = client.ask_for_model(client.session())
    job = client.trainer_job()
    body = {"request_id": ack["request_id"], "allow_metadata_only": True}
    answer = client.post("retrieve_future", body, expect=408)
    assert (answer["type"], answer["queue_state"]) == ("try_again", "paused_capacity")
    assert job.job_id in answer["queue_state_reason"]
    assert answer["request_id"] == ack["request_id"]


def test_request_for_a_model_that_comes_twice_is_one(client: Client, trainer: StandIn) -> None:
    session_id = client.session()
    assert client.ask_for_model(session_id) == client.ask_for_model(session_id)
    client.start_trainer(trainer)
    assert client.result(client.ask_for_model(session_id))["model_id"] == f"{session_id}:train:0"
    assert len(trainer.of("create_model")) == 1


def test_models_of_one_base_model_share_a_trainer_whatever_they_call_it(client: Client, trainer: StandIn) -> None:
    first = client.model(trainer)
    second = client.model(trainer, 1, base_model=ALIAS)
    assert len(client.jobs()) == 1
    assert first != second
    assert [asked.json()["base_model"] for asked in trainer.of("create_model")] == [MODEL, ALIAS]


def test_models_that_are_asked_for_at_once_share_one_trainer(client: Client, trainer: StandIn) -> None:
    session_id = client.session()
    with ThreadPoolExecutor(8) as pool:
        acks = list(pool.map(lambda number: client.ask_for_model(session_id, number), range(8)))
    client.start_trainer(trainer)
    assert {client.result(ack)["model_id"] for ack in acks} == {f"{session_id}:train:{number}" for number in range(8)}
    assert len(client.jobs()) == 1


def test_other_base_model_and_other_mode_have_trainers_of_their_own(client: Client) -> None:
    session_id = client.session()
    client.ask_for_model(session_id, 0)
    client.ask_for_model(session_id, 1, OTHER)
    client.ask_for_model(session_id, 2, lora_config=None)
    jobs = wait_for(lambda: len(found := client.jobs()) == 3 and found)
    assert len({job.handle for job in jobs}) == 3
    assert sorted(job.spec["workload"]["lora_rank"] > 0 for job in jobs) == [False, True, True]


def test_unknown_base_model_fails_through_the_future_and_names_the_known_ones(client: Client) -> None:
    answer = client.result(client.ask_for_model(client.session(), base_model="Qwen/Qwen3-80B"))
    assert answer["category"] == "user"
    for known in (MODEL, ALIAS, OTHER):
        assert known in answer["error"]
    assert client.jobs() == []


def test_failure_of_the_trainer_fails_the_model_that_waits_for_it(client: Client) -> None:
    ack = client.ask_for_model(client.session())
    job = client.trainer_job()
    client.world.start(job.job_id)
    client.world.end(job.job_id, "EXITED_NONZERO", "no such weights")
    answer = client.result(ack)
    assert answer["category"] == "server"
    assert "no such weights" in answer["error"]
    assert client.result(ack) == answer  # and it stays so


def test_trainer_that_ended_is_resumed_for_the_next_model(client: Client, trainer: StandIn) -> None:
    client.model(trainer)
    job = client.trainer_job()
    client.world.end(job.job_id, "KILLED_BY_SIGNAL")
    ack = client.ask_for_model(client.session())
    wait_for(lambda: client.world.job(job.job_id).status is JobStatus.QUEUED)
    client.start_trainer(trainer, job.job_id)
    assert "model_id" in client.result(ack)
    assert len(client.jobs()) == 1
    assert client.world.job(job.job_id).attempt_count == 2


def test_trainer_that_was_parked_for_want_of_use_is_resumed(client: Client, trainer: StandIn) -> None:
    client.model(trainer)
    job = client.trainer_job()
    client.world.end(job.job_id, "INACTIVE")
    assert client.world.job(job.job_id).status is JobStatus.PAUSED
    client.ask_for_model(client.session())
    wait_for(lambda: client.world.job(job.job_id).status is JobStatus.QUEUED)


def test_trainer_that_was_paused_by_hand_is_left_alone(client: Client, trainer: StandIn) -> None:
    client.model(trainer)
    job = client.trainer_job()
    client.world.end(job.job_id, "PAUSED")
    answer = client.result(client.ask_for_model(client.session()))
    assert "trainmaster resume" in answer["error"]
    assert client.world.job(job.job_id).status is JobStatus.PAUSED


def test_trainer_that_was_deleted_is_made_anew(client: Client, trainer: StandIn) -> None:
    client.model(trainer)
    job = client.trainer_job()
    client.world.end(job.job_id, "KILLED_BY_SIGNAL")
    client.world.commands.delete(Scope(client.account_id), job.job_id).result()
    client.ask_for_model(client.session())
    assert wait_for(lambda: [each for each in client.jobs() if each.job_id != job.job_id])


def test_model_waits_for_a_trainer_that_is_busy(client: Client, trainer: StandIn) -> None:
    trainer.busy = ["create_model", "retrieve_future"]
    assert client.model(trainer).endswith(":train:0")
    assert trainer.busy == []


def test_refusal_of_the_trainer_is_the_models(client: Client, trainer: StandIn) -> None:
    ack = client.ask_for_model(client.session())
    trainer.results[":0"] = {"error": "rank 8 is odd", "category": "user"}
    client.start_trainer(trainer)
    assert client.result(ack) == {"error": "rank 8 is odd", "category": "user"}


def test_model_is_made_by_another_server_after_a_restart(tinker_world: TinkerWorld, trainer: StandIn) -> None:
    with Served.serve(tinker_world.context()) as served, Client.of(served, tinker_world, "restarted") as client:
        ack = client.ask_for_model(client.session())
        client.trainer_job()
    with Served.serve(tinker_world.context()) as served, Client.of(served, tinker_world, "restarted") as client:
        client.start_trainer(trainer)
        assert client.result(ack)["model_id"] == ack["model_id"]


def test_model_is_made_though_the_server_died_while_its_trainer_made_it(
    tinker_world: TinkerWorld, trainer: StandIn
) -> None:
    trainer.gate.clear()
    with Served.serve(tinker_world.context()) as served, Client.of(served, tinker_world, "died") as client:
        ack = client.ask_for_model(client.session())
        client.start_trainer(trainer)
        wait_for(lambda: trainer.of("retrieve_future"))
    with Served.serve(tinker_world.context()) as served, Client.of(served, tinker_world, "died") as client:
        trainer.gate.set()
        assert client.result(ack)["model_id"] == ack["model_id"]


def test_handle_that_another_job_has_is_told(client: Client, stranger: Client, tinker_served: Served) -> None:
    client.ask_for_model(client.session())
    handle = client.trainer_job().handle
    document = {**COMMAND, "handle": handle}
    stranger.http.post(f"{tinker_served.url}/v1/jobs", json=document).raise_for_status()
    answer = stranger.result(stranger.ask_for_model(stranger.session()))
    assert str(handle) in answer["error"]


def test_info_of_a_model_has_what_its_client_called_it(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer, base_model=ALIAS)
    info = client.post("get_info", {"model_id": model_id, "type": "get_info"})
    assert info["model_id"] == model_id
    assert info["model_data"] == {"model_name": ALIAS, "tokenizer_id": ALIAS}
    assert (info["is_lora"], info["lora_rank"]) == (True, 8)


def test_model_needs_a_session_of_its_account_that_goes_on(client: Client, stranger: Client) -> None:
    session_id = stranger.session()
    document = {"session_id": session_id, "model_seq_id": 0, "base_model": MODEL}
    assert "there is no session" in client.post("create_model", document, expect=404)["error"]["message"]
    stranger.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    stranger.post("create_model", document, expect=410)


def test_trainer_is_asked_by_a_name_that_it_knows(client: Client, trainer: StandIn) -> None:
    """An operator may give a model another name while its trainer runs."""
    ack = client.ask_for_model(client.session())
    job = client.trainer_job()
    spec = {**job.spec, "workload": {**job.spec["workload"], "base_model": ALIAS, "aliases": []}}
    client.world.change(job.job_id, lambda job: Change(job=job.evolve(spec=spec, version=job.version + 1)))
    client.start_trainer(trainer)
    assert "model_id" in client.result(ack)
    assert trainer.of("create_model")[0].json()["base_model"] == ALIAS


def test_run_remembers_its_trainer(client: Client, trainer: StandIn) -> None:
    model_id = client.model(trainer)
    with client.world.database.read() as connection:
        run = records.get_run(connection, Scope(client.account_id), model_id)
    assert run.trainer == trainer.trainer
