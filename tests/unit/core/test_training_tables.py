"""The tables of the built-in trainers: hyperparameters, and which framework trains what."""

from __future__ import annotations

import pytest

from trainmaster.server.core.errors import RefusedError
from trainmaster.server.core.training.hyperparameters import ELSEWHERE, HYPERPARAMETERS, read_hyperparameters
from trainmaster.server.core.training.sources import file_path, model_source
from trainmaster.server.core.training.types import (
    BUILT_IN,
    ENGINE_ONLY,
    FRAMEWORKS,
    LATER,
    FrameworkType,
    TrainingType,
    missing,
    missing_options,
    unavailable,
)

SFT, LORA = TrainingType.SFT, TrainingType.LORA


def refused(training_type: TrainingType, **given: str) -> dict[str, str]:
    with pytest.raises(RefusedError) as caught:
        read_hyperparameters(training_type, given)
    return {problem.field.rpartition(".")[2]: problem.message for problem in caught.value.problems}


@pytest.mark.parametrize("training_type", sorted(BUILT_IN))
def test_defaults_of_every_type_are_values_that_could_be_given(training_type: TrainingType) -> None:
    values = read_hyperparameters(training_type, {})
    for name, value in values.items():
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            assert HYPERPARAMETERS[name].read(text) == value
    given = {name: str(value).lower() for name, value in values.items() if value is not None}
    assert read_hyperparameters(training_type, given) == values


def test_types_have_defaults_and_names_of_their_own() -> None:
    assert read_hyperparameters(SFT, {})["learning_rate"] == 2e-5
    assert read_hyperparameters(LORA, {})["learning_rate"] == 2e-4
    assert read_hyperparameters(TrainingType.CONTINUED_PRETRAIN, {})["learning_rate"] == 5e-5
    assert "lora_r" in read_hyperparameters(LORA, {})
    assert "lora_r" not in read_hyperparameters(SFT, {})
    assert "completion_only_loss" not in read_hyperparameters(TrainingType.CONTINUED_PRETRAIN, {})
    assert read_hyperparameters(SFT, {})["completion_only_loss"] is True
    assert read_hyperparameters(TrainingType.FULL_FINETUNE, {})["completion_only_loss"] is False


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("learning_rate", "1e-4", 1e-4),
        ("learning_rate", " .5 ", 0.5),
        ("max_steps", "10", 10),
        ("max_steps", "1e3", 1000),
        ("warmup_steps", "100", 100),
        ("warmup_steps", "0.1", 0.1),
        ("warmup_steps", "0", 0),
        ("gradient_checkpointing", "False", False),
        ("gradient_checkpointing", "1", True),
        ("gradient_checkpointing", "auto", "auto"),
        ("lora_target_modules", "q_proj, v_proj", "q_proj,v_proj"),
        ("lora_target_modules", "all-linear", "all-linear"),
        ("lora_init", "false", False),
        ("lora_init", "gaussian", "gaussian"),
        ("tracker_project", "mine", "mine"),
    ],
)
def test_text_becomes_the_value_that_it_means(name: str, text: str, value: object) -> None:
    read = read_hyperparameters(LORA, {name: text})[name]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("learning_rate", "fast", "must be a number, not 'fast'"),
        ("learning_rate", "0", "must be more than 0"),
        ("learning_rate", "nan", "must be a number"),
        ("learning_rate", "1_0", "must be a number"),
        ("learning_rate", "1e999", "must be a number"),
        ("learning_rate", "", "must be a number"),
        ("max_steps", "1.5", "must be a whole number, not '1.5'"),
        ("max_steps", "1e30", "must be a whole number"),
        ("max_steps", "-2", "must be at least -1"),
        ("adam_beta2", "1", "must be less than 1"),
        ("warmup_steps", "1.5", "share of all steps below 1"),
        ("warmup_steps", "-1", "must be at least 0"),
        ("torch_compile", "maybe", "must be true or false, not 'maybe'"),
        ("optim", "adamw_torchh", "did you mean 'adamw_torch'? Choices: "),
        ("lora_init", "pissa", "choices: gaussian, orthogonal"),
        ("lora_target_modules", "q_proj,,v_proj", "names with commas between"),
        ("tracker_project", " ", "must not be empty"),
    ],
)
def test_text_that_means_nothing_is_refused(name: str, text: str, says: str) -> None:
    assert says in refused(LORA, **{name: text})[name]


def test_unknown_name_is_refused_with_the_nearest() -> None:
    assert refused(SFT, learning_rat="1")["learning_rat"] == "unknown hyperparameter; did you mean 'learning_rate'?"
    assert refused(SFT, xyzzy="1")["xyzzy"] == "unknown hyperparameter; leave it out"


def test_name_of_another_training_type_is_refused_with_whose_it_is() -> None:
    assert "is for DPO, LORA" in refused(SFT, lora_r="8")["lora_r"]


def test_name_that_other_programs_have_is_refused_with_ours() -> None:
    assert refused(SFT, lr="1")["lr"] == "unknown hyperparameter; use learning_rate"
    assert "data_config.batch_size" in refused(SFT, per_device_train_batch_size="1")["per_device_train_batch_size"]
    assert not ELSEWHERE.keys() & HYPERPARAMETERS.keys()


