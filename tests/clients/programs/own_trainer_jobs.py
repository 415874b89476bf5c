"""Trains with `fireworks-ai` on trainers that the test starts and stops with our own client, and promotes from."""

from typing import Any

import fireworks.training.sdk as fireworks
from batches import batch, logprobs, losses
from fireworks_session import ADAM, MODEL, manager, trainer_at
from scenarios import ask

DATA = batch(fireworks)


def said_by(trainer: Any) -> list[list[float]]:
    return logprobs(trainer.forward(DATA, "cross_entropy").result())


def whole_weights() -> Any:
    """All weights, promoted while their trainer is cancelled and after its deletion."""
    trainer = trainer_at(ask("start", job="whole", base_model=MODEL, lora_rank=0), lora_rank=0)
    found: dict[str, Any] = {"losses": losses(trainer, fireworks.AdamParams(learning_rate=0.005), DATA, 3)}
    found["trained"] = said_by(trainer)
    found["paths"] = [trainer.save_weights_for_sampler_ext(name).path for name in ("to-promote", "difference")]

    found["cancelled"] = ask("cancel", job="whole")
    found["promoted"] = ask("promote", job="whole", model="while-cancelled", base_model=MODEL)
    found["deleted"] = ask("delete", job="whole")
    found["types"] = [one["checkpointType"] for one in manager.list_checkpoints("whole")]
    found["promoted_again"] = ask("promote", job="whole", model="weights-of-a-deleted-job", base_model=MODEL)
    return found


def adapter() -> Any:
    """An adapter of the weights that were promoted last: it is promoted while its trainer is paused, loaded on the
    resumed one, and promoted again after deletion."""
    base = f"accounts/{manager.account_id}/models/weights-of-a-deleted-job"
    trainer = trainer_at(ask("start", job="adapter", base_model=base, lora_rank=8), base_model=base)
    found: dict[str, Any] = {"base": said_by(trainer), "losses": losses(trainer, ADAM, DATA, 3)}
    found["trained"] = said_by(trainer)
    trainer.save_state("to-train-on").result()
    trainer.save_weights_for_sampler_ext("to-promote")

    found["paused"] = ask("pause", job="adapter")
    found["promoted"] = ask("promote", job="adapter", model="while-paused", base_model=base)
    other = trainer_at(ask("resume", job="adapter"), base_model=base, seed=9)
    found["untrained"] = said_by(other)
    other.load_adapter(found["promoted"]["name"]).result()
    found["loaded"] = said_by(other)

    found["deleted"] = ask("delete", job="adapter")
    found["promoted_again"] = ask("promote", job="adapter", model="adapter-of-a-deleted-job", base_model=base)
    return found
