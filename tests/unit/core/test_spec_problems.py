"""What a refused document says: where, what, and the nearest known name."""

from __future__ import annotations

from typing import Any

import pytest

from spec_documents import COMMAND, CUSTOM, changed
from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.spec.configs import ResourceConfig
from trainmaster.server.core.spec.documents import parse, parse_submit
from trainmaster.server.core.workloads import kinds


def problems_of(document: object) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        parse_submit(document)
    return [(problem.field, problem.message) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("lables", "labels"),
        ("resource_config.gpu_cont", "gpu_count"),
        ("training_config.base_model.modelid", "model_id"),
        ("training_config.framework.distributed.worldsize", "world_size"),
        ("data_config.sources[0].colums", "columns"),
        ("output_config.checkpoint.save_step", "save_steps"),
        ("gpu_count", "resource_config.gpu_count"),
        ("learning_rate", "training_config.hyperparameters.learning_rate"),
        ("training_config.lora_r", "training_config.hyperparameters.lora_r"),
        ("resource_config.world_size", "training_config.framework.distributed.world_size"),
    ],
)
def test_unknown_field_is_refused_with_the_nearest_known_name(path: str, near: str) -> None:
    assert problems_of(changed(CUSTOM, path, 1)) == [(path, f"unknown field; did you mean '{near}'?")]


def test_unknown_field_like_no_other_is_refused_without_a_guess() -> None:
    assert problems_of(changed(COMMAND, "zzzz", 1)) == [("zzzz", "unknown field; leave it out")]


def test_unknown_field_of_a_workload_is_matched_against_its_own_kind() -> None:
    digest = {"path": "a", "sha256": "0" * 64}
    assert problems_of(changed(COMMAND, "workload.agrv", [])) == [
        ("workload.agrv", "unknown field; did you mean 'argv'?")
    ]
    assert problems_of(changed(COMMAND, "workload.files", [{**digest, "executabel": True}])) == [
        ("workload.files[0].executabel", "unknown field; did you mean 'executable'?")
    ]


def test_unknown_kind_is_refused_with_the_nearest_and_all_choices() -> None:
    assert problems_of(changed(COMMAND, "workload.kind", "comand")) == [
        ("workload.kind", f"unknown kind 'comand'; did you mean 'command'? Choices: {', '.join(kinds())}")
    ]


@pytest.mark.parametrize("kind", [None, 3, [], {}])
def test_kind_that_is_no_name_is_refused_with_all_choices(kind: object) -> None:
    [(field, message)] = problems_of(changed(COMMAND, "workload.kind", kind))
    assert field == "workload.kind"
    assert ", ".join(kinds()) in message


def test_unknown_value_is_refused_with_the_nearest_and_all_choices() -> None:
    [(field, message)] = problems_of(changed(CUSTOM, "training_config.training_type", "qlora"))
    assert field == "training_config.training_type"
    assert message.startswith("unknown training_type 'qlora'; did you mean 'QLORA'? Choices: SFT, LORA, ")


