"""Batches for either client, whose types have the same names."""

from types import ModuleType
from typing import Any

WORDS = 37
"""How many tokens there are; the first four are special."""


def sequence(index: int, length: int = 12) -> list[int]:
    """Tokens in which each says which comes next, from one of several places."""
    return [4 + (index * 5 + 3 * position) % (WORDS - 4) for position in range(length)]


def datum(client: ModuleType, tokens: list[int]) -> Any:
    """A sequence whose every token is learned, but the first two."""
    weights = [0.0] + [1.0] * (len(tokens) - 2)
    return client.Datum(
        model_input=client.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def batch(client: ModuleType, size: int = 4, *, start: int = 0) -> list[Any]:
    """Some sequences."""
    return [datum(client, sequence(index)) for index in range(start, start + size)]


def logprobs(output: Any) -> list[list[float]]:
    """What a pass has to say of each token of each sequence."""
    return [[float(value) for value in row["logprobs"].data] for row in output.loss_fn_outputs]


def losses(trainer: Any, adam: Any, data: list[Any], steps: int) -> list[float]:
    """Train, waiting for every step."""
    found = []
    for _ in range(steps):
        found.append(float(trainer.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]))
        trainer.optim_step(adam).result()
    return found