def test_everything_that_is_wrong_is_named_at_once() -> None:
    assert set(refused(SFT, lr="1", max_steps="x", learning_rate="1e-4")) == {"lr", "max_steps"}
    with pytest.raises(RefusedError, match=r"training_config\.hyperparameters\.lr: .*\(and 1 more\)"):
        read_hyperparameters(SFT, {"lr": "1", "max_steps": "x"})


def test_types_are_built_in_or_come_later() -> None:
    assert BUILT_IN | LATER.keys() == frozenset(TrainingType)
    assert not BUILT_IN & LATER.keys()
    assert FRAMEWORKS.keys() == frozenset(FrameworkType)


@pytest.mark.parametrize("training_type", sorted(LATER))
def test_type_without_a_trainer_is_refused_with_what_to_use_instead(training_type: TrainingType) -> None:
    said = unavailable(FrameworkType.HF_TRAINER, training_type)
    assert said is not None
    assert "not available in this version" in said
    assert "CUSTOM" in said
    assert unavailable(FrameworkType.CUSTOM, training_type) is None


@pytest.mark.parametrize("framework", [FrameworkType.HF_TRAINER, FrameworkType.FSDP])
def test_built_in_frameworks_do_every_built_in_type(framework: FrameworkType) -> None:
    of_engine = ENGINE_ONLY if framework is FrameworkType.HF_TRAINER else frozenset()
    assert all(unavailable(framework, training_type) is None for training_type in BUILT_IN - of_engine)
    for training_type in of_engine:
        assert "which the engine trains; use AUTO" in (unavailable(framework, training_type) or "")


def test_missing_packages_are_named_with_how_to_install_them() -> None:
    said = missing(FrameworkType.HF_TRAINER, lambda package: package not in ("trl", "peft"))
    assert said is not None
    assert "has no trl, peft" in said
    assert "pip install 'trainmaster[train]'" in said
    assert missing(FrameworkType.HF_TRAINER, lambda _: True) is None
    assert missing(FrameworkType.CUSTOM, lambda _: False) is None


def test_problems_are_named_up_to_a_hundred() -> None:
    with pytest.raises(RefusedError) as caught:
        read_hyperparameters(SFT, {f"learning_rate_{number}": "1" for number in range(4096)})
    assert len(caught.value.problems) == 100


def test_hyperparameter_that_needs_a_package_says_so_where_it_is_missing() -> None:
    values = read_hyperparameters(SFT, {"use_liger_kernel": "true"})
    said = missing_options(values, lambda _: False)
    assert said is not None
    assert "liger-kernel" in said
    assert missing_options(values, lambda _: True) is None
    assert missing_options(read_hyperparameters(SFT, {}), lambda _: False) is None


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("org/model", "huggingface"),
        ("gpt2", "huggingface"),
        ("hf://org/model", "huggingface"),
        ("/srv/model", "local"),
        ("./model", "local"),
        ("../model", "local"),
        ("~/model", "local"),
        ("file:///srv/model", "local"),
        ("s3://bucket/model", "s3"),
        ("https://example.org/model.tar", "url"),
        ("scaiatlas://model", "scaiatlas"),
    ],
)
def test_source_of_a_model_is_read_off_its_id(name: str, source: str) -> None:
    assert model_source(name) == source


def test_path_of_a_source_is_a_file_unless_its_scheme_says_otherwise() -> None:
    assert file_path("/srv/a.jsonl") == file_path("file:///srv/a.jsonl") == "/srv/a.jsonl"
    assert file_path("s3://bucket/a.jsonl") is None


@pytest.mark.parametrize(
    ("given", "name", "said"),
    [
        ({"label_smoothing": "0.1", "loss_type": "ipo"}, "label_smoothing", "for the loss sigmoid and robust"),
        ({"simpo_gamma": "1"}, "simpo_gamma", "for the loss simpo, and loss_type is sigmoid"),
        ({"desirable_weight": "2"}, "desirable_weight", "for the loss kto"),
        ({"lora_r": "8", "adapter": "none"}, "lora_r", "for an adapter, and adapter is none"),
        ({"mixed_precision": "fp8", "adapter": "none"}, "mixed_precision", "adapter is none; use bf16"),
        ({"beta": "0"}, "beta", "must be more than 0"),
        ({"label_smoothing": "0.5"}, "label_smoothing", "must be less than 0.5"),
        ({"dpo_beta": "0.1"}, "dpo_beta", "use beta"),
        ({"lora_dropout": "0.1"}, "lora_dropout", "is for LORA"),
        ({"torch_compile": "true"}, "torch_compile", "and this is DPO"),
    ],
)
def test_what_has_no_effect_on_preferences_is_refused(given: dict[str, str], name: str, said: str) -> None:
    assert said in refused(TrainingType.DPO, **given)[name]


def test_options_of_preferences_are_read() -> None:
    values = read_hyperparameters(TrainingType.DPO, {"loss_type": "simpo", "simpo_gamma": "1.5", "beta": "2"})
    assert (values["loss_type"], values["simpo_gamma"], values["beta"]) == ("simpo", 1.5, 2.0)
    assert read_hyperparameters(TrainingType.DPO, {"mixed_precision": "fp8"})["mixed_precision"] == "fp8"
    # Whoever gives all options as they are by default gets what they are by default.
    assert read_hyperparameters(TrainingType.DPO, {"adapter": "none", "lora_r": "16"})["adapter"] == "none"
