"""Requests as documents: stored, shown, read again, over versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from spec_documents import COMMAND, CUSTOM, LORA, changed
from trainmaster.server.core.errors import NewerSpecError, SpecError
from trainmaster.server.core.spec import documents
from trainmaster.server.core.spec.documents import (
    SPEC_VERSION,
    dump,
    load_stored,
    parse_submit,
    redacted,
    secret_values,
    unsealed_values,
    with_secrets_of,
)
from trainmaster.server.core.spec.submit import SubmitJobRequest, compile_job

SECRET = "hunter2"


def with_secrets() -> SubmitJobRequest:
    document = changed(CUSTOM, "training_config.environment", {"A": SECRET, "B": SECRET})
    document = changed(document, "output_config.hub_token", SECRET)
    return parse_submit({**document, "workload": {"kind": "trainer", "environment": {"C": SECRET}}})


def test_redacted_hides_every_secret_and_shows_its_name() -> None:
    shown = redacted(with_secrets())
    assert SECRET not in str(shown)
    assert shown["training_config"]["environment"] == {"A": "***", "B": "***"}
    assert shown["workload"]["environment"] == {"C": "***"}
    assert shown["output_config"]["hub_token"] == "***"


def test_redacted_without_hub_token_shows_none() -> None:
    assert redacted(parse_submit(COMMAND))["output_config"]["hub_token"] is None


def test_dump_holds_references_where_secrets_were() -> None:
    stored = dump(with_secrets())
    assert SECRET not in str(stored)
    assert stored["training_config"]["environment"] == {"A": "secret:env.A", "B": "secret:env.B"}
    assert stored["workload"]["environment"] == {"C": "secret:env.C"}
    assert stored["output_config"]["hub_token"] == "secret:hub_token"
    assert dump(load_stored(SPEC_VERSION, stored)) == stored
    assert redacted(load_stored(SPEC_VERSION, stored)) == redacted(with_secrets())


def test_secret_values_are_what_dump_leaves_out() -> None:
    assert secret_values(parse_submit(COMMAND)) == {}
    assert secret_values(with_secrets()) == dict.fromkeys(("env.A", "env.B", "env.C", "hub_token"), SECRET)


def test_stored_spec_of_version_1_has_its_values_in_the_clear() -> None:
    document = changed(COMMAND, "workload.environment", {"A": "secret:env.A"})
    assert unsealed_values(1, document) == {"env.A": "secret:env.A"}
    assert unsealed_values(SPEC_VERSION, document) == {}
    assert "A" in compile_job(load_stored(1, document)).launch.secrets


def stored_in_version_2(**source: Any) -> dict[str, Any]:
    """What version 0.2.0 stored of a source of data."""
    document = changed(dump(parse_submit(CUSTOM)), "data_config.sources", [{"path": "hf://a", **source}])
    del document["data_config"]["preprocess"]["packing"]
    return document


def test_stored_spec_of_version_2_has_its_sampling_under_another_name() -> None:
    stored = stored_in_version_2(sampling={"weight": 2.0, "ratio": None, "max": 5})
    [source] = dump(load_stored(2, stored))["data_config"]["sources"]
    assert source["sampling"] == {"weight": 2.0, "ratio": None, "max_samples": 5}
    assert dump(load_stored(2, stored))["data_config"]["preprocess"]["packing"] is None


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        (None, None),
        ([{"column": "a", "op": ">", "value": 1}], [{"column": "a", "op": "gt", "value": 1}]),
        ({"column": "a", "op": "eq", "value": 1}, [{"column": "a", "op": "eq", "value": 1}]),
        ({"anything": [1, None]}, None),
        (["a > 1"], None),
    ],
)
def test_stored_spec_of_version_2_keeps_filters_that_can_be_read(filters: Any, kept: Any) -> None:
    [source] = dump(load_stored(2, stored_in_version_2(filters=filters)))["data_config"]["sources"]
    assert source["filters"] == kept


@pytest.mark.parametrize(("resources", "ranks"), [({}, 1), ({"gpu_count": 4, "node_count": 2}, 2)])
def test_stored_script_of_version_2_runs_alone_as_it_did(resources: dict[str, int], ranks: int) -> None:
    stored = changed(
        stored_in_version_2(), "resource_config", resources | {"node_count": resources.get("node_count", 1)}
    )
    stored["resource_config"].setdefault("gpu_count", None)
    launch = compile_job(load_stored(2, stored)).launch
    assert [step.name for step in launch.steps] == ["main"]
    assert (launch.ranks_per_node, launch.inputs) == (ranks, {})
    assert [step.name for step in compile_job(parse_submit(CUSTOM)).launch.steps] == ["prepare", "main"]


def test_stored_spec_of_version_2_without_data_is_read() -> None:
    assert load_stored(2, dump(parse_submit(COMMAND))) == parse_submit(COMMAND)


def test_repr_of_a_request_holds_no_secret() -> None:
    assert SECRET not in repr(with_secrets())


@pytest.mark.parametrize("document", [COMMAND, CUSTOM])
def test_dump_read_again_is_the_same_request(document: dict[str, Any]) -> None:
    request = parse_submit(document)
    assert dump(load_stored(SPEC_VERSION, dump(request))) == dump(request)
    assert dump(parse_submit(dump(request))) == dump(request)


def test_seed_left_out_is_given_by_the_server_once() -> None:
    request = parse_submit(CUSTOM, seed=7)
    assert request.data_config is not None
    assert request.data_config.seed == request.training_document["data_config"]["seed"] == 7
    assert parse_submit(dump(request), seed=8) == request


def test_seed_of_a_job_without_data_is_not_made_up() -> None:
    assert parse_submit(COMMAND, seed=7) == parse_submit(COMMAND)


def test_request_cannot_be_changed() -> None:
    request = parse_submit(COMMAND)
    with pytest.raises(ValueError, match="frozen"):
        request.name = "other"  # type: ignore[misc]


def test_stored_document_with_unknown_fields_is_read_without_them() -> None:
    stored = dump(parse_submit(changed(COMMAND, "workload.files", [{"path": "a", "sha256": "0" * 64}])))
    for path in ("later", "resource_config.later", "workload.later", "workload.files[0].later"):
        stored = changed(stored, path, {"a": 1})
    assert dump(load_stored(SPEC_VERSION, stored))["workload"]["files"] == [
        {"path": "a", "sha256": "0" * 64, "executable": False}
    ]


def test_stored_document_of_a_newer_version_is_refused() -> None:
    with pytest.raises(NewerSpecError, match=f"version {SPEC_VERSION + 1}.*up to {SPEC_VERSION}"):
        load_stored(SPEC_VERSION + 1, {})


def test_stored_document_of_a_kind_that_is_gone_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"workload\.kind: unknown kind 'gone'"):
        load_stored(SPEC_VERSION, changed(COMMAND, "workload.kind", "gone"))


def test_stored_documents_of_older_versions_are_lifted_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def name_the_title(document: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**{key: value for key, value in document.items() if key != "title"}, "name": document["title"]}

    def workload_from_cmd(document: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"name": document["name"], "workload": {"kind": "command", "argv": document["cmd"].split()}}

    monkeypatch.setattr(documents, "UPCASTERS", {SPEC_VERSION - 2: name_the_title, SPEC_VERSION - 1: workload_from_cmd})
    oldest = load_stored(SPEC_VERSION - 2, {"title": "n", "cmd": "echo hi"})
    older = load_stored(SPEC_VERSION - 1, {"name": "n", "cmd": "echo hi"})
    assert dump(oldest) == dump(older) == dump(parse_submit({"name": "n", "workload": oldest.workload}))


def test_upcasters_lift_every_older_version() -> None:
    assert set(documents.UPCASTERS) == set(range(1, SPEC_VERSION))


EVERY_KIND: dict[str, dict[str, Any]] = {
    "command": COMMAND,
    "training": LORA,
    "custom": CUSTOM,
    "script": {"name": "n", "workload": {"kind": "script", "path": "/srv/train.py", "environment": {"A": SECRET}}},
    "service": {"name": "n", "workload": {"kind": "service", "argv": ["serve"]}},
    "job class": {"name": "n", "workload": {"kind": "job_class", "target": "module:Class", "config": {"a": {"b": 1}}}},
    "initializers": {
        **COMMAND,
        "workload": {
            **COMMAND["workload"],
            "initializers": {"model": {"type": "huggingface", "storage_uri": "hf://org/model", "access_token": SECRET}},
        },
    },
    "endpoint": changed(COMMAND, "workload.environment", {"HF_ENDPOINT": "https://hub.example.com"}),
}


@pytest.mark.parametrize("document", EVERY_KIND.values(), ids=EVERY_KIND.keys())
def test_shown_request_with_its_secrets_is_the_request_again(document: dict[str, Any]) -> None:
    request = parse_submit(document)
    stored = load_stored(SPEC_VERSION, dump(request))

    shown = redacted(stored)

    assert SECRET not in str(shown)
    assert parse_submit(with_secrets_of(shown, stored, secret_values(request))) == request