def test_unknown_scheme_is_refused_with_the_nearest() -> None:
    [(_, message)] = problems_of(changed(CUSTOM, "data_config.sources[0].path", "scaidriv://x"))
    assert message.startswith("unknown scheme 'scaidriv'; did you mean 'scaidrive'?")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("name", 3, "must be text, not a number; put it in quotes"),
        ("name", ["a"], "must be text, not a list; write one value"),
        ("name", [["a"]], "must be text, not a list"),
        ("name", {"a": "b"}, "must be text, not an object"),
        (
            "training_config.hyperparameters",
            {"lora_target_modules": ["q_proj", "v_proj"]},
            "must be text, not a list; write one value, or several with commas between them",
        ),
        ("name", "", "must not be empty"),
        ("name", "x" * 200, "must have at most 128 characters"),
        ("resource_config", [], "must be an object, not a list"),
        ("resource_config.gpu_count", "4", "must be a whole number, not text; write it without quotes"),
        ("resource_config.gpu_count", "four", "must be a whole number, not text"),
        ("resource_config.gpu_count", True, "must be a whole number, not a truth value"),
        ("resource_config.gpu_count", -1, "must be at least 0"),
        ("resource_config.gpu_count", 10**9, "must be at most 1000000"),
        ("resource_config.node_affinity", "a", "must be a list, not text; write it as [a, b]"),
        ("resource_config.node_affinity", 3, "must be a list, not a number"),
        ("training_config.base_model", "tiny", "must be an object, not text; write it as {model_id: ...}"),
        ("data_config.sources[0]", "a.jsonl", "must be an object, not text; write it as {path: ...}"),
        ("resource_config", "a", "must be an object, not text"),
        ("output_config.push_to_hub", "yes", "must be true or false, not text"),
        ("data_config.validation_split", 1.0, "must be less than 1"),
        ("data_config.sources", [], "must not be empty"),
        ("data_config.sources[0].sampling", {"weight": 0}, "must be more than 0"),
        ("training_config.environment.TRAINMASTER_X", "1", "names that begin with TRAINMASTER_ are reserved"),
        ("labels.type", "x", "the label 'type' and the prefix 'system/' are reserved"),
        ("name", "\ud800", "contains a lone surrogate"),
        ("labels.a", "\ud800", "contains a lone surrogate"),
    ],
)
def test_wrong_value_is_refused_in_words_for_people(path: str, value: Any, message: str) -> None:
    [(field, said)] = problems_of(changed(CUSTOM, path, value))
    assert field.startswith(path)
    assert said.startswith(message)


@pytest.mark.parametrize("document", [None, [], "text", 3, True])
def test_request_that_is_no_object_is_refused(document: object) -> None:
    [(field, message)] = problems_of(document)
    assert field == "request"
    assert message.startswith("must be an object, not ")


def test_entry_that_is_wrong_does_not_make_its_list_empty() -> None:
    assert [field for field, _ in problems_of(changed(COMMAND, "workload.argv", ["\x00"]))] == ["workload.argv[0]"]


def test_problems_are_all_named_at_once_and_counted_in_the_message() -> None:
    document = changed(changed(COMMAND, "workload.argv", []), "resource_config.gpu_cont", 1)
    with pytest.raises(SpecError) as caught:
        parse_submit({**document, "name": ""})
    assert {problem.field for problem in caught.value.problems} == {
        "name",
        "workload.argv",
        "resource_config.gpu_cont",
    }
    assert str(caught.value) == "name: must not be empty (and 2 more)"


def test_problems_beyond_a_hundred_are_counted_only() -> None:
    found = problems_of({**COMMAND, **{f"unknown-{index}": 1 for index in range(150)}})
    assert len(found) == 101
    assert found[-1] == ("request", "has 50 more problems")


@pytest.mark.parametrize("name", ["\ud800", "x" * 100_000])
def test_problem_with_a_strange_name_can_be_sent(name: str) -> None:
    for field, message in problems_of({**COMMAND, name: 1}) + problems_of(changed(COMMAND, "labels", {name: "a"})):
        assert len((field + message).encode()) < 300


def test_problem_never_repeats_a_secret() -> None:
    secret = "s3cr3t" * 1000
    document = changed(CUSTOM, "output_config.hub_token", secret)
    document = changed(document, "training_config.environment", {"A": secret + "\x00", "B": [secret]})
    with pytest.raises(SpecError) as caught:
        parse_submit(document)
    assert len(caught.value.problems) == 3
    assert "s3cr3t" not in f"{caught.value} {caught.value.problems} {caught.value.__context__!r}"


def test_other_models_are_parsed_with_the_same_errors() -> None:
    with pytest.raises(SpecError, match="gpu_cont: unknown field; did you mean 'gpu_count'"):
        parse(ResourceConfig, {"gpu_cont": 1})
