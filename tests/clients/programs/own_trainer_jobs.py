"""Trains with `fireworks-ai` on trainers that the test starts and stops with our own client, and promotes from."""

from typing import Any

import fireworks.training.sdk as fireworks
from batches import batch, logprobs, losses
from fireworks_session import ADAM, MODEL, manager, trainer_at
from scenarios import ask, main

DATA = batch(fireworks)


def said_by(trainer: Any) -> list[list[float]]:
    return logprobs(trainer.forward(DATA, "cross_entropy").result())


def adapter() -> Any:
    """An adapter, promoted while its trainer is paused, loaded on the resumed one, promoted again after deletion."""
    trainer = trainer_at(ask("start", job="adapter", base_model=MODEL, lora_rank=8))
    found: dict[str, Any] = {"losses": losses(trainer, ADAM, DATA, 3), "trained": said_by(trainer)}
    trainer.save_state("to-train-on").result()
    trainer.save_weights_for_sampler_ext("to-promote")

    found["paused"] = ask("pause", job="adapter")
    found["promoted"] = ask("promote", job="adapter", model="while-paused")
    other = trainer_at(ask("resume", job="adapter"), seed=9)
    found["untrained"] = said_by(other)
    other.load_adapter(found["promoted"]["name"]).result()
    found["loaded"] = said_by(other)

    found["deleted"] = ask("delete", job="adapter")
    found["promoted_again"] = ask("promote", job="adapter", model="adapter-of-a-deleted-job")
    return found


def whole_weights() -> Any:
    """All weights, promoted while their trainer is cancelled and after its deletion; then trained on by another."""
    trainer = trainer_at(ask("start", job="whole", base_model=MODEL, lora_rank=0), lora_rank=0)
    found: dict[str, Any] = {"losses": losses(trainer, fireworks.AdamParams(learning_rate=0.005), DATA, 3)}
    found["trained"] = said_by(trainer)
    found["paths"] = [trainer.save_weights_for_sampler_ext(name).path for name in ("to-promote", "difference")]

    found["cancelled"] = ask("cancel", job="whole")
    found["promoted"] = ask("promote", job="whole", model="while-cancelled")
    found["deleted"] = ask("delete", job="whole")
    found["types"] = [one["checkpointType"] for one in manager.list_checkpoints("whole")]
    found["promoted_again"] = ask("promote", job="whole", model="weights-of-a-deleted-job")

    name = found["promoted_again"]["name"]
    next_one = trainer_at(ask("start", job="next", base_model=name, lora_rank=8), base_model=name)
    found["next"] = said_by(next_one)
    found["next_losses"] = losses(next_one, ADAM, DATA, 2)
    ask("delete", job="next")
    return found


if __name__ == "__main__":
    main(adapter, whole_weights)
