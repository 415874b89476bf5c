"""The `fireworks-ai` package, latest version, against a real server: trainer jobs, training on them, and what goes
wrong between a client and its trainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lossy_proxy import LossyProxy
from programs.batches import sequence
from reordering_proxy import ReorderingProxy

from client_model import CONTEXT, FIREWORKS_NAME, make_model
from client_programs import Asked, Client, facts, kill_trainer
from patience import PATIENCE_S
from real_server import RealServer, running

JOB = "trained"
BROKEN = "accounts/fireworks/models/broken"


@pytest.fixture(scope="module")
def broken(ground: Path) -> Path:
    """A model that looks like one until its weights are read."""
    directory = make_model(ground / "broken")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return directory


@pytest.fixture(scope="module")
def service_server(ground: Path, broken: Path) -> Iterator[RealServer]:
    """A server with a good model and a broken one."""
    aliases = (f"{FIREWORKS_NAME}={ground / 'model'}", f"{BROKEN}={broken}")
    flags = [word for alias in aliases for word in ("--model-alias", alias)]
    with running(ground / "data", *flags) as started:
        yield started
        assert "Traceback" not in started.log_text(), started.log_text()[-4000:]


@pytest.fixture(scope="module")
def lossy(service_server: RealServer) -> Iterator[LossyProxy]:
    with LossyProxy(service_server.url).serving() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def reordering(service_server: RealServer) -> Iterator[ReorderingProxy]:
    proxy = ReorderingProxy(service_server.url, chunks=3)
    with proxy.serving():
        yield proxy


@pytest.fixture(scope="module")
def outlived() -> dict[str, Any]:
    """What was acknowledged before the server was killed, and what came of it afterwards."""
    return {}


@pytest.fixture(scope="module")
def results(
    client: Callable[[str], Client],
    service_server: RealServer,
    lossy: LossyProxy,
    reordering: ReorderingProxy,
    outlived: dict[str, Any],
) -> dict[str, Any]:
    """What every scenario has to say that is no other fixture's."""
    names = (
        "shapes",
        "lifecycle",
        "refused",
        "train",
        "lost_answers",
        "reordered_chunks",
        "mistakes",
        "taken_name",
        "names",
        "restarted",
        "killed",
        "promote",
        "managed",
    )
    asked: dict[str, Asked] = {
        "kill the trainer": killer(service_server),
        "the way that loses answers": lambda _: lossy.url,
        "the way that turns chunks round": lambda _: reordering.url,
        "restart the server": lambda _: outlived.update(restarted(service_server)),
    }
    return client("fireworks").scenarios("fireworks_client.py", *names, asked=asked, timeout_s=2 * PATIENCE_S)


@pytest.fixture(scope="module")
def failed_start(client: Callable[[str], Client], ground: Path, broken: Path) -> dict[str, Any]:
    """What becomes of a trainer whose model cannot be read until somebody mends it."""

    def mend(_: dict[str, Any]) -> None:
        shutil.copy(ground / "model" / "model.safetensors", broken)

    asked: dict[str, Asked] = {"mend the weights": mend}
    return facts(client("fireworks").scenarios("fireworks_client.py", "failed_start", asked=asked), "failed_start")


def killer(server: RealServer) -> Asked:
    return lambda said: kill_trainer(server, server.job(said["job"])["job_id"])


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
    found, deleted = facts(results, "lifecycle"), facts(results, "promote")
    account = found["account"]
    assert found["endpoint"] == f"{service_server.url}/training/v1/rlorTrainerJobs/{account}/{JOB}"
    assert found["job_name"] == f"accounts/{account}/rlorTrainerJobs/{JOB}"
    assert found["same"] is True
    assert (found["state"], found["display_name"]) == ("JOB_STATE_RUNNING", "a trainer")
    assert deleted["after"] in ("JOB_STATE_DELETED", "JOB_STATE_ARCHIVED")
    assert deleted["recreated"]["type"] == "RuntimeError"
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
    found = facts(results, "promote")
    assert [one["name"] for one in found["left"]] == [one["name"] for one in found["before"]]
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


