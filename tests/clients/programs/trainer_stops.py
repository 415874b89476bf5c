"""Trainers of `fireworks-ai` that are stopped with models in them, and go on as if nothing had been."""

import os
import time
from datetime import timedelta
from typing import Any

import fireworks.training.sdk as fireworks
import httpx
from batches import batch, losses
from scenarios import ask, main, raised

URL = os.environ["FIREWORKS_BASE_URL"]
KEY = os.environ["FIREWORKS_API_KEY"]
MODEL = "accounts/fireworks/models/qwen3-8b"
ADAM = fireworks.AdamParams(learning_rate=0.02)
FIRST, SECOND = batch(fireworks), batch(fireworks, 6, start=8)

UNUSED_S = 6.0
IN_USE_S = 7.5
"""Longer than a trainer may be unused."""

manager = fireworks.TrainerJobManager(api_key=KEY, base_url=URL)
PATIENCE = {"poll_interval_s": 0.2, "timeout_s": 120}


def model_on(endpoint: Any, **options: Any) -> Any:
    service = fireworks.FiretitanServiceClient(base_url=endpoint.base_url, api_key=KEY)
    return service.create_training_client(base_model=MODEL, **{"lora_rank": 8, "seed": 1, **options})


def half_a_step(model: Any) -> list[float]:
    """Two steps, and the first of two passes that belong to the third: its gradients wait for the second."""
    return [*losses(model, ADAM, FIRST, 2), loss(model, FIRST)]


def rest(model: Any) -> list[float]:
    """The second pass, the step, and two steps more."""
    second = loss(model, SECOND)
    model.optim_step(ADAM).result()
    return [second, *losses(model, ADAM, FIRST, 2)]


def loss(model: Any, data: list[Any]) -> float:
    return float(model.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])


def saved(job_id: str, model: Any) -> str:
    """What there is of a model, by the name that it gets when its trainer has to stop."""
    names = [one["name"].rpartition("/")[2] for one in manager.list_checkpoints(job_id)]
    [found] = [name for name in names if name.startswith(model.model_id.replace(":", "-"))]
    return found


def unused() -> Any:
    """A trainer with two models that nobody uses: not while there is a heartbeat or a request now and then."""
    config = fireworks.TrainerJobConfig(
        base_model=MODEL,
        requested_job_id="unused",
        lora_rank=8,
        training_shape_ref="accounts/fireworks/trainingShapes/cpu/versions/1",
        inactivity_timeout=timedelta(seconds=UNUSED_S),
    )
    endpoint = manager.create_and_wait(config, **PATIENCE)
    straight = model_on(endpoint)
    uninterrupted = half_a_step(straight) + rest(straight)
    other_straight = model_on(endpoint, lora_rank=4, seed=2)
    other_uninterrupted = losses(other_straight, ADAM, SECOND, 3)
    for model in (straight, other_straight):
        model.unload_model().result()
    model, other = model_on(endpoint), model_on(endpoint, lora_rank=4, seed=2)
    before, other_before = half_a_step(model), losses(other, ADAM, SECOND, 1)

    headers = {"X-API-Key": KEY}
    beats = f"{endpoint.base_url}/api/v1/session_heartbeat"
    session = {"session_id": model.holder.get_session_id()}
    for use in (
        lambda: httpx.post(beats, json=session, headers=headers).raise_for_status(),
        lambda: other.forward(SECOND, "cross_entropy").result(),
    ):
        until = time.monotonic() + IN_USE_S
        while time.monotonic() < until:
            use()
            time.sleep(0.3)
    in_use = manager.get("unused")["state"]

    parked = ask("wait until it is parked", job="unused")
    found = {
        "in_use": in_use,
        "parked": parked,
        "state": manager.get("unused")["state"],
        "saved": [saved("unused", model), saved("unused", other)],
        "errors": [raised(lambda: loss(model, SECOND)), raised(lambda: loss(other, SECOND))],
    }
    endpoint = manager.resume_and_wait("unused", **PATIENCE)
    again, other_again = model_on(endpoint, seed=9), model_on(endpoint, lora_rank=4, seed=9)
    again.load_state_with_optimizer(found["saved"][0]).result()
    other_again.load_state_with_optimizer(found["saved"][1]).result()
    found |= {
        "uninterrupted": uninterrupted,
        "interrupted": before + rest(again),
        "other_uninterrupted": other_uninterrupted,
        "other_interrupted": other_before + losses(other_again, ADAM, SECOND, 2),
    }
    manager.delete("unused")
    return found


def preempted() -> Any:
    """A trainer of two ranks whose GPUs another job takes; it is there already, and nobody has used it so far."""
    endpoint = manager.wait_for_existing("two-ranks", **PATIENCE)
    straight = model_on(endpoint)
    uninterrupted = half_a_step(straight) + rest(straight)
    straight.unload_model().result()
    model = model_on(endpoint)
    before = half_a_step(model)
    ask("take its GPUs", job="two-ranks")
    found = {
        "job": manager.get("two-ranks"),
        "error": raised(lambda: loss(model, SECOND)),
        "saved": saved("two-ranks", model),
    }
    endpoint = manager.reconnect_and_wait("two-ranks", **PATIENCE)
    again = model_on(endpoint, seed=9)
    again.load_state_with_optimizer(found["saved"]).result()
    return found | {"uninterrupted": uninterrupted, "interrupted": before + rest(again)}


main(unused, preempted)
