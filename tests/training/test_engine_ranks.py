"""Two ranks of the engine's loop, with copies of the model and with shards of it: the course of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_engine_loop import LORA, SERIES, assert_alike, course
from trainings import Job, Make, Zygote, refusal

from local_servers import quiet_port
from trainmaster.protocol.reasons import StopCause

DDP: dict[str, Any] = {"type": "ENGINE", "distributed": {"strategy": "ddp"}}
FSDP: dict[str, Any] = {"type": "ENGINE", "distributed": {"strategy": "fsdp"}}
TRL: dict[str, Any] = {"type": "HF_TRAINER", "distributed": {"strategy": "fsdp"}}
BOTH = pytest.mark.parametrize("framework", [DDP, FSDP], ids=["ddp", "fsdp"])


@pytest.fixture(scope="module")
def untied(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("untied")
    pid = zygote.start({}, directory / "log", call="tiny_model:make_untied", arguments=[str(directory / "model")])
    assert zygote.wait(pid) == 0, (directory / "log").read_text()
    return directory / "model"


def together(zygote: Zygote, directory: Path, call: str, *arguments: Any) -> None:
    """Have two ranks check something."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(quiet_port()), "WORLD_SIZE": "2"}
    logs = [directory / f"{call}-{rank}.log" for rank in range(2)]
    pids = [
        zygote.start(
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            log,
            call=f"rank_checks:{call}",
            arguments=[str(each) for each in arguments],
        )
        for rank, log in enumerate(logs)
    ]
    codes = [zygote.wait(pid) for pid in pids]
    assert codes == [0, 0], "".join(log.read_text() for log in logs)


@pytest.mark.parametrize("call", ["sums_begin_before_the_backward_pass_ends", "sums_are_those_of_all_ranks"])
def test_gradients_are_summed_while_the_backward_pass_runs(zygote: Zygote, tmp_path: Path, call: str) -> None:
    together(zygote, tmp_path, call)


def test_sharded_layer_is_whole_while_it_is_computed(zygote: Zygote, tmp_path: Path, untied: Path) -> None:
    together(zygote, tmp_path, "layers_are_gathered_and_freed", untied)


def trained(make_job: Make, framework: dict[str, Any], training_type: str, **parts: Any) -> Job:
    job = make_job(training_type, framework=framework, **parts)
    job.train()
    return job


def parts_of(training_type: str, ranks: int, **hyperparameters: Any) -> dict[str, Any]:
    """Eight steps of six rows, and evaluations in which the first of two ranks has one batch more."""
    own = {**(LORA if training_type == "LORA" else {}), **hyperparameters}
    return {"ranks": ranks, "evaluate": True, "hyperparameters": own, "data": {"batch_size": 6 // ranks}}


@pytest.mark.parametrize(
    ("training_type", "hyperparameters"),
    [
        ("LORA", {}),
        ("FULL_FINETUNE", {"gradient_checkpointing": True}),
        pytest.param("LORA", {"gradient_checkpointing": True}, marks=pytest.mark.long),
        pytest.param("SFT", {"optim": "sgd", "learning_rate": 0.1}, marks=pytest.mark.long),
        pytest.param("SFT", {"optim": "adagrad"}, marks=pytest.mark.long),
        pytest.param("SFT", {"optim": "rmsprop"}, marks=pytest.mark.long),
    ],
)
def test_sharded_course_is_that_of_one_rank(
    make_job: Make, training_type: str, hyperparameters: dict[str, Any]
) -> None:
    sharded, copied, alone = (
        trained(make_job, framework, training_type, **parts_of(training_type, ranks, **hyperparameters))
        for framework, ranks in ((FSDP, 2), (DDP, 2), (DDP, 1))
    )
    assert "the engine trains, sharded over 2 ranks" in sharded.log()
    assert sharded.series("loss")[-1] < sharded.series("loss")[0]
    assert_alike(sharded, copied, names=(*SERIES, "eval_loss", "eval_entropy", "eval_mean_token_accuracy"))
    # Means over batches differ: one rank has others.
    assert_alike(sharded, alone, names=("loss", "grad_norm", "learning_rate"))
    assert_alike(copied, alone, names=("loss", "grad_norm", "learning_rate"))


@BOTH
def test_accumulated_batches_of_two_ranks_are_those_of_one(make_job: Make, framework: dict[str, Any]) -> None:
    two, one = (
        trained(
            make_job,
            where,
            "SFT",
            ranks=ranks,
            data={"batch_size": size, "gradient_accumulation_steps": 2},
            hyperparameters={"max_grad_norm": 0.5},
        )
        for where, ranks, size in ((framework, 2, 2), (DDP, 1, 4))
    )
    assert_alike(two, one, names=("loss", "grad_norm", "learning_rate"))


def test_untied_model_in_16_bits_is_sharded(make_job: Make, untied: Path) -> None:
    jobs = [
        make_job("SFT", framework=framework, **parts_of("SFT", 2, mixed_precision="bf16")) for framework in (FSDP, DDP)
    ]
    for job in jobs:
        job.prepared |= {"model_path": str(untied), "tokenizer_path": str(untied)}
        job.train()
    assert_alike(*jobs, names=("loss", "grad_norm", "eval_loss"), rel=0.02)


@pytest.mark.parametrize("training_type", ["LORA", "SFT"])
@BOTH
def test_killed_training_ends_with_the_bits_of_an_uninterrupted_one(
    make_job: Make, framework: dict[str, Any], training_type: str
) -> None:
    parts = parts_of(training_type, 2, gradient_checkpointing=True)
    whole, job = (make_job(training_type, framework=framework, **parts) for _ in range(2))
    whole.train()
    job.interrupt(None, 5)
    job.train(resume_from=job.latest())
    assert "training continues at step 3 of " in job.log()
    assert (job.result(), job.state()) == (whole.result(), whole.state())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (DDP, FSDP),
        (FSDP, DDP),
        pytest.param(TRL, FSDP, marks=pytest.mark.long),
        pytest.param(FSDP, TRL, marks=pytest.mark.long),
    ],
    ids=["to-fsdp", "to-ddp", "from-trl", "to-trl"],
)
@pytest.mark.parametrize("training_type", [pytest.param("LORA", marks=pytest.mark.long), "SFT"])
def test_copies_go_on_as_shards_and_shards_as_copies(
    make_job: Make, training_type: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    parts = parts_of(training_type, 2)
    whole = trained(make_job, first, training_type, **parts)
    job = make_job(training_type, framework=first, **parts)
    job.interrupt(StopCause.PAUSE, 4)
    before = course(job, "loss")
    job.document["training_config"]["framework"] = make_job(framework=second).document["training_config"]["framework"]
    job.train(resume_from=job.latest())
    assert before | course(job, "loss") == pytest.approx(course(whole, "loss"), rel=1e-4)


def test_best_of_a_sharded_training_is_exported(make_job: Make, check: Any) -> None:
    # The greatest loss is that of the first checkpoint.
    best = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "save_total_limit": 3}
    jobs = [trained(make_job, framework, "SFT", checkpoint=best, **parts_of("SFT", 2)) for framework in (FSDP, DDP)]
    check("nearly_same_weights", *(job.output / "model" for job in jobs))


def test_option_that_the_engine_lacks_is_refused(make_job: Make) -> None:
    options = {"strategy": "fsdp", "config": {"cpu_offload": "true"}}
    said = refusal(make_job(ranks=2, framework={"type": "ENGINE", "distributed": options}))
    assert "framework.distributed.config.cpu_offload is an option of TRL's ranks; use HF_TRAINER" in said