def test_killed_trainers_are_resumed(results: dict[str, Any]) -> None:
    found = facts(results, "killed")
    assert found["error"]["category"].lower().endswith("server"), found["error"]
    assert "step-2" in found["error"]["message"], found["error"]
    assert found["state"] == "JOB_STATE_FAILED"
    assert found["resumed"] == found["went_on"]
    assert found["running"].endswith(f"/{JOB}")


@pytest.mark.long  # test_fireworks_control.py comes back to one that was paused
def test_killed_trainers_are_come_back_to_at_once(client: Callable[[str], Client], service_server: RealServer) -> None:
    asked = {"kill the trainer": killer(service_server)}
    found = facts(client("fireworks").scenarios("fireworks_client.py", "reconnected", asked=asked), "reconnected")
    assert found["error"]["category"].lower().endswith("server"), found["error"]
    assert "step-2" in found["error"]["message"], found["error"]
    assert found["reconnected"] == found["went_on"]


# -- what goes wrong --


def test_lost_answers_change_nothing(results: dict[str, Any], lossy: LossyProxy) -> None:
    """What was done and not acknowledged is asked for again, and done once: norms of gradients are the same, too."""
    found = facts(results, "lost_answers")
    assert {"forward_backward", "optim_step", "retrieve_future"} <= set(lossy.lost)
    assert found["bad"] == found["good"]
    assert [name.rpartition("-")[0] for name in found["saved"] if "sampler" in name] == ["good-sampler", "bad-sampler"]
    assert [name for name in found["saved"] if "state" in name] == ["good-state", "bad-state"]


def test_chunks_that_overtake_each_other_are_put_in_order(results: dict[str, Any], reordering: ReorderingProxy) -> None:
    found = facts(results, "reordered_chunks")
    assert reordering.order[:3] == [3, 2, 1]
    assert found["row_count"] == 2100
    assert found["same_rows"] is True
    assert found["bad"] == found["good"]
    for row, alone in zip(found["first_of_chunks"], found["first_of_chunks_alone"], strict=True):
        assert row == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("wrong_length", "target_tokens of datum 0"),
        ("token_outside", "100000"),
        ("target_outside", "target_tokens of datum 4"),
        ("too_long", str(CONTEXT)),
        ("unknown_loss", "no_such_loss"),
        ("missing_input", "importance_sampling"),
    ],
)
def test_mistakes_are_told_as_the_users_own(results: dict[str, Any], mistake: str, words: str) -> None:
    error = facts(results, "mistakes")["told"][mistake]
    assert (error["type"], error["category"]) == ("RequestFailedError", "user")
    assert words in error["message"]


def test_mistakes_leave_the_model_as_it_was(results: dict[str, Any]) -> None:
    found = facts(results, "mistakes")
    assert found["losses"] == found["without_mistakes"]
    assert found["in_haste"] == [loss for loss, _ in found["without_mistakes"]]


# tests/trainer_service/test_service_process.py has both, too, without a server.
@pytest.mark.long
def test_trainer_that_cannot_start_says_why(failed_start: dict[str, Any], service_server: RealServer) -> None:
    assert failed_start["job"]["state"] == "JOB_STATE_FAILED"
    assert failed_start["job"]["status"]["code"] == "FAILED_PRECONDITION"
    said = "model.safetensors cannot be read"
    assert said in failed_start["job"]["statusMessage"]
    assert failed_start["error"]["type"] == "RuntimeError"
    assert said in failed_start["error"]["message"]
    assert any(said in line for line in service_server.lines("broken", attempt=1))


@pytest.mark.long
def test_forward_only_jobs_do_not_train(failed_start: dict[str, Any], results: dict[str, Any]) -> None:
    for row, untrained in zip(failed_start["mended"], facts(results, "train")["untrained"], strict=True):
        assert row == pytest.approx(untrained, abs=1e-5)
    assert "forward" in failed_start["refused"]["message"]


def test_promotion_to_a_name_that_is_taken_is_refused_at_once(results: dict[str, Any]) -> None:
    found = facts(results, "taken_name")
    assert found["error"]["type"] == "RuntimeError"
    assert "HTTP 409" in found["error"]["message"]
    assert "model 'taken-name'" in found["error"]["message"]
    assert found["took_s"] < 5
    assert found["again"] == found["made"]


