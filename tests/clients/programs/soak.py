"""One client among several: trains an adapter of its own, samples from it, and tells what it saw."""

from __future__ import annotations

import json
import sys

import tinker
from tinker import types

BASE_MODEL = "Qwen/Qwen3-8B"
STEPS = 12
VOCABULARY = 24


def main(number: int) -> None:
    # Leaving the block ends the session, which frees its models.
    with tinker.ServiceClient() as service:
        print(json.dumps(train_and_sample(service, number)))


def train_and_sample(service: tinker.ServiceClient, number: int) -> dict[str, list[object]]:
    client = service.create_lora_training_client(BASE_MODEL, rank=2 + number % 4, seed=number)
    # Each client's words follow each other at a distance of its own: another's result would show.
    words = [(start * (number + 1)) % VOCABULARY for start in range(25 + number)]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(words[:-1]),
            loss_fn_inputs={"target_tokens": words[1:], "weights": [1.0] * (len(words) - 1)},
        )
    ]
    adam = types.AdamParams(learning_rate=1e-2)
    futures = [(client.forward_backward(data, "cross_entropy"), client.optim_step(adam)) for _ in range(STEPS)]
    losses = [passed.result().metrics["loss:sum"] for passed, _ in futures]
    for _, stepped in futures:
        stepped.result()
    drawn = (
        client.save_weights_and_get_sampling_client()
        .sample(
            types.ModelInput.from_ints(words[:4]),
            num_samples=2,
            sampling_params=types.SamplingParams(max_tokens=8, seed=number, stop=[]),
        )
        .result()
    )
    return {"losses": losses, "samples": [list(each.tokens) for each in drawn.sequences]}


if __name__ == "__main__":
    main(int(sys.argv[1]))
