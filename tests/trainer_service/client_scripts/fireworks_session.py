"""What a user of `fireworks.training.sdk` does with a trainer, told as JSON: run in an environment of its own."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from fireworks.training.sdk import FiretitanServiceClient, types

BASE_MODEL = "stub/model"
ADAM = types.AdamParams(learning_rate=1e-3)


def client_at(url: str, lora_rank: int = 8) -> Any:
    service = FiretitanServiceClient(base_url=url, api_key="fw_test")
    return service.create_training_client(base_model=BASE_MODEL, lora_rank=lora_rank)


def datum(tokens: int, target: int = 3) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1] * tokens),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[target] * tokens, dtype="int64", shape=[tokens]),
            "weights": types.TensorData(data=[1.0] * tokens, dtype="float32", shape=[tokens]),
        },
    )


def training(url: str) -> dict[str, Any]:
    client = client_at(url)
    futures = [
        (client.forward_backward([datum(4)], "cross_entropy"), client.optim_step(ADAM, "num_loss_tokens"))
        for _ in range(3)
    ]
    losses = [forward_backward.result().metrics["loss:sum"] for forward_backward, _ in futures]
    futures[-1][1].result()
    forward = client.forward([datum(2), datum(3)], "cross_entropy").result()
    path = client.save_state("step-3").result().path
    sampler = client.save_weights_for_sampler("step-3").result().path
    client.optim_step(ADAM).result()
    client.load_state(path).result()
    after = client.forward_backward([datum(4)], "cross_entropy").result().metrics
    adapter = client.load_adapter("accounts/a/models/x").result()
    return {
        "losses": losses,
        "forward": [list(output["logprobs"].data) for output in forward.loss_fn_outputs],
        "path": path,
        "sampler": sampler,
        "checkpoints": client.list_checkpoints(),
        "after": after["steps_before:max"],
        "adapter": adapter.adapter_path,
        "unloaded": client.unload_model().result().model_id == client.model_id,
    }


def slow(url: str) -> dict[str, Any]:
    """One thing after the other, each waited for; with what the client warned of meanwhile."""
    warnings: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(listener)
    client = client_at(url)
    found = []
    for _ in range(2):
        passed = client.forward_backward([datum(4)], "cross_entropy").result()
        found.append([passed.metrics["loss:sum"], client.optim_step(ADAM).result().metrics["steps"]])
    return {"found": found, "warnings": warnings}


def chunks(url: str) -> dict[str, Any]:
    client = client_at(url)
    data = [datum(1, target=number % 7) for number in range(2500)]
    calls = [client.forward_backward(data, "cross_entropy") for _ in range(2)]
    step = client.optim_step(ADAM)
    results = [call.result() for call in calls]
    return {
        "logprobs": [[output["logprobs"].data[0] for output in result.loss_fn_outputs] for result in results],
        "step": step.result().metrics,
    }


def errors(url: str) -> dict[str, Any]:
    client = client_at(url)
    told: dict[str, Any] = {}
    try:
        client.load_state("none").result()
    except Exception as error:
        told["load"] = str(error)
    told["after"] = client.optim_step(ADAM).result().metrics
    return told


if __name__ == "__main__":
    # One case after the other, each at a URL of its own.
    for case, url in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        print(json.dumps(globals()[case](url)), flush=True)
    # Clients leave threads behind, which may abort an interpreter that ends under them.
    os._exit(0)
