"""The `fireworks-ai` package, latest version, against a real server: trainer jobs and training on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_programs import Client, facts, kill_trainer

from real_server import RealServer


@pytest.fixture(scope="module")
def results(client: Callable[[str], Client], service_server: RealServer) -> dict[str, Any]:
    """What every scenario has to say."""

    def kill(said: dict[str, Any]) -> None:
        kill_trainer(service_server, service_server.job(said["job"])["job_id"])

    return client("fireworks").scenarios("fireworks_client.py", asked={"kill the trainer": kill}, timeout_s=400)


def test_shapes_are_resolved_and_launched(results: dict[str, Any]) -> None:
    found = facts(results, "shapes")
    assert "/trainingShapes/cpu/versions/" in found["version"]
    assert found["again"] is True
    assert found["context"] >= found["endpoint_context"] > 0
    assert (found["nodes"], found["rows"]) == (1, 4)
    assert found["missing"]["type"] == "RuntimeError"
    assert "nobodys" in found["missing"]["message"]
    assert found["short"]["type"] == "ValueError"


def test_jobs_are_created_once_and_leave_a_tombstone(results: dict[str, Any], service_server: RealServer) -> None:
    found = facts(results, "lifecycle")
    account = found["account"]
    assert found["endpoint"] == f"{service_server.url}/training/v1/rlorTrainerJobs/{account}/lifecycle"
    assert found["job_name"] == f"accounts/{account}/rlorTrainerJobs/lifecycle"
    assert found["same"] is True
    assert (found["state"], found["display_name"]) == ("JOB_STATE_RUNNING", "a trainer")
    assert found["after"] in ("JOB_STATE_DELETED", "JOB_STATE_ARCHIVED")
    assert found["recreated"]["type"] == "RuntimeError"
    assert found["missing"]["type"] == "RuntimeError"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("unknown_model", "TrainingAPIError", "nobodys"),
        ("unknown_argument", "TrainingAPIError", "--no-such-argument"),
        ("unknown_shape", "TrainingAPIError", "nobodys"),
        ("stranger", "HTTPStatusError", "401"),
        ("resume_of_nothing", "HTTPStatusError", "404"),
    ],
)
def test_refusals_say_why(results: dict[str, Any], name: str, kind: str, words: str) -> None:
    error = facts(results, "refused")[name]
    assert error["type"] == kind
    assert words in error["message"]


def test_training_lowers_the_loss_waited_for_or_not(results: dict[str, Any]) -> None:
    found = facts(results, "train")
    assert found["waited"] == sorted(found["waited"], reverse=True)
    assert found["sent"] == found["waited"]
    assert found["custom"] == pytest.approx(found["waited"][:3], rel=1e-5)


def test_reference_models_stay_as_they_were(results: dict[str, Any]) -> None:
    found = facts(results, "train")
    assert found["frozen"] == found["untrained"]


def test_gradient_norms_are_reported(results: dict[str, Any]) -> None:
    metrics = facts(results, "train")["optim_metrics"]
    assert any("norm" in name for name in metrics), metrics


def test_every_loss_of_a_policy_is_announced_and_computed(results: dict[str, Any]) -> None:
    policies = facts(results, "train")["policies"]
    assert set(policies) == {"importance_sampling", "ppo", "cispo", "dro", "dapo", "gspo", "reinforce"}
    assert len({round(loss, 3) for loss in policies.values()}) > 3, policies


def test_states_are_loaded_with_their_optimizer(results: dict[str, Any]) -> None:
    found = facts(results, "train")
    assert found["rewound"] == found["went_on"]
    assert "step-6" in found["on_the_trainer"]
    assert found["job"] == "JOB_STATE_RUNNING"
    assert "no-such-state" in found["mistake"]["message"]


def test_checkpoints_of_a_deleted_job_are_promoted(results: dict[str, Any], service_server: RealServer) -> None:
    trained, found = facts(results, "train"), facts(results, "promote")
    assert [one["name"] for one in found["left"]] == [one["name"] for one in trained["checkpoints"]]
    assert found["model"]["name"].endswith("/models/my-model")
    assert found["again"]["type"] == "RuntimeError"
    [adapter] = Path(service_server.directory).rglob("models/*/my-model/adapter_config.json")
    assert json.loads(adapter.read_text())["r"] == 8


def test_service_clients_make_their_own_trainers(results: dict[str, Any]) -> None:
    found = facts(results, "managed")
    assert "/trainingShapes/" in found["shape"]
    assert found["resumed"] == found["went_on"]


def test_methods_that_recipes_seldom_call_work(results: dict[str, Any]) -> None:
    found = facts(results, "managed")["others"]
    assert "accounts/fireworks/models/qwen3-8b" in found["models"]
    assert found["base_model"] == "accounts/fireworks/models/qwen3-8b"
    assert found["resolved"].startswith("cross_job://")
    assert found["adapted"] == found["trained"]
    assert found["of_state"] == 4
    assert found["bases"][0] == found["bases"][1] != found["trained"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("forward_projection", "'output'"),
        ("forward_backward_contrastive", "'output'"),
        # These two are the client's own words: it knows of no deployment.
        ("weight_sync", "sampler state"),
        ("create_sampling_client", "sampler"),
    ],
)
def test_methods_that_are_not_here_say_so_at_once(results: dict[str, Any], method: str, words: str) -> None:
    error = facts(results, "managed")["others"]["refused"][method]
    assert words in error["message"]
    assert error["seconds"] < 5


def test_all_parameters_are_trained_and_saved_as_differences(results: dict[str, Any]) -> None:
    found = facts(results, "full_parameters")
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert len(set(found["paths"])) == 2
    assert len(found["types"]) == 2


def test_forward_only_jobs_do_not_train(results: dict[str, Any]) -> None:
    found = facts(results, "forward_only")
    assert found["rows"] == 4
    assert "forward" in found["refused"]["message"]


def test_killed_trainers_are_resumed(results: dict[str, Any]) -> None:
    found = facts(results, "killed")
    for when in ("of_a_dead_trainer", "of_a_stopped_trainer"):
        assert found[when]["category"].lower().endswith("server"), found[when]
        assert "step-2" in found[when]["message"], found[when]
    assert found["state"] == "JOB_STATE_FAILED"
    assert found["reconnected"] == found["went_on"]
    assert found["resumed"] == found["went_on"]
    assert found["running"].endswith("/killed")
