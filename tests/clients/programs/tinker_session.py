"""What every scenario of `tinker` begins with."""

from typing import Any

import tinker
from batches import sequence

MODEL = "Qwen/Qwen3-8B"
ADAM = tinker.AdamParams(learning_rate=0.02)


def new_trainer(service: tinker.ServiceClient | None = None, *, seed: int = 1, rank: int = 8) -> Any:
    service = service or tinker.ServiceClient()
    return service.create_lora_training_client(base_model=MODEL, rank=rank, seed=seed)


def prompt(length: int = 6) -> Any:
    return tinker.ModelInput.from_ints(sequence(0, length))


def sampled(sampler: Any, count: int = 1, **params: Any) -> list[dict[str, Any]]:
    wanted = tinker.SamplingParams(**{"max_tokens": 8, "temperature": 1.0, **params})
    answer = sampler.sample(prompt(), num_samples=count, sampling_params=wanted).result()
    return [
        {
            "tokens": list(one.tokens),
            "logprobs": [float(value) for value in one.logprobs],
            "stop_reason": str(getattr(one.stop_reason, "value", one.stop_reason)),
        }
        for one in answer.sequences
    ]
