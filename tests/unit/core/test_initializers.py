"""The specs of initializers: what is accepted, what is sealed, and the steps that they become."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from trainmaster.backends.base import Capabilities, ImageFeature, PlacementBy
from trainmaster.protocol.documents import from_json
from trainmaster.protocol.launch import Launch, Lifetime
from trainmaster.server.coordinator.admission_checks import check_backend
from trainmaster.server.core.errors import RefusedError, SpecError
from trainmaster.server.core.spec.documents import (
    SPEC_VERSION,
    dump,
    load_stored,
    parse_submit,
    redacted,
    secret_values,
)
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.core.workloads.initializers import OTHER_WEIGHTS

S3 = {"type": "s3", "storage_uri": "s3://bucket/rows", "access_key_id": "key-id", "secret_access_key": "the-secret"}
HUB = {"type": "huggingface", "storage_uri": "hf://org/model@v1", "access_token": "the-token"}
CACHE = {"type": "cache", "storage_uri": "cache://a/b", "metadata_loc": "s3://b/m.metadata.json", "num_data_nodes": 2}
VALUES = ("key-id", "the-secret", "the-token")


def document(**initializers: Any) -> dict[str, Any]:
    workload = {"kind": "command", "argv": ["true"], "initializers": initializers, "environment": {"HF_ENDPOINT": "x"}}
    return {"name": "test", "workload": workload}


def test_secrets_are_in_no_document() -> None:
    request = parse_submit(document(dataset=S3, model=HUB))
    assert secret_values(request) == {
        "env.HF_ENDPOINT": "x",
        "dataset_initializer_access_key_id": "key-id",
        "dataset_initializer_secret_access_key": "the-secret",
        "model_initializer_access_token": "the-token",
    }
    stored, shown = dump(request), redacted(request)
    launch = compile_job(request).launch
    texts = [json.dumps(stored), json.dumps(shown), json.dumps(asdict(launch)), repr(request)]
    assert not [value for value in VALUES for text in texts if value in text]
    assert stored["workload"]["initializers"]["model"]["access_token"] == "secret:model_initializer_access_token"
    assert shown["workload"]["initializers"]["dataset"]["secret_access_key"] == "***"
    assert compile_job(load_stored(SPEC_VERSION, json.loads(json.dumps(stored)))).launch == launch


def test_each_is_a_step_with_secrets_of_its_own() -> None:
    launch = compile_job(parse_submit(document(dataset=S3, model=HUB))).launch
    assert [step.name for step in launch.steps] == ["dataset-initializer", "model-initializer", "main"]
    assert [sorted(step.secrets.values()) for step in launch.steps] == [
        ["secret:dataset_initializer_access_key_id", "secret:dataset_initializer_secret_access_key"],
        ["secret:model_initializer_access_token"],
        [],
    ]
    assert launch.prepared == {"DATASET_PATH": "dataset", "MODEL_PATH": "model"}
    told = json.loads(launch.inputs["initializers.json"])
    assert told["endpoints_of_the_job"] == ["HF_ENDPOINT"]
    assert told["model"]["ignore_patterns"] == list(OTHER_WEIGHTS)
    assert told["dataset"]["ignore_patterns"] is None
    assert from_json(Launch, json.loads(json.dumps(asdict(launch)))) == launch


def test_table_with_an_image_of_its_own_is_made_by_a_gang() -> None:
    sizes = {"num_data_nodes": 3, "head_cpu": "500m", "worker_cpu": "2", "worker_mem": "1.5Gi"}
    launch = compile_job(parse_submit(document(dataset={**CACHE, **sizes, "image": "org/cache:1"}))).launch
    gang = launch.steps[0].gang
    assert gang is not None
    assert gang.count == 3
    assert (gang.head.cpu_cores, gang.head.memory_bytes) == (0.5, None)
    assert (gang.size.cpu_cores, gang.size.memory_bytes) == (2.0, 3 << 29)
    assert from_json(Launch, json.loads(json.dumps(asdict(launch)))) == launch
    # Elsewhere the step makes its shards by itself.
    alone = compile_job(parse_submit(document(dataset={**CACHE, **sizes}))).launch
    assert alone.steps[0].gang is None


def test_image_of_its_own_is_told_what_to_fetch_as_kubeflow_tells_it() -> None:
    store = {**S3, "endpoint": "http://store:1", "region": "here", "role_arn": "role", "timeout_s": 5}
    launch = compile_job(parse_submit(document(dataset=store, model={**HUB, "image": "fetch:1"}))).launch
    # It runs before all that run where the job does.
    assert [(step.name, step.image, step.timeout_s) for step in launch.steps] == [
        ("model-initializer", "fetch:1", None),
        ("dataset-initializer", None, 5.0),
        ("main", None, None),
    ]
    model = launch.steps[0]
    assert (model.argv, model.python, model.outputs) == ((), False, {"/workspace/model": "model"})
    assert model.environment == {
        "STORAGE_URI": "hf://org/model@v1",
        "OUTPUT_PATH": "/workspace/model",
        "IGNORE_PATTERNS": ",".join(OTHER_WEIGHTS),
    }
    assert model.secrets == {"ACCESS_TOKEN": "secret:model_initializer_access_token"}
    launch = compile_job(parse_submit(document(dataset={**store, "image": "fetch:1"}))).launch
    assert launch.steps[0].environment == {
        "STORAGE_URI": "s3://bucket/rows",
        "OUTPUT_PATH": "/workspace/dataset",
        "ENDPOINT": "http://store:1",
        "REGION": "here",
        "ROLE_ARN": "role",
    }
    assert sorted(launch.steps[0].secrets) == ["ACCESS_KEY_ID", "SECRET_ACCESS_KEY"]
    assert from_json(Launch, json.loads(json.dumps(asdict(launch)))) == launch


def test_launch_of_an_older_server_has_steps_without_images() -> None:
    launch = compile_job(parse_submit(document(dataset=S3))).launch
    written = asdict(launch)
    known = ("name", "argv", "python", "from_inputs", "tokens", "secrets")
    written["steps"] = [{name: step[name] for name in known} for step in written["steps"]]
    assert from_json(Launch, json.loads(json.dumps(written))) == launch


@pytest.mark.parametrize(("field", "value"), [("timeout_s", 0), ("timeout_s", "5"), ("image", ""), ("image", "a b")])
def test_image_and_time_are_checked(field: str, value: object) -> None:
    with pytest.raises(SpecError) as caught:
        parse_submit(document(dataset={**S3, field: value}))
    assert [problem.field for problem in caught.value.problems] == [f"workload.initializers.dataset.{field}"]


def test_backend_without_images_runs_no_initializer_in_one() -> None:
    local = Capabilities(placement=PlacementBy.US, lifetimes=frozenset(Lifetime))
    runs_images = {"images": True, "own_image": "image", "image_features": frozenset(ImageFeature)}
    backends = {"local": local, "boxes": replace(local, **runs_images)}
    request = parse_submit(document(dataset={**S3, "timeout_s": 5}, model={**HUB, "image": "fetch:1"}))
    check_backend(compile_job(request), "boxes", backends)
    with pytest.raises(RefusedError) as caught:
        check_backend(compile_job(request), "local", backends)
    assert str(caught.value) == (
        "workload.initializers.model.image: the backend local runs no containers; use one of: boxes, or leave "
        "initializers.model.image out"
    )
    check_backend(compile_job(parse_submit(document(dataset={**S3, "timeout_s": 5}))), "local", backends)


def test_they_come_before_packages_are_installed() -> None:
    described = document(model=HUB)
    described["workload"]["packages"] = ["einops"]
    launch = compile_job(parse_submit(described)).launch
    assert [step.name for step in launch.steps] == ["model-initializer", "environment", "main"]


@pytest.mark.parametrize(
    "workload",
    [
        {"kind": "function", "name": "train", "source": "def train(): pass"},
        {"kind": "script", "path": "/srv/train.sh"},
        {"kind": "container", "image": "python:3.12"},
    ],
)
def test_every_kind_of_code_takes_them(workload: dict[str, Any]) -> None:
    request = parse_submit({"name": "test", "workload": {**workload, "initializers": {"dataset": CACHE}}})
    assert compile_job(request).launch.steps[0].name == "dataset-initializer"


def test_job_without_initializers_is_as_it_was() -> None:
    launch = compile_job(parse_submit({"name": "test", "workload": {"kind": "command", "argv": ["true"]}})).launch
    assert ([step.name for step in launch.steps], launch.prepared, dict(launch.inputs)) == (["main"], {}, {})


@pytest.mark.parametrize("part", [{"dataset": CACHE}, {"dataset": HUB}, {"model": S3}, {}])
def test_good_initializers_are_accepted(part: dict[str, Any]) -> None:
    parse_submit(document(**part))


@pytest.mark.parametrize(
    ("part", "field", "message"),
    [
        ({"dataset": {**S3, "storage_uri": "bucket/rows"}}, "dataset.storage_uri", "must be s3://bucket/prefix"),
        ({"dataset": {**S3, "secret_access_key": None}}, "dataset.secret_access_key", "a key has two halves"),
        ({"dataset": {**S3, "endpoint": "store:9000"}}, "dataset.endpoint", "must be an http or https URL"),
        ({"dataset": {**S3, "acces_key_id": "x"}}, "dataset.acces_key_id", "unknown field"),
        ({"model": {**HUB, "storage_uri": "hf:///model"}}, "model.storage_uri", "must be hf://owner/name"),
        ({"model": {**HUB, "storage_uri": "org/model"}}, "model.storage_uri", "must be hf://owner/name"),
        ({"model": {**HUB, "access_token": "two\nlines"}}, "model.access_token", "must be one line"),
        ({"model": CACHE}, "model.type", "unknown type 'cache'; choices: huggingface, s3"),
        ({"dataset": {"storage_uri": "hf://a/b"}}, "dataset.type", "required; choices: huggingface, s3, cache"),
        ({"dataset": "hf://a/b"}, "dataset", "must be an object, not text"),
        ({"dataset": {**CACHE, "num_data_nodes": 1}}, "dataset.num_data_nodes", "must be more than 1"),
        ({"dataset": {**CACHE, "storage_uri": "cache://a"}}, "dataset.storage_uri", "must be cache://schema/table"),
        ({"dataset": {**CACHE, "metadata_loc": "m.json"}}, "dataset.metadata_loc", "or an absolute path"),
        ({"dataset": {**CACHE, "worker_mem": "much"}}, "dataset.worker_mem", "such as 2, 500m or 4Gi"),
        ({"dataset": {**CACHE, "worker_mem": "512m"}}, "dataset.worker_mem", "for mebibytes write Mi"),
        ({"dataset": {**CACHE, "head_mem": "1"}}, "dataset.head_mem", "must be at least 16Mi"),
        ({"dataset": {**CACHE, "worker_cpu": "0m"}}, "dataset.worker_cpu", "must be more than 0"),
        ({"dataset": {**CACHE, "head_cpu": "0"}}, "dataset.head_cpu", "must be more than 0"),
    ],
)
def test_bad_initializers_are_refused_at_their_field(part: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_submit(document(**part))
    (problem,) = caught.value.problems
    assert problem.field == f"workload.initializers.{field}"
    assert message in problem.message
    assert not [value for value in VALUES if value in str(caught.value)]


def test_amounts_that_were_taken_before_are_still_read() -> None:
    stored = dump(parse_submit(document(dataset={**CACHE, "worker_mem": "16Mi"})))
    stored["workload"]["initializers"]["dataset"] |= {"worker_mem": "512m", "worker_cpu": "0"}
    read = load_stored(SPEC_VERSION, json.loads(json.dumps(stored)))
    assert dump(read) == stored


@pytest.mark.parametrize("kind", ["service", "job_class"])
def test_kinds_that_take_none_refuse_them(kind: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_submit({"name": "test", "workload": {"kind": kind, "initializers": {"model": HUB}}})
    assert "workload.initializers" in {problem.field for problem in caught.value.problems}
