"""Which options the engine's loop has: every hyperparameter is in its table, and what it lacks is refused or noted."""

from __future__ import annotations

from typing import Any

import pytest

from spec_documents import LORA, changed
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.training.engine_options import ENGINE_HYPERPARAMETERS
from trainmaster.server.core.training.hyperparameters import HYPERPARAMETERS, ValueKind, read_hyperparameters
from trainmaster.server.core.training.types import ADAPTER_TYPES, BUILT_IN, LORA_TYPES

OTHERS = {ValueKind.FLAG: "true", ValueKind.NUMBER: "0.5", ValueKind.NAMES: "embed_tokens"}
"""A value that the loop lacks, by how the values of a hyperparameter are written, where these are not choices."""


def lacking(name: str) -> list[str]:
    known, row = ENGINE_HYPERPARAMETERS[name], HYPERPARAMETERS[name]
    if known is None:
        return []
    return [choice for choice in row.choices if choice not in known] or [OTHERS[row.kind]]


def problems(framework: str, fields: dict[str, Any]) -> dict[str, str]:
    """What a submission is refused for, by field."""
    document = changed(changed(LORA, "training_config.hyperparameters", {}), "training_config.framework", {})
    for path, value in {**fields, "training_config.framework.type": framework}.items():
        document = changed(document, path, value)
    try:
        parse_submit(document)
    except RefusedError as error:
        return {problem.field: problem.message for problem in error.problems}
    return {}


def test_every_hyperparameter_is_in_the_table() -> None:
    assert ENGINE_HYPERPARAMETERS.keys() == HYPERPARAMETERS.keys()


@pytest.mark.parametrize("training_type", sorted(BUILT_IN | LORA_TYPES & BUILT_IN))
def test_loop_has_the_defaults(training_type: Any) -> None:
    for name, value in read_hyperparameters(training_type, {}).items():
        known = ENGINE_HYPERPARAMETERS[name]
        assert known is None or value in known, name


@pytest.mark.parametrize("name", sorted(ENGINE_HYPERPARAMETERS))
def test_value_that_the_loop_lacks_is_refused_where_the_loop_is_asked_for(name: str) -> None:
    for text in lacking(name):
        field = f"training_config.hyperparameters.{name}"
        said = problems("ENGINE", {field: text})
        assert list(said) == [field]
        assert "the engine has" in said[field]
        assert "use framework type HF_TRAINER" in said[field]
        assert problems("HF_TRAINER", {field: text}) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("training_config.framework.config.eval_delay", "1"),
        ("training_config.framework.config.full_determinism", "1"),
        ("training_config.framework.distributed.config.ddp_timeout", "9"),
        ("data_config.preprocess.padding", "max_length"),
        ("training_config.base_model.dtype", "float16"),
        ("training_config.base_model.trust_remote_code", True),
    ],
)
def test_field_that_the_loop_lacks_is_refused_where_the_loop_is_asked_for(field: str, value: Any) -> None:
    assert list(problems("ENGINE", {field: value})) == [field]
    assert problems("HF_TRAINER", {field: value}) == {}


MIXED = "training_config.hyperparameters.mixed_precision"


@pytest.mark.parametrize("training_type", sorted(BUILT_IN))
def test_fp8_is_for_frozen_base_models(training_type: Any) -> None:
    if training_type in ADAPTER_TYPES:
        assert read_hyperparameters(training_type, {"mixed_precision": "fp8"})["mixed_precision"] == "fp8"
        return
    with pytest.raises(RefusedError) as caught:
        read_hyperparameters(training_type, {"mixed_precision": "fp8"})
    [problem] = caught.value.problems
    assert f"fp8 is for frozen base models, and {training_type} trains its own" in problem.message


def test_fp8_is_refused_where_the_engine_cannot_train() -> None:
    assert problems("AUTO", {MIXED: "fp8"}) == problems("ENGINE", {MIXED: "fp8"}) == {}
    said = problems("HF_TRAINER", {MIXED: "fp8"})
    assert "not by HF_TRAINER; use framework type AUTO, or use bf16" in said[MIXED]
    lacking = {MIXED: "fp8", "training_config.hyperparameters.use_dora": "true"}
    assert "hyperparameters.use_dora is true" in problems("AUTO", lacking)[MIXED]
    assert list(problems("ENGINE", lacking)) == ["training_config.hyperparameters.use_dora"]
    assert problems("AUTO", lacking | {MIXED: "bf16"}) == {}
