"""A client of `tinker` that is stopped like a laptop that sleeps, with work that it has not saved."""

import os
import re
from typing import Any

import tinker
from batches import batch, losses
from scenarios import ask, main, raised
from tinker_session import ADAM, new_trainer


def slept() -> Any:
    """It wakes without its model, and goes on from what it is told of."""
    straight = new_trainer()
    uninterrupted = losses(straight, ADAM, batch(tinker), 5)

    model = new_trainer()
    interrupted = losses(model, ADAM, batch(tinker), 2)
    interrupted.append(model.forward_backward(batch(tinker), "cross_entropy").result().metrics["loss:sum"])
    saved = ask("put me to sleep until it is saved", pid=os.getpid(), model_id=model.model_id)
    woken = raised(lambda: model.optim_step(ADAM).result(timeout=300))
    path = re.search(r"tinker://\S+/weights/[\w-]+", woken["message"])[0]
    again = tinker.ServiceClient().create_training_client_from_state_with_optimizer(path)
    again.optim_step(ADAM).result()
    interrupted += losses(again, ADAM, batch(tinker), 2)
    return {"uninterrupted": uninterrupted, "interrupted": interrupted, "woken": woken, "saved": saved}


main(slept)
