"""What a training says of a base model that another job left; test_training_examples trains such a one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_tokenizer import make_tokenizer
from local_servers import LocalServer
from patience import PATIENCE_S
from tiny_trainings import EXAMPLES, document, finish, submit

DATA = EXAMPLES / "data" / "questions.jsonl"
LEAVES = """
cd "$TRAINMASTER_OUTPUT_DIR"
cp -r "$0" model
cp -r "$0" adapter
mv adapter/config.json adapter/adapter_config.json
"""


@pytest.fixture(scope="module")
def first(shared_server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job that left what is looked at of a model, and what looks like an adapter."""
    model = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    job_id = shared_server.submit("sh", "-ec", LEAVES, str(model))
    finish(shared_server, job_id)
    return job_id


def trains_on(name: str, **changes: Any) -> dict[str, Any]:
    job = document(Path("unused"), DATA, **changes)
    job["training_config"]["base_model"] = {"model_id": name}
    return job


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


def test_adapter_that_a_job_left_is_refused_with_what_to_do(server: LocalServer, first: str) -> None:
    again = submit(server, trains_on(f"artifacts:{first}/output/adapter"))
    refused = server.until(again, "FAILED", "COMPLETED", timeout_s=PATIENCE_S)
    assert refused["error_type"] == "BAD_INPUT"
    assert "is an adapter" in refused["error_message"]
