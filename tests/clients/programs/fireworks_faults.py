"""What goes wrong between a user of `fireworks-ai` and a trainer: answers get lost, chunks overtake each other, a batch
makes no sense, a trainer does not start. All but the last on one trainer, which is there already."""

import time
from typing import Any

import fireworks.training.sdk as fireworks
from batches import batch, datum, logprobs, losses, sequence
from fireworks.training.sdk.decision import DecisionCalibration, SamplerCheckpointMetadata
from fireworks_session import ADAM, JOB, MODEL, URL, base_url, manager, started, trainer_at
from scenarios import ask, raised

CHUNK = 1024
"""How many rows the client sends in one request."""


def steps(trainer: Any, data: list[Any], count: int) -> list[list[float]]:
    """Train; the loss and the norm of the gradient of every step. A pass that was done twice doubles the norm."""
    found = []
    for _ in range(count):
        passed = trainer.forward_backward(data, "cross_entropy").result()
        stepped = trainer.optim_step(ADAM, emit_grad_norm_metrics="basic").result()
        norms = [float(value) for name, value in sorted(stepped.metrics.items()) if "norm" in name]
        found.append([float(passed.metrics["loss:sum"]), *norms])
    return found


def lost_answers() -> Any:
    """The same work on a good way and on one where every third answer gets lost."""
    direct = base_url()
    found: dict[str, Any] = {}
    for name, url in (("good", direct), ("bad", direct.replace(URL, ask("the way that loses answers")))):
        trainer = trainer_at(url)
        trained = steps(trainer, batch(fireworks), 5)
        trainer.save_state(f"{name}-state").result()
        trainer.save_weights_for_sampler_ext(f"{name}-sampler")
        trainer.load_state_with_optimizer(f"{name}-state").result()
        found[name] = [*trained, *steps(trainer, batch(fireworks), 2)]
    saved = [one["name"].rpartition("/")[2] for one in manager.list_checkpoints(JOB)]
    return {**found, "saved": saved}


