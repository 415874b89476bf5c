"""Rules between fields, and what one job's two places for the same thing mean."""

from __future__ import annotations

from typing import Any

import pytest

from spec_documents import COMMAND, CUSTOM, LORA, changed
from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.spec.configs import CheckpointConfig, OutputConfig
from trainmaster.server.core.spec.documents import SPEC_VERSION, dump, load_stored, parse_submit


def problems_of(document: object) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_submit(document)
    return {problem.field: problem.message for problem in caught.value.problems}


def custom(**changes: Any) -> dict[str, Any]:
    document = CUSTOM
    for path, value in changes.items():
        document = changed(document, path.replace("__", "."), value)
    return document


@pytest.mark.parametrize(
    ("changes", "priority"),
    [
        ({}, 5),
        ({"scheduling_config__priority": 7}, 7),
        ({"training_config__priority": 7}, 7),
        ({"training_config__priority": 7, "scheduling_config__priority": 7}, 7),
    ],
)
def test_priority_said_once_or_twice_alike_is_one_value_everywhere(changes: dict[str, Any], priority: int) -> None:
    request = parse_submit(custom(**changes))
    shown = dump(request)
    assert request.scheduling_config.priority == priority
    assert shown["scheduling_config"]["priority"] == shown["training_config"]["priority"] == priority


@pytest.mark.parametrize("name", ["priority", "max_retries"])
def test_shared_field_said_twice_differently_is_refused(name: str) -> None:
    problems = problems_of(custom(**{f"training_config__{name}": 5, f"scheduling_config__{name}": 6}))
    assert problems == {f"training_config.{name}": f"is 5, but scheduling_config.{name} is 6; set one of them"}


@pytest.mark.parametrize("place", ["training_config", "scheduling_config"])
def test_max_retries_in_either_place_is_the_effective_one(place: str) -> None:
    assert parse_submit(custom(**{f"{place}__max_retries": 3})).scheduling_config.max_retries == 3


def test_max_retries_of_a_command_without_training_config_comes_from_scheduling_config() -> None:
    assert parse_submit(COMMAND).scheduling_config.max_retries == 0
    assert parse_submit(changed(COMMAND, "scheduling_config.max_retries", 4)).scheduling_config.max_retries == 4


def test_shared_fields_survive_the_store() -> None:
    request = parse_submit(custom(training_config__priority=8, scheduling_config__max_retries=2))
    scheduling = load_stored(1, dump(request)).scheduling_config
    assert (scheduling.priority, scheduling.max_retries) == (8, 2)


@pytest.mark.parametrize("missing", ["training_config", "data_config"])
def test_config_missing_without_workload_is_refused(missing: str) -> None:
    document = {key: value for key, value in CUSTOM.items() if key != missing}
    assert problems_of(document) == {missing: "required, unless a workload says what runs"}


def test_configs_missing_beside_other_problems_are_named_with_them() -> None:
    assert set(problems_of({"name": "", "resource_config": {"gpu_count": -1}})) == {
        "name",
        "training_config",
        "data_config",
        "resource_config.gpu_count",
    }


def test_configs_missing_with_a_wrong_workload_are_not_asked_for() -> None:
    assert set(problems_of({"name": "n", "workload": {"kind": "command"}})) == {"workload.argv"}


def test_configs_of_a_training_beside_another_workload_are_refused_with_what_to_do() -> None:
    problems = problems_of({**CUSTOM, "workload": COMMAND["workload"]})
    assert set(problems) == {"training_config", "data_config"}
    assert "workload.environment" in problems["training_config"]
    assert "workload.resume_from_checkpoint" in problems["training_config"]
    assert "workload.initializers" in problems["data_config"]


@pytest.mark.parametrize(
    ("name", "value"), [("save_strategy", "epoch"), ("save_steps", 7), ("save_on_each_node", True)]
)
def test_when_a_program_saves_is_not_the_jobs_to_say(name: str, value: object) -> None:
    field = f"output_config.checkpoint.{name}"
    assert set(problems_of(changed(COMMAND, field, value))) == {field}
    default = CheckpointConfig.model_fields[name].default
    assert parse_submit(changed(COMMAND, field, default)).output_config.checkpoint == CheckpointConfig()
    assert parse_submit(changed(CUSTOM, field, value))


def test_stored_spec_with_configs_beside_a_command_can_still_be_read() -> None:
    stored = {**dump(parse_submit(CUSTOM)), "workload": dump(parse_submit(COMMAND))["workload"]}
    assert load_stored(SPEC_VERSION, stored).effective_workload.kind == "command"


