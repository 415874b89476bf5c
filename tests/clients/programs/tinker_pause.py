"""A trainer of `tinker` that is paused while passes are under way."""

import re
from typing import Any

import tinker
from batches import batch, datum, losses, sequence
from scenarios import ask, main, raised
from tinker_session import ADAM, new_trainer

PASSES = 20
LONG = [datum(tinker, sequence(index, 400)) for index in range(16)]
"""A pass over it takes some tenths of a second."""


def sent(model: Any, count: int) -> list[Any]:
    return [model.forward_backward(LONG, "cross_entropy") for _ in range(count)]


def paused() -> Any:
    """Each pass is done, and what it adds is in the saved state, or it fails and says where that is."""
    straight = new_trainer()
    uninterrupted = losses(straight, ADAM, batch(tinker), 2)
    uninterrupted += [passed.result().metrics["loss:sum"] for passed in sent(straight, PASSES)]
    straight.optim_step(ADAM).result()
    uninterrupted += losses(straight, ADAM, batch(tinker), 2)

    model = new_trainer()
    interrupted = losses(model, ADAM, batch(tinker), 2)
    passes = sent(model, PASSES)
    interrupted.append(passes[0].result().metrics["loss:sum"])
    ask("pause the trainer")
    errors = []
    for passed in passes[1:]:
        try:
            interrupted.append(passed.result(timeout=300).metrics["loss:sum"])
        except tinker.RequestFailedError as error:
            errors.append({"message": str(error), "category": str(error.category)})
    ask("wait until it is paused")
    later = raised(lambda: model.optim_step(ADAM).result(timeout=300))
    path = re.search(r"tinker://\S+/weights/[\w-]+", errors[-1]["message"])[0]
    waiting = raised(lambda: tinker.ServiceClient().create_training_client_from_state_with_optimizer(path))
    ask("resume the trainer")
    again = tinker.ServiceClient().create_training_client_from_state_with_optimizer(path)
    interrupted += [passed.result().metrics["loss:sum"] for passed in sent(again, len(errors))]
    again.optim_step(ADAM).result()
    interrupted += losses(again, ADAM, batch(tinker), 2)
    return {
        "passes": PASSES,
        "uninterrupted": uninterrupted,
        "interrupted": interrupted,
        "errors": errors,
        "later": later,
        "waiting": waiting,
        "path": path,
    }


main(paused)
