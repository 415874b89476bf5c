"""The control plane with the real `fireworks-ai`: every field of a TrainerJobConfig, and the generated REST client.

And our own `TrainerJobManager`, with the public client that trains on what it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from client_model import FIREWORKS_NAME
from client_programs import Client, facts, kill_trainer
from fireworks_page import described_fields
from patience import PATIENCE_S
from real_server import RealServer, running, wait_for
from trainmaster import FireworksClient, TrainerJobConfig, TrainerJobManager
from trainmaster.client.fireworks import ResumeRefusedError, TrainerStoppedError, TrainingAPIError
from trainmaster.server.doors.fireworks.errors import COLLECTIONS

POLL_S = 0.2


@pytest.fixture(scope="module")
def service_server(ground: Path) -> Iterator[RealServer]:
    """A server that nodes may be added to, so that trainers wait for a region in which there is none."""
    flags = ["--model-alias", f"{FIREWORKS_NAME}={ground / 'model'}"]
    with running(ground / "data", *flags, TRAINMASTER_AUTOSCALING="true") as started:
        yield started
        assert "Traceback" not in started.log_text(), started.log_text()[-4000:]


@pytest.fixture(scope="module")
def manager(service_server: RealServer) -> Iterator[TrainerJobManager]:
    with TrainerJobManager(api_key=service_server.key, base_url=service_server.url) as opened:
        yield opened


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
    """What a program of the public client has to say; our own manager starts and stops the trainers that it uses."""

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
    names = ("fields", "waiting", "lists", "models", "absent", "whole_weights", "adapter")
    return client("fireworks").scenarios("fireworks_control.py", *names, asked=asked, timeout_s=2 * PATIENCE_S)


@pytest.fixture(scope="module")
def shown(results: dict[str, Any]) -> dict[str, Any]:
    return dict(facts(results, "fields")["shown"])


def test_every_field_of_the_public_client_is_tried_and_described(results: dict[str, Any]) -> None:
    found = facts(results, "fields")
    assert found["tried"] == found["known"]
    assert sorted(described_fields()) == found["known"]


@pytest.mark.parametrize(
    ("field", "member", "value"),
    [
        ("lora_rank", "trainingConfig.loraRank", 16),
        ("max_context_length", "trainingConfig.maxContextLength", 128),
        ("learning_rate", "trainingConfig.learningRate", 0.5),
        ("gradient_accumulation_steps", "trainingConfig.gradientAccumulationSteps", 1),
        ("node_count", "nodeCount", 2),
        ("trainer_replica_count", "nodeCount", 3),
        ("display_name", "displayName", "mine"),
        ("extra_args", "trainingConfig.extraArgs", ["--max-adapters", "3", "--precision=float32"]),
        ("extra_values", "trainingConfig.extraArgs", ["--keep-results-s=60"]),
        ("accelerator_type", "trainingConfig.acceleratorType", "NVIDIA_H100_80GB"),
        ("accelerator_count", "trainingConfig.acceleratorCount", 2),
        ("forward_only", "forwardOnly", True),
        ("inactivity_timeout", "inactivityTimeout", "1800s"),
        ("skip_validations", "trainingConfig.region", "US_NOWHERE_1"),
        ("purpose", "purpose", "a test"),
        ("preemptible", "preemptible", True),
        ("managed_by", "managedBy", "a test"),
        ("reservation_target", "state", "JOB_STATE_PENDING"),
    ],
)
def test_field_is_shown_as_it_was_sent(shown: dict[str, Any], field: str, member: str, value: Any) -> None:
    found: Any = shown[field]
    for part in member.split("."):
        found = found[part]
    assert found == value


def test_fields_that_name_a_place_are_honoured(shown: dict[str, Any]) -> None:
    assert shown["training_shape_ref"]["trainingShape"].endswith("/trainingShapes/cpu/versions/1")
    assert "/trainingShapes/" in shown["auto_select_training_shape"]["trainingShape"]
    assert shown["requested_job_id"]["name"].endswith("/rlorTrainerJobs/field-requested")


def test_fields_without_an_effect_say_why(results: dict[str, Any]) -> None:
    refused = facts(results, "fields")["refused"]
    assert "no projection head" in refused["projection_head_dim"]["message"]
    assert "no deployments" in refused["hot_load_deployment_id"]["message"]
    assert "useReservation" in refused["use_reservation"]["message"]
    assert "customImageTag" in refused["custom_image_tag"]["message"]
    # That is the client's own word: it lets no account do so but one.
    assert refused["disable_inactivity_cleanup"]["type"] == "ValueError"


def test_trainer_that_waits_says_for_what(results: dict[str, Any]) -> None:
    found = facts(results, "waiting")
    assert found["late"]["type"] == "TimeoutError"
    assert "region=US_NOWHERE_1" in found["before"]["statusMessage"]
    assert found["states"] == ["JOB_STATE_CANCELLED", "JOB_STATE_PENDING", "JOB_STATE_PENDING", "JOB_STATE_DELETED"]
    assert found["ended"]["type"] == "RuntimeError"


def test_generated_client_lists_trainers(results: dict[str, Any]) -> None:
    found = facts(results, "lists")
    assert found["by_name"] == ["list-a", "list-b", "list-c"]
    assert found["by_age"] == ["list-b", "list-a", "list-c"]
    assert found["filtered"] == ["list-b"]
    assert found["wrong"]["type"] == "BadRequestError"
    assert found["typed"] == "accounts/fireworks/models/qwen3-8b"


def test_base_models_are_described(results: dict[str, Any]) -> None:
    found = facts(results, "models")
    assert found["moe"] is False
    assert (found["missing"]["type"], found["missing"]["status"]) == ("ModelDetailsUnavailableError", 404)
    assert found["listed"] == ["accounts/fireworks/models/qwen3-8b"]


def test_what_is_not_here_is_told_at_once(results: dict[str, Any]) -> None:
    found = facts(results, "absent")
    for name, error in found["errors"].items():
        # Of an answer about deployments this client shows the status alone.
        told = "400 Bad Request" if name.startswith("deployments") else COLLECTIONS[name.partition(":")[0]]
        assert told in error["message"], error
        assert error["seconds"] < 5, error
    assert found["deployment"] is None
    assert found["synced"]["done"] is False
    assert found["synced"]["seconds"] < 5
    assert COLLECTIONS["deployments"] in found["synced"]["warnings"]


@pytest.mark.long  # all others ask for nothing that runs
def test_refused_deployment_leaves_no_trainer_running(client: Callable[[str], Client]) -> None:
    found = facts(client("fireworks").scenarios("fireworks_control.py", "managed", timeout_s=PATIENCE_S), "managed")
    assert "400 Bad Request" in found["error"]["message"]
    assert COLLECTIONS["deployments"] in found["warnings"]
    assert found["state"] == "JOB_STATE_CANCELLED"


@pytest.mark.parametrize("prefix", ["fw_", "tml-"])
def test_keys_of_either_shape_are_made_and_taken(service_server: RealServer, prefix: str) -> None:
    body = {"name": "other", "scopes": ["view", "manage"], "prefix": prefix}
    key = service_server.data("POST", "/v1/keys", body)["key"]
    assert key.startswith(prefix)
    for headers in ({"X-Api-Key": key}, {"Authorization": f"Bearer {key}"}):
        found = httpx.get(f"{service_server.url}/v1/accounts", headers=headers).json()
        assert [account["name"] for account in found["accounts"]] == ["accounts/default"]


# -- our own manager: training on what it starts, and promoting what that saves --


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