def test_checkpoint_to_start_from_has_one_place_in_a_training() -> None:
    assert parse_submit(changed(COMMAND, "workload.resume_from_checkpoint", "c-1")).resume_from_checkpoint == "c-1"
    training = changed(CUSTOM, "training_config.resume_from_checkpoint", "c-2")
    assert parse_submit(training).resume_from_checkpoint == "c-2"
    both = {**training, "workload": {"kind": "trainer", "resume_from_checkpoint": "c-1"}}
    assert set(problems_of(both)) == {"workload.resume_from_checkpoint"}


def test_custom_framework_without_script_is_refused() -> None:
    field = "training_config.framework.custom_script_path"
    assert set(problems_of(custom(training_config__framework={"type": "CUSTOM"}))) == {field}
    assert set(problems_of(custom(training_config__framework={"type": "FSDP", "custom_script_path": "/a"}))) == {field}


@pytest.mark.parametrize(
    ("resources", "field"),
    [
        ({"gpu_count": 3, "node_count": 2}, "gpu_count"),
        ({"gpu_count": 1, "node_count": 2}, "gpu_count"),
        ({"node_affinity": ["a", "b=c"], "node_anti_affinity": ["x", "b=c"]}, "node_anti_affinity[1]"),
    ],
)
def test_resources_that_contradict_each_other_are_refused(resources: dict[str, Any], field: str) -> None:
    assert set(problems_of(custom(resource_config=resources))) == {f"resource_config.{field}"}


@pytest.mark.parametrize(
    ("world_size", "resources", "ranks_per_node"),
    [
        (None, {}, 1),
        (None, {"gpu_count": 0}, 1),
        (None, {"gpu_count": 0, "node_count": 2}, 1),
        (None, {"node_count": 3}, 1),
        (None, {"gpu_count": 8, "node_count": 2}, 4),
        (8, {"gpu_count": 8, "node_count": 2}, 4),
        (4, {"gpu_count": 0}, 4),
        (4, {"gpu_count": 0, "node_count": 2}, 2),
        (4, {}, 4),
    ],
)
def test_world_size_and_resources_give_ranks(
    world_size: int | None, resources: dict[str, Any], ranks_per_node: int
) -> None:
    request = parse_submit(
        custom(training_config__framework__distributed={"world_size": world_size}, resource_config=resources)
    )
    assert request.ranks_per_node == ranks_per_node


@pytest.mark.parametrize(
    ("world_size", "resources"),
    [(4, {"gpu_count": 8}), (3, {"gpu_count": 0, "node_count": 2}), (1, {"node_count": 2}), (4096, {"gpu_count": 0})],
)
def test_world_size_that_does_not_fit_is_refused(world_size: int, resources: dict[str, Any]) -> None:
    document = custom(training_config__framework__distributed={"world_size": world_size}, resource_config=resources)
    assert set(problems_of(document)) == {"training_config.framework.distributed.world_size"}


def test_gpu_count_with_too_many_ranks_for_a_node_is_refused() -> None:
    assert set(problems_of(custom(resource_config={"gpu_count": 4096}))) == {"resource_config.gpu_count"}


def test_gpu_count_left_out_stays_open() -> None:
    assert parse_submit(CUSTOM).resource_config.gpu_count is None


@pytest.mark.parametrize("training_type", ["SFT", "RLHF", "FULL_FINETUNE"])
def test_merge_lora_without_lora_is_refused(training_type: str) -> None:
    document = custom(training_config__training_type=training_type, output_config__merge_lora=True)
    assert set(problems_of(document)) == {"output_config.merge_lora"}


def test_merge_lora_without_training_config_is_refused() -> None:
    assert set(problems_of(changed(COMMAND, "output_config.merge_lora", True))) == {"output_config.merge_lora"}


RESULTS: list[tuple[str, object]] = [
    ("output_path", "/srv/results"),
    ("output_model_name", "m"),
    ("push_to_hub", True),
    ("hub_repo_id", "org/m"),
    ("export_format", "adapter"),
    ("merge_lora", True),
]


@pytest.mark.parametrize(("name", "value"), RESULTS)
@pytest.mark.parametrize("document", [CUSTOM, COMMAND], ids=["custom", "command"])
def test_what_a_trainer_does_with_its_result_is_refused_for_a_program(
    document: dict[str, Any], name: str, value: object
) -> None:
    field = f"output_config.{name}"
    together = {"hub_repo_id": "org/m"} if name == "push_to_hub" else {}
    problems = problems_of({**document, "output_config": {name: value, **together}})
    assert set(problems) == {field, *(f"output_config.{each}" for each in together)}
    assert "the program" in problems[field] or "for the training types" in problems[field]
    default = OutputConfig.model_fields[name].default
    assert parse_submit(changed(document, field, default)).output_config == OutputConfig()


