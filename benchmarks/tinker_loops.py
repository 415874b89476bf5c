"""What `service_tokens` has the public tinker client do: `python -m benchmarks.tinker_loops LOOP`, by the Python that
has it. Reads a document from its input, and writes what was measured.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import tinker
from tinker import types


def sft(asked: dict[str, Any]) -> dict[str, float]:
    """Steps over some batches in turn; the next step is submitted before the results of the last one are awaited."""
    trainer, adam = _trainer(asked)
    batches = [[_datum(row, weights=[1.0] * (len(row) - 1)) for row in rows] for rows in asked["batches"]]
    total = asked["warm_steps"] + asked["steps"]

    def submit(number: int) -> tuple[Any, Any]:
        batch = batches[number % len(batches)]
        return trainer.forward_backward(batch, "cross_entropy"), trainer.optim_step(adam)

    submitted, losses, done_at = deque([submit(0)]), [], []
    for number in range(1, total + 1):
        if number < total:
            submitted.append(submit(number))
        passed, stepped = submitted.popleft()
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
        done_at.append(time.perf_counter())
    return {"seconds": done_at[-1] - done_at[asked["warm_steps"] - 1], "first_loss": losses[0]}


def rl(asked: dict[str, Any]) -> dict[str, float]:
    """A short step to warm up, and one that counts: samples by the new weights, then one training step on them."""
    trainer, adam = _trainer(asked)
    measured: dict[str, float] = {}
    for step in asked["rl_steps"]:
        began = time.perf_counter()
        sampler = trainer.save_weights_and_get_sampling_client()
        saved_at = time.perf_counter()
        # Without ends, so that samples are as long as the engine's own.
        parameters = types.SamplingParams(max_tokens=step["max_tokens"], temperature=1.0, stop=[])
        futures = [
            sampler.sample(types.ModelInput.from_ints(prompt), asked["group_size"], parameters)
            for prompt in step["prompts"]
        ]
        results = [future.result() for future in futures]
        sampled_at = time.perf_counter()
        data = [
            _graded(prompt, sequence)
            for prompt, result in zip(step["prompts"], results, strict=True)
            for sequence in result.sequences
        ]
        made_at = time.perf_counter()
        passed, stepped = trainer.forward_backward(data, "importance_sampling"), trainer.optim_step(adam)
        passed.result(), stepped.result()
        measured = {
            "tokens": sum(len(sequence.tokens) for result in results for sequence in result.sequences),
            "saved_s": saved_at - began,
            "sampled_s": sampled_at - began,
            "trained_s": time.perf_counter() - made_at,
        }
    return measured


def _trainer(asked: dict[str, Any]) -> tuple[Any, Any]:
    service = tinker.ServiceClient(base_url=asked["url"], api_key=asked["key"])
    trainer = service.create_lora_training_client(asked["base_model"], rank=asked["rank"], train_unembed=False)
    return trainer, types.AdamParams(learning_rate=asked["learning_rate"])


def _graded(prompt: Sequence[int], sequence: Any) -> Any:
    before = [0.0] * (len(prompt) - 1)
    advantages = [*before, *[random.gauss(0, 1)] * len(sequence.tokens)]
    return _datum([*prompt, *sequence.tokens], logprobs=[*before, *sequence.logprobs], advantages=advantages)


def _datum(row: Sequence[int], **inputs: Sequence[float]) -> Any:
    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:], **inputs}
    )


if __name__ == "__main__":
    print(json.dumps({"sft": sft, "rl": rl}[sys.argv[1]](json.load(sys.stdin))), flush=True)
