"""Our own `TrainerJobManager` against a real server, with the public client that trains on what it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from client_model import FIREWORKS_NAME
from client_programs import Client, facts, kill_trainer

from patience import PATIENCE_S
from real_server import RealServer, wait_for
from trainmaster import FireworksClient, TrainerJobConfig, TrainerJobManager
from trainmaster.client.fireworks import ResumeRefusedError, TrainerStoppedError, TrainingAPIError

POLL_S = 0.2


@pytest.fixture(scope="module")
def manager(service_server: RealServer) -> Iterator[TrainerJobManager]:
    with TrainerJobManager(api_key=service_server.key, base_url=service_server.url) as opened:
        yield opened


@pytest.mark.long
def test_killed_trainers_are_come_back_to(manager: TrainerJobManager, service_server: RealServer) -> None:
    config = TrainerJobConfig(base_model=FIREWORKS_NAME, lora_rank=4, requested_job_id="own")
    endpoint = manager.create_and_wait(config, POLL_S)
    kill_trainer(service_server, service_server.job("own")["job_id"])
    assert manager.reconnect_and_wait("own", POLL_S) == endpoint
    assert manager.list_checkpoints("own") == []
    manager.delete("own")


def test_refusals_say_why(manager: TrainerJobManager) -> None:
    with pytest.raises(TrainingAPIError, match="nobodys"):
        manager.create(TrainerJobConfig(base_model="accounts/fireworks/models/nobodys"))
    with pytest.raises(ResumeRefusedError, match="nobodys"):
        manager.resume_and_wait("nobodys")
    with pytest.raises(TrainingAPIError, match="nobodys"):
        manager.get("nobodys")
    with pytest.raises(TrainingAPIError, match="nobodys"):
        manager.resolve_training_profile("nobodys")


# -- training on what it starts, and promoting what that saves --


def config_of(said: dict[str, Any], shape: str) -> TrainerJobConfig:
    return TrainerJobConfig(
        base_model=said["base_model"],
        lora_rank=said["lora_rank"],
        training_shape_ref=shape,
        display_name="mine",
        requested_job_id=said["job"],
    )


@pytest.fixture(scope="module")
def shape(manager: TrainerJobManager) -> str:
    return manager.resolve_training_profile("cpu").training_shape_version


@pytest.fixture(scope="module")
def lives() -> dict[str, Any]:
    """What our manager saw of the jobs that it started: where they were, and what they are while they run."""
    return {}


@pytest.fixture(scope="module")
def results(
    manager: TrainerJobManager,
    service_server: RealServer,
    client: Callable[[str], Client],
    shape: str,
    lives: dict[str, Any],
) -> dict[str, Any]:
    """What a program of the public client has to say, whose trainers our manager starts and stops."""

    def start(said: dict[str, Any]) -> str:
        config = config_of(said, shape)
        endpoint = manager.create_and_wait(config, POLL_S)
        lives[said["job"]] = {
            "endpoints": [endpoint, manager.wait_for_existing(said["job"], POLL_S)],
            "ids": [endpoint.job_id, manager.create(config).job_id],
            "checkpoints": manager.list_checkpoints(said["job"]),
            "seen": manager.get(said["job"]),
            "config": config,
        }
        return endpoint.base_url

    def resume(said: dict[str, Any]) -> str:
        endpoint = manager.reconnect_and_wait(said["job"], POLL_S)
        lives[said["job"]]["endpoints"].append(endpoint)
        return endpoint.base_url

    def stopper(command: str, state: str) -> Callable[[dict[str, Any]], str]:
        def stop(said: dict[str, Any]) -> str:
            service_server.data("POST", f"/v1/jobs/{said['job']}/{command}", {})
            wait_for(lambda: manager.get(said["job"])["state"] == state, f"{said['job']} to be {state}")
            return state

        return stop

    def delete(said: dict[str, Any]) -> str:
        manager.delete(said["job"])
        return str(manager.get(said["job"])["state"])

    def promote(said: dict[str, Any]) -> dict[str, Any]:
        [saved] = [one for one in manager.list_checkpoints(said["job"]) if one["promotable"]]
        return manager.promote_checkpoint(
            name=saved["name"], output_model_id=said["model"], base_model=said["base_model"]
        )

    asked = {
        "start": start,
        "resume": resume,
        "pause": stopper("pause", "JOB_STATE_PAUSED"),
        "cancel": stopper("cancel", "JOB_STATE_CANCELLED"),
        "delete": delete,
        "promote": promote,
    }
    return client("fireworks").scenarios("own_trainer_jobs.py", asked=asked, timeout_s=PATIENCE_S)


def test_jobs_live_from_creation_to_deletion(
    results: dict[str, Any], lives: dict[str, Any], manager: TrainerJobManager
) -> None:
    assert facts(results, "adapter")["deleted"] == "JOB_STATE_DELETED"
    life = lives["adapter"]
    created, existing, reconnected = life["endpoints"]
    assert created == existing == reconnected
    assert life["ids"] == [created.job_id] * 2
    assert (life["seen"]["state"], life["seen"]["displayName"]) == ("JOB_STATE_RUNNING", "mine")
    assert life["checkpoints"] == []
    with pytest.raises(TrainerStoppedError):
        manager.wait_for_existing("adapter", POLL_S)
    with pytest.raises(TrainerStoppedError, match="was deleted"):
        manager.create(life["config"])


@pytest.mark.parametrize(
    ("name", "stopped", "kind"),
    [
        ("adapter", ("paused", "JOB_STATE_PAUSED"), "HF_PEFT_ADDON"),
        ("whole_weights", ("cancelled", "JOB_STATE_CANCELLED"), "HF_BASE_MODEL"),
    ],
)
def test_checkpoints_of_stopped_and_of_deleted_jobs_are_promoted(
    results: dict[str, Any], service_server: RealServer, name: str, stopped: tuple[str, str], kind: str
) -> None:
    found = facts(results, name)
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found[stopped[0]] == stopped[1]
    assert found["deleted"] == "JOB_STATE_DELETED"
    made = (found["promoted"], found["promoted_again"])
    assert [model["kind"] for model in made] == [kind, kind]
    with FireworksClient(api_key=service_server.key, base_url=service_server.url) as platform:
        listed = {model["name"]: model for model in platform.list_models()}
    assert [listed[model["name"]] for model in made] == list(made)


def test_promoted_adapter_is_loaded_into_a_new_model(results: dict[str, Any]) -> None:
    found = facts(results, "adapter")
    assert found["loaded"] != found["untrained"]
    for row, trained in zip(found["loaded"], found["trained"], strict=True):
        assert row == pytest.approx(trained, abs=1e-5)


def test_promoted_weights_are_a_base_model(results: dict[str, Any]) -> None:
    whole, adapter = facts(results, "whole_weights"), facts(results, "adapter")
    for row, trained in zip(adapter["base"], whole["trained"], strict=True):
        assert row == pytest.approx(trained, abs=1e-5)
    assert whole["losses"][-1] > adapter["losses"][0] > adapter["losses"][1]


def test_all_parameters_are_trained_and_saved_as_differences(results: dict[str, Any]) -> None:
    found = facts(results, "whole_weights")
    assert len(set(found["paths"])) == 2
    assert len(found["types"]) == 2


def test_promoted_adapter_is_no_base_model(results: dict[str, Any], manager: TrainerJobManager) -> None:
    name = facts(results, "adapter")["promoted"]["name"]
    with pytest.raises(TrainingAPIError, match="load_adapter"):
        manager.create(TrainerJobConfig(base_model=name))


def test_promotion_to_a_name_that_is_taken_is_refused_by_its_name(
    results: dict[str, Any], lives: dict[str, Any], manager: TrainerJobManager
) -> None:
    [adapter] = [one for one in manager.list_checkpoints("adapter") if one["promotable"]]
    base = lives["adapter"]["config"].base_model
    with pytest.raises(TrainingAPIError, match="'while-cancelled'") as refused:
        manager.promote_checkpoint(name=adapter["name"], output_model_id="while-cancelled", base_model=base)
    assert refused.value.status_code == 409