@pytest.mark.parametrize(
    ("base", "changes", "field"),
    [
        (LORA, {"output_config.output_model_name": "m"}, "output_config.output_model_name"),
        (LORA, {"output_config.hub_repo_id": "org/m"}, "output_config.hub_repo_id"),
        (
            LORA,
            {"training_config.base_model": {"model_id": "/srv/m", "revision": "v1"}},
            "training_config.base_model.revision",
        ),
        (
            CUSTOM,
            {"training_config.base_model.tokenizer_id": "a/b", "data_config.preprocess.tokenizer_id": "c/d"},
            "training_config.base_model.tokenizer_id",
        ),
        (COMMAND, {"output_config.hub_token": "t"}, "output_config.hub_token"),
        (COMMAND, {"output_config.checkpoint.greater_is_better": True}, "output_config.checkpoint.greater_is_better"),
        (COMMAND, {"resource_config.gpu_type": "H100"}, "resource_config.gpu_type"),
        (COMMAND, {"resource_config.gpu_memory_min_mb": 80_000}, "resource_config.gpu_memory_min_mb"),
        (
            COMMAND,
            {"workload.working_directory": "/srv/w", "workload.remove_working_directory": True},
            "workload.remove_working_directory",
        ),
        (COMMAND, {"workload.index_urls": ["https://example.org/simple"]}, "workload.index_urls"),
    ],
)
def test_field_that_would_change_nothing_is_refused(base: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    document = base
    for path, value in changes.items():
        document = changed(document, path, value)
    assert set(problems_of(document)) == {field}


@pytest.mark.parametrize(
    ("config", "greater"),
    [
        ({"metric_for_best_model": "eval_loss"}, False),
        ({"metric_for_best_model": "accuracy"}, True),
        ({"metric_for_best_model": "Val_Loss", "greater_is_better": True}, True),
    ],
)
def test_checkpoint_best_metric_direction_follows_its_name(config: dict[str, Any], greater: bool) -> None:
    assert CheckpointConfig.model_validate(config).best_is_greater is greater


def test_rules_broken_in_several_configs_are_all_named() -> None:
    problems = problems_of(
        custom(
            training_config__priority=1,
            scheduling_config__priority=2,
            training_config__training_type="SFT",
            output_config__merge_lora=True,
        )
    )
    assert set(problems) == {"training_config.priority", "output_config.merge_lora"}


@pytest.mark.filterwarnings("ignore:Possible (nested set|set difference):FutureWarning")
def test_patterns_that_take_long_to_compile_are_checked_at_once() -> None:
    slow = "(?i)" + "".join(f"[{chr(50 + number)}-\U0010ffff]" for number in range(190))
    filters = [{"column": "a", "op": "matches", "value": slow} for _ in range(30)]
    assert parse_submit(custom(data_config__sources=[{"path": "/a", "filters": filters}]))
    [said] = problems_of(
        custom(data_config__sources=[{"path": "/a", "filters": [{**filters[0], "value": "a)"}]}])
    ).values()
    assert said.startswith("is no regular expression: unbalanced parenthesis")


def test_patterns_of_all_sources_together_are_bounded() -> None:
    pattern = {"column": "a", "op": "matches", "value": "(a?)" * 250}
    sources = [{"path": "/a", "filters": [pattern] * 16} for _ in range(2)]
    assert parse_submit(custom(data_config__sources=sources))
    problems = problems_of(custom(data_config__sources=[*sources, {"path": "/a", "filters": pattern}]))
    assert problems == {"data_config.sources": "have filters with more than 32000 characters of patterns"}


def test_number_of_kept_checkpoints_is_limited_for_new_jobs_and_not_for_stored_ones() -> None:
    document = custom(output_config={"checkpoint": {"save_total_limit": 1000}})
    stored = dump(parse_submit(document))
    too_many = custom(output_config={"checkpoint": {"save_total_limit": 1001}})
    (message,) = problems_of(too_many).values()
    assert set(problems_of(too_many)) == {"output_config.checkpoint.save_total_limit"}
    assert message == "must be at most 1000; save less often, or pin the checkpoints that have to stay besides"
    stored["output_config"]["checkpoint"]["save_total_limit"] = 100_000
    assert load_stored(SPEC_VERSION, stored).output_config.checkpoint.save_total_limit == 100_000


def test_sources_must_not_all_be_for_validation() -> None:
    document = custom(data_config__sources=[{"path": "/a", "validation": True}])
    assert set(problems_of(document)) == {"data_config.sources"}
    sources = [{"path": "/a"}, {"path": "/b", "validation": True, "sampling": {"weight": 2}}]
    assert set(problems_of(custom(data_config__sources=sources))) == {"data_config.sources[1].sampling.weight"}
