"""A training whose base model is what another job left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training_jobs import EXAMPLES, document, finish, output, series, submit, weights_digest

from local_servers import LocalServer
from patience import PATIENCE_S

DATA = EXAMPLES / "data" / "questions.jsonl"


@pytest.fixture(scope="module")
def first(shared_server: LocalServer, tiny_model: Path) -> str:
    """A job that left a model."""
    job_id = submit(shared_server, document(tiny_model, DATA, "FULL_FINETUNE"))
    assert finish(shared_server, job_id)["output"]["model_uri"] == f"artifacts:{job_id}/output/model"
    return job_id


def trains_on(name: str, **changes: Any) -> dict[str, Any]:
    job = document(Path("unused"), DATA, **changes)
    job["training_config"]["base_model"] = {"model_id": name}
    return job


@pytest.fixture(scope="module")
def left(shared_server: LocalServer, first: str) -> tuple[Path, str]:
    """The model that the first job left, and its digest before anything else read it."""
    directory = output(shared_server, first) / "model"
    return directory, weights_digest(directory)


@pytest.fixture(scope="module")
def second(shared_server: LocalServer, first: str, left: tuple[Path, str]) -> str:
    """A job that trained an adapter on that model."""
    job_id = submit(shared_server, trains_on(shared_server.job(first)["output"]["model_uri"]))
    finish(shared_server, job_id)
    return job_id


def test_second_job_trains_what_the_first_one_left(
    server: LocalServer, first: str, left: tuple[Path, str], second: str
) -> None:
    directory, before = left
    prepared = server.directory / "runs" / second / "1" / "nodes" / "0" / "prepared" / "prepared.json"
    assert json.loads(prepared.read_text())["model_path"] == str(directory)
    assert weights_digest(directory) == before
    losses = [[value for _, value in series(server, job_id, "loss")] for job_id in (first, second)]
    assert losses[1][0] < sum(losses[0][:3]) / 3, "it does not begin where the first one ended"
    adapter = json.loads((output(server, second) / "model" / "adapter_config.json").read_text())
    assert adapter["peft_type"] == "LORA"
    shown = server.job(second)["training_config"]["base_model"]
    assert shown["model_id"] == f"artifacts:{first}/output/model"


def test_rows_are_checked_with_the_tokenizer_that_a_job_left(server: LocalServer, first: str) -> None:
    body = {
        "data_config": {"sources": [{"path": str(DATA)}], "max_seq_length": 64},
        "base_model": {"model_id": f"artifacts:{first}/output/model"},
    }
    found = server.data("POST", "/v1/data/validate", body)
    assert (found["ok"], found["sources"][0]["samples"][0]["length"] > 0) == (True, True)
    body["base_model"] = {"model_id": "artifacts:job-none/output/model"}
    answer = server.ask("POST", "/v1/data/validate", body)
    assert answer.status_code == 422
    assert answer.json()["error"]["details"][0]["field"] == "base_model.model_id"


def test_job_that_has_left_no_model_is_named_at_once(server: LocalServer) -> None:
    job_id = submit(server, {"name": "n", "workload": {"kind": "command", "argv": ["sleep", "600"]}})
    again = submit(server, trains_on(f"artifacts:{job_id}/output/model"))
    refused = server.until(again, "FAILED", timeout_s=PATIENCE_S)
    assert refused["error_type"] == "ADMISSION"
    assert f"job {job_id} has left no directory output/model" in refused["error_message"]


def test_adapter_that_a_job_left_is_refused_with_what_to_do(server: LocalServer, second: str) -> None:
    again = submit(server, trains_on(f"artifacts:{second}/output/model"))
    refused = server.until(again, "FAILED", "COMPLETED", timeout_s=PATIENCE_S)
    assert refused["error_type"] == "BAD_INPUT"
    assert "is an adapter" in refused["error_message"]