def reordered_chunks() -> Any:
    """A batch of three chunks, which reach the trainer in their order and in the opposite one."""
    direct = base_url()
    # Rows that differ from chunk to chunk, so that none can stand in the place of another.
    data = [datum(fireworks, sequence(index % 7 + index // CHUNK, 4)) for index in range(2 * CHUNK + 52)]
    found = {}
    for name, url in (("good", direct), ("bad", direct.replace(URL, ask("the way that turns chunks round")))):
        trainer = trainer_at(url)
        passed = trainer.forward_backward(data, "cross_entropy").result()
        stepped = trainer.optim_step(ADAM, emit_grad_norm_metrics="basic").result()
        found[name] = {
            "rows": logprobs(passed),
            "loss": passed.metrics["loss:sum"],
            "step": stepped.metrics,
            "after": losses(trainer, ADAM, batch(fireworks), 1),
        }
    alone = trainer_at(direct).forward(data[::CHUNK], "cross_entropy").result()
    rows = found["bad"].pop("rows")
    return {
        "same_rows": rows == found["good"].pop("rows"),
        "row_count": len(rows),
        "first_of_chunks": rows[::CHUNK],
        "first_of_chunks_alone": logprobs(alone),
        **found,
    }


def mistakes() -> Any:
    """Batches that make no sense, each before good work, among it, and sent before that is answered."""
    url = base_url()
    good = batch(fireworks)

    def wrong(tokens: list[int], targets: list[int]) -> Any:
        inputs = {"target_tokens": targets, "weights": [1.0] * len(targets)}
        return fireworks.Datum(model_input=fireworks.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)

    bad = {
        "wrong_length": ([wrong([4, 5, 6], [5, 6])], "cross_entropy"),
        "token_outside": ([wrong([4, 100_000], [5, 6])], "cross_entropy"),
        "target_outside": ([*good, wrong([4, 5], [5, 100_000])], "cross_entropy"),
        "too_long": ([datum(fireworks, sequence(0, 1100))], "cross_entropy"),
        "unknown_loss": (good, "no_such_loss"),
        "missing_input": (good, "importance_sampling"),
    }
    trainer = trainer_at(url)
    told = {}
    found = []
    for name, (data, loss) in bad.items():
        told[name] = raised(lambda: trainer.forward_backward(data, loss).result())  # noqa: B023
        found += steps(trainer, good, 1)

    hasty = trainer_at(url)
    sent = []
    for data, loss in bad.values():
        passed = hasty.forward_backward(good, "cross_entropy")
        failed = hasty.forward_backward(data, loss)
        sent.append((passed, failed, hasty.optim_step(ADAM)))
    found_in_haste = [passed.result().metrics["loss:sum"] for passed, _, _ in sent]
    for _, failed, stepped in sent:
        raised(failed.result)
        stepped.result()
    return {
        "told": told,
        "losses": found,
        "in_haste": found_in_haste,
        "without_mistakes": steps(trainer_at(url), good, len(bad)),
    }


def failed_start() -> Any:
    """A frozen model whose trainer cannot load it; then somebody mends that, and it is resumed."""
    broken = "accounts/fireworks/models/broken"
    error = raised(lambda: started("broken", base_model=broken, forward_only=True))
    job = manager.get("broken")
    ask("mend the weights")
    endpoint = manager.resume_and_wait("broken", poll_interval_s=0.2, timeout_s=300)
    frozen = trainer_at(endpoint.base_url, base_model=broken, lora_rank=0)
    mended = logprobs(frozen.forward(batch(fireworks), "cross_entropy").result())
    refused = raised(lambda: frozen.forward_backward(batch(fireworks), "cross_entropy").result())
    return {"error": error, "job": job, "mended": mended, "refused": refused}


def restarted() -> Any:
    """The server is killed and started again between two requests of somebody else."""
    ask("restart the server")


def taken_name() -> Any:
    """A second checkpoint is promoted to the name of the first one's model."""
    trainer = trainer_at(base_url())
    first, second = (trainer.save_weights_for_sampler_ext(name).snapshot_name for name in ("first", "second"))

    def promote(checkpoint: str) -> Any:
        return manager.promote_checkpoint(JOB, checkpoint, "taken-name", MODEL)

    made = promote(first)
    begun = time.monotonic()
    error = raised(lambda: promote(second))
    return {"error": error, "took_s": time.monotonic() - begun, "made": made, "again": promote(first)}


def names() -> Any:
    """States by names that can be loaded and by others, and states and models that are not there."""
    trainer = trainer_at(base_url())
    losses(trainer, ADAM, batch(fireworks), 1)
    refused = raised(lambda: trainer.save_state("Step_1").result())
    saved = trainer.save_state("step-1").result().path
    went_on = losses(trainer, ADAM, batch(fireworks), 2)
    missing = {
        path: raised(lambda: trainer.load_state_with_optimizer(path).result())  # noqa: B023
        for path in ("nobodys", f"cross_job://{JOB}/nobodys", "cross_job://nobodys/step-1")
    }
    model = f"accounts/{manager.account_id}/models/nobodys"
    missing["model"] = raised(lambda: trainer.load_adapter(model).result())
    trainer.load_state_with_optimizer(saved).result()
    rewound = losses(trainer, ADAM, batch(fireworks), 2)
    trainer.load_state_with_optimizer(f"cross_job://{JOB}/{saved}").result()
    return {
        "refused": refused,
        "saved": saved,
        "missing": missing,
        "went_on": went_on,
        "rewound": rewound,
        "across": losses(trainer, ADAM, batch(fireworks), 2),
        "longer": raised(lambda: started("longer", lora_rank=8, max_context_length=4096)),
        "calibrated": trainer.save_weights_for_sampler_ext(
            "calibrated",
            metadata=SamplerCheckpointMetadata(decision_calibration=DecisionCalibration(temperature={"choice": 1.5})),
        ).path,
    }