def test_states_are_saved_by_names_that_can_be_loaded(results: dict[str, Any]) -> None:
    found = facts(results, "names")
    assert (found["refused"]["type"], found["refused"]["category"]) == ("RequestFailedError", "user")
    assert "'Step_1' cannot be the name of a state" in found["refused"]["message"]
    assert "lower-case letters, digits and '-'" in found["refused"]["message"]
    assert found["saved"] == "step-1"
    assert found["rewound"] == found["across"] == found["went_on"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nobodys", "there is no training checkpoint 'nobodys' in this job"),
        (f"cross_job://{JOB}/nobodys", f"trainer {JOB} has no training checkpoint 'nobodys'"),
        ("cross_job://nobodys/step-1", "there is no job nobodys"),
        ("model", "there is no model nobodys"),
    ],
)
def test_what_is_missing_is_named(results: dict[str, Any], path: str, words: str) -> None:
    error = facts(results, "names")["missing"][path]
    assert (error["type"], error["category"]) == ("RequestFailedError", "user")
    assert words in error["message"]


def test_longer_context_than_the_models_is_refused_at_once(results: dict[str, Any]) -> None:
    error = facts(results, "names")["longer"]
    assert error["type"] == "TrainingAPIError"
    assert f"trainingConfig.maxContextLength: is 4096, and {FIREWORKS_NAME} was made for {CONTEXT}" in error["message"]


def test_calibration_is_left_with_the_weights(results: dict[str, Any], service_server: RealServer) -> None:
    name = facts(results, "names")["calibrated"]
    [file] = Path(service_server.directory).rglob(f"{name}/*/decision.json")
    assert json.loads(file.read_text())["temperature"] == {"choice": 1.5}


def test_results_outlive_the_server_that_acknowledged_them(results: dict[str, Any], outlived: dict[str, Any]) -> None:
    untroubled = [loss for loss, _ in facts(results, "lost_answers")["good"]]
    found = outlived["first"]
    assert [found[index]["metrics"]["loss:sum"] for index in (0, 2)] == untroubled[:2]
    assert outlived["again"] == found
    # Whoever did not get the acknowledgement sends the same again, and gets the same result.
    assert outlived["sent_again"] == found[2]


def restarted(service_server: RealServer) -> dict[str, Any]:
    """The results of what was acknowledged before; what is sent, and read, is what the client sends and reads."""
    trainer = f"/training/v1/rlorTrainerJobs/default/{JOB}/api/v1"

    def post(operation: str, **body: Any) -> Any:
        answer = service_server.ask("POST", f"{trainer}/{operation}", body, timeout=PATIENCE_S)
        assert answer.is_success, answer.text
        return answer.json()

    def result(acknowledged: dict[str, Any]) -> Any:
        return post("retrieve_future", request_id=acknowledged["request_id"], allow_metadata_only=True)

    def passed(seq_id: int) -> Any:
        given = {"data": [_datum(sequence(index)) for index in range(4)], "loss_fn": "cross_entropy"}
        return post("forward_backward", forward_backward_input=given, model_id=model_id, seq_id=seq_id)

    session_id = post("create_session", tags=[], user_metadata={}, sdk_version="0.23.0", type="create_session")
    lora = {"rank": 8, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True}
    made = post(
        "create_model",
        session_id=session_id["session_id"],
        model_seq_id=0,
        base_model=FIREWORKS_NAME,
        lora_config=lora,
        type="create_model",
    )
    model_id = result(made)["model_id"]

    first = passed(1)
    stepped = post("optim_step", adam_params={"learning_rate": 0.02}, model_id=model_id, seq_id=2, type="optim_step")
    second = passed(3)
    _restart(service_server)

    results = [[result(acknowledged) for acknowledged in (first, stepped, second)] for _ in range(2)]
    return {"first": results[0], "again": results[1], "sent_again": result(passed(3))}


def _restart(server: RealServer) -> None:
    port = server.url.rpartition(":")[2]
    server.kill()
    server.arguments = (*server.arguments, "--port", port)
    server.start()


def _datum(tokens: list[int]) -> dict[str, Any]:
    targets = len(tokens) - 1
    return {
        "model_input": {"chunks": [{"tokens": tokens[:-1], "type": "encoded_text"}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [targets]},
            "weights": {"data": [0.0] + [1.0] * (targets - 1), "dtype": "float32", "shape": [targets]},
        },
    }
