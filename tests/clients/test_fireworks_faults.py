"""The `fireworks-ai` package against a real server, where something goes wrong between a client and its trainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_model import CONTEXT, FIREWORKS_NAME, make_model
from client_programs import Asked, Client, facts
from lossy_proxy import LossyProxy
from programs.batches import sequence
from reordering_proxy import ReorderingProxy

from patience import PATIENCE_S
from real_server import RealServer, running

JOB = "faults"
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
def results(
    client: Callable[[str], Client], ground: Path, broken: Path, lossy: LossyProxy, reordering: ReorderingProxy
) -> dict[str, Any]:
    """What every scenario has to say."""

    def mend(_: dict[str, Any]) -> None:
        shutil.copy(ground / "model" / "model.safetensors", broken)

    asked: dict[str, Asked] = {
        "the way that loses answers": lambda _: lossy.url,
        "the way that turns chunks round": lambda _: reordering.url,
        "mend the weights": mend,
    }
    return client("fireworks").scenarios("fireworks_faults.py", asked=asked, timeout_s=PATIENCE_S)


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


def test_trainer_that_cannot_start_says_why(results: dict[str, Any], service_server: RealServer) -> None:
    found = facts(results, "failed_start")
    assert found["job"]["state"] == "JOB_STATE_FAILED"
    assert found["job"]["status"]["code"] == "FAILED_PRECONDITION"
    said = "model.safetensors cannot be read"
    assert said in found["job"]["statusMessage"]
    assert found["error"]["type"] == "RuntimeError"
    assert said in found["error"]["message"]
    assert any(said in line for line in service_server.lines("broken", attempt=1))
    assert found["mended"] == facts(results, "lost_answers")["good"][:1]


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


def test_results_outlive_the_server_that_acknowledged_them(results: dict[str, Any], service_server: RealServer) -> None:
    """What is sent here, and read, is what the client sends and reads."""
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

    untroubled = [loss for loss, _ in facts(results, "lost_answers")["good"]]
    found = [result(acknowledged) for acknowledged in (first, stepped, second)]
    assert [found[index]["metrics"]["loss:sum"] for index in (0, 2)] == untroubled[:2]
    assert [result(acknowledged) for acknowledged in (first, stepped, second)] == found
    # Whoever did not get the acknowledgement sends the same again, and gets the same result.
    assert result(passed(3)) == found[2]


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
