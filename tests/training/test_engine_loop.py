"""The engine's loop takes the same course as TRL's: the same rows, losses, steps and weights."""

from __future__ import annotations

from typing import Any

import pytest
from trainings import Job, Make, Zygote, refusal

from trainmaster.protocol.reasons import StopCause

ENGINE, TRL = "ENGINE", "HF_TRAINER"
DROPOUT = {"model_kwargs": {"attention_dropout": "0.1"}}
"""A model that the engine lacks."""
SERIES = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy")
LORA = {"lora_r": 4, "learning_rate": 2e-2}


def trained(make_job: Make, framework: str, training_type: str, **parts: Any) -> Job:
    job = make_job(training_type, framework={"type": framework}, **parts)
    job.train()
    return job


def course(job: Job, name: str) -> dict[int, float]:
    """One metric by its step."""
    return {record["step"]: record["values"][name] for record in job.metrics() if name in record["values"]}


def assert_alike(ours: Job, theirs: Job, *, names: tuple[str, ...] = SERIES, rel: float = 2e-5) -> None:
    for name in names:
        expected = course(theirs, name)
        assert expected, name
        assert course(ours, name) == pytest.approx(expected, rel=rel, abs=1e-6), name


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    ("training_type", "hyperparameters"),
    [("SFT", {}), ("LORA", LORA), ("FULL_FINETUNE", {"gradient_checkpointing": True}), ("CONTINUED_PRETRAIN", {})],
)
def test_loss_curve_is_that_of_trl(
    make_job: Make, training_type: str, hyperparameters: dict[str, Any], packing: bool
) -> None:
    parts = {
        "evaluate": True,
        "hyperparameters": {"num_train_epochs": 2.0, **hyperparameters},
        "data": {"batch_size": 1 if packing else 4, "preprocess": {"packing": packing}},
    }
    ours, theirs = (trained(make_job, framework, training_type, **parts) for framework in (ENGINE, TRL))
    names = (*SERIES, *(f"eval_{name}" for name in ("loss", "entropy", "mean_token_accuracy")))
    assert_alike(ours, theirs, names=names)
    assert ours.series("loss")[-1] < ours.series("loss")[0]


