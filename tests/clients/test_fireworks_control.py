"""The control plane with the real `fireworks-ai`: every field of a TrainerJobConfig, and the generated REST client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_model import FIREWORKS_NAME
from client_programs import Client, facts

from fireworks_page import described_fields
from patience import PATIENCE_S
from real_server import RealServer, running
from trainmaster.server.doors.fireworks.errors import COLLECTIONS


@pytest.fixture(scope="module")
def service_server(ground: Path) -> Iterator[RealServer]:
    """A server that nodes may be added to, so that trainers wait for a region in which there is none."""
    flags = ["--model-alias", f"{FIREWORKS_NAME}={ground / 'model'}"]
    with running(ground / "data", *flags, TRAINMASTER_AUTOSCALING="true") as started:
        yield started
        assert "Traceback" not in started.log_text(), started.log_text()[-4000:]


@pytest.fixture(scope="module")
def results(client: Callable[[str], Client]) -> dict[str, Any]:
    return client("fireworks").scenarios("fireworks_control.py", timeout_s=PATIENCE_S)


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


def test_refused_deployment_leaves_no_trainer_running(results: dict[str, Any]) -> None:
    found = facts(results, "managed")
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