ADAPTED = {"learning_rate": 2e-2, "lora_r": 4, "max_steps": 8}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "cosine after a warm-up": ("SFT", {"hyperparameters": {"lr_scheduler_type": "cosine", "warmup_steps": 0.25}}),
    "warm-up of so many steps": ("SFT", {"hyperparameters": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 3}}),
    "weight decay": ("FULL_FINETUNE", {"hyperparameters": {"weight_decay": 0.5, "learning_rate": 1e-2}}),
    "weight decay of an adapter": ("LORA", {"hyperparameters": {**ADAPTED, "weight_decay": 0.5}}),
    "no clipping": ("SFT", {"hyperparameters": {"max_grad_norm": 0}}),
    "much clipping": ("SFT", {"hyperparameters": {"max_grad_norm": 0.01, "optim": "sgd", "learning_rate": 1.0}}),
    "other moments": ("SFT", {"hyperparameters": {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-3}}),
    "accumulation with a remainder": (
        "SFT",
        {"data": {"batch_size": 2, "gradient_accumulation_steps": 5}, "hyperparameters": {"num_train_epochs": 2.5}},
    ),
    "last batch smaller": ("LORA", {"data": {"batch_size": 5}, "hyperparameters": {**ADAPTED, "max_steps": 13}}),
    "logs of several steps": ("SFT", {"hyperparameters": {"logging_steps": 5, "max_steps": 12}}),
    "rank-stabilized, gaussian": (
        "LORA",
        {"hyperparameters": {**ADAPTED, "use_rslora": True, "lora_alpha": 6.5, "lora_init": "gaussian"}},
    ),
    "some layers": ("LORA", {"hyperparameters": {**ADAPTED, "lora_target_modules": "q_proj,down_proj"}}),
    "without padding": ("SFT", {"data": {"batch_size": 4, "preprocess": {"padding": "none"}}}),
    **{f"optim {name}": ("SFT", {"hyperparameters": {"optim": name}}) for name in ("adafactor", "adagrad", "rmsprop")},
    "optim adamw_torch": ("SFT", {"hyperparameters": {"optim": "adamw_torch"}}),
    "evaluation every few steps": (
        "SFT",
        {"evaluate": True, "hyperparameters": {"eval_strategy": "steps", "eval_steps": 5}, "data": {"batch_size": 3}},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_option_does_what_it_does_with_trl(make_job: Make, name: str) -> None:
    training_type, parts = OPTIONS[name]
    ours, theirs = (trained(make_job, framework, training_type, **parts) for framework in (ENGINE, TRL))
    assert_alike(ours, theirs, names=(*SERIES, "eval_loss") if "evaluate" in parts else SERIES, rel=1e-4)


@pytest.mark.parametrize(("training_type", "dtype"), [("LORA", "bfloat16"), ("LORA", "float32"), ("SFT", "float32")])
def test_loss_curve_in_16_bits_is_about_that_of_32(make_job: Make, training_type: str, dtype: str) -> None:
    hyperparameters = {"learning_rate": 5e-3, "num_train_epochs": 2.0}
    parts = {"hyperparameters": hyperparameters, "data": {"batch_size": 2, "gradient_accumulation_steps": 2}}
    theirs = trained(make_job, TRL, training_type, **parts)
    parts["hyperparameters"] = {**hyperparameters, "mixed_precision": "bf16"}
    ours = make_job(training_type, framework={"type": ENGINE}, base_model={"dtype": dtype}, **parts)
    ours.train()
    assert_alike(ours, theirs, names=("loss", "entropy"), rel=0.03)
    assert ours.series("loss")[-1] < 0.8 * ours.series("loss")[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_curve_with_a_base_model_of_8_bits_is_about_that_of_the_whole_one(make_job: Make, dtype: str) -> None:
    hyperparameters = {"learning_rate": 5e-3, "num_train_epochs": 2.0}
    parts: dict[str, Any] = {"base_model": {"dtype": dtype}, "data": {"batch_size": 2}, "evaluate": True}
    theirs = trained(make_job, ENGINE, "LORA", hyperparameters=hyperparameters, **parts)
    ours = trained(make_job, "AUTO", "LORA", hyperparameters={**hyperparameters, "mixed_precision": "fp8"}, **parts)
    for name in ("loss", "eval_loss"):
        mine, exact = (list(course(job, name).values()) for job in (ours, theirs))
        apart = [abs(own - other) for own, other in zip(mine, exact, strict=True)]
        assert 0 < sum(apart) / len(apart) < 0.03 * exact[0]
    assert ours.series("loss")[-1] < 0.8 * ours.series("loss")[0]


def test_fp8_of_a_model_that_the_engine_lacks_is_refused_and_trl_does_not_train_instead(make_job: Make) -> None:
    said = refusal(make_job("LORA", hyperparameters={"mixed_precision": "fp8"}, base_model=DROPOUT))
    assert "hyperparameters.mixed_precision: fp8 is computed by the engine alone: the model's attention_dropout" in said
    assert "use bf16" in said


@pytest.mark.parametrize("training_type", ["LORA", "FULL_FINETUNE"])
def test_two_ranks_take_the_course_of_one_and_of_trl(make_job: Make, training_type: str) -> None:
    def parts(ranks: int) -> dict[str, Any]:
        hyperparameters = {**(LORA if training_type == "LORA" else {}), "num_train_epochs": 2.0}
        return {
            "ranks": ranks,
            "hyperparameters": hyperparameters,
            "data": {"batch_size": 8 // ranks},
            "evaluate": True,
        }

    names = (*SERIES, "eval_loss")
    ours, alone, theirs = (
        trained(make_job, framework, training_type, **parts(ranks))
        for framework, ranks in ((ENGINE, 2), (ENGINE, 1), (TRL, 2))
    )
    assert_alike(ours, theirs, names=names)
    # Entropy and accuracy are means over batches, and one rank has others.
    assert_alike(ours, alone, names=("loss", "grad_norm", "learning_rate"))


@pytest.mark.parametrize("rows", [13, 3])
def test_rows_that_ranks_cannot_share_evenly_are_dealt_as_by_trl(make_job: Make, rows: int, zygote: Zygote) -> None:
    jobs = []
    for framework in (ENGINE, TRL):
        job = make_job(ranks=2, framework={"type": framework}, data={"batch_size": 2})
        log, where = job.directory / "log", job.directory / "rows"
        pid = zygote.start({}, log, call="tiny_model:make_some_rows", arguments=[str(where), rows])
        assert zygote.wait(pid) == 0, log.read_text()
        job.prepared["train_path"] = str(where)
        job.train()
        jobs.append(job)
    # At the end of an epoch, TRL counts only one rank's entropy and accuracy.
    assert_alike(*jobs, names=("loss", "grad_norm", "learning_rate"))


@pytest.mark.parametrize(("first", "second"), [(TRL, ENGINE), (ENGINE, TRL)])
@pytest.mark.parametrize("training_type", ["LORA", "SFT"])
def test_training_goes_on_under_the_other_loop(make_job: Make, training_type: str, first: str, second: str) -> None:
    parts = {"hyperparameters": {"num_train_epochs": 2.0}}
    whole = trained(make_job, first, training_type, **parts)
    job = make_job(training_type, framework={"type": first}, **parts)
    job.interrupt(StopCause.PAUSE, 7)
    before = course(job, "loss")
    job.document["training_config"]["framework"]["type"] = second
    job.train(resume_from=job.latest())
    assert before | course(job, "loss") == pytest.approx(course(whole, "loss"), rel=1e-4)


LACKING = [
    ({"base_model": DROPOUT}, "the model's attention_dropout is 0.1, and the engine has no dropout"),
    ({"base_model": {"model_kwargs": {"hidden_act": "relu"}}}, "its activation 'relu' is not known"),
    ({"base_model": {"dtype": "float16"}, "hyperparameters": {"max_steps": 1}}, "base_model.dtype is float16"),
]


@pytest.mark.parametrize(("parts", "message"), LACKING[:2])
def test_model_that_the_engine_lacks_is_refused_where_it_is_asked_for(
    make_job: Make, parts: dict[str, Any], message: str
) -> None:
    said = refusal(make_job(framework={"type": ENGINE}, **parts))
    assert message in said
    assert "use HF_TRAINER" in said


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        *LACKING,
        ({"hyperparameters": {"neftune_noise_alpha": 5.0}}, "neftune_noise_alpha is 5.0, and the engine has none"),
        ({"framework": {"config": {"eval_delay": "1"}}}, "framework.config.eval_delay is an option of TRL"),
        (
            {"base_model": {"model_kwargs": {"max_position_embeddings": "8"}}},
            "the longest sample has 15 tokens, and the engine computes 8 of this model",
        ),
    ],
)
def test_what_the_engine_lacks_is_trained_by_trl_with_a_note(
    make_job: Make, parts: dict[str, Any], message: str
) -> None:
    job = make_job(**parts)
    job.train()
    (note,) = [event["message"] for event in job.events() if "TRL trains" in event.get("message", "")]
    assert note.startswith("TRL trains, and not the engine: ")
    assert message in note
    assert note in job.log()


def test_what_the_engine_has_is_trained_by_it(make_job: Make) -> None:
    job = make_job("LORA", hyperparameters={"max_steps": 2})
    job.train()
    assert "the engine trains" in job.log()
    assert not any("TRL" in event.get("message", "") for event in job.events())


@pytest.mark.parametrize("wanted", ["True", "false"])
def test_only_deterministic_kernels_are_used_where_the_job_says_so(make_job: Make, wanted: str) -> None:
    job = make_job("LORA", hyperparameters={"max_steps": 2}, framework={"config": {"full_determinism": wanted}})
    job.train()
    assert "the engine trains" in job.log()
    assert ("only deterministic kernels are used" in job.log()) is (wanted == "True")
