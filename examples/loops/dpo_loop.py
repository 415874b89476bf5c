"""Preferences with a loss of your own (DPO): the model learns to tell right answers from those to other questions.

The loss is computed here, on log-probabilities that the trainer sends; the trainer gets its gradients back. See
sft_loop.py for how to start the server.

    python examples/loops/dpo_loop.py      # with `pip install tinker torch`
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import tinker
import torch
from tokenizers import Tokenizer

EXAMPLES = Path(__file__).parents[1]
BETA = 0.5
"""How far the model may move away from what it was at first."""


def main() -> None:
    """Train, and print the loss of every step and how often the right answer is preferred."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny", help="what the server calls the model")
    parser.add_argument("--tokenizer", type=Path, default=EXAMPLES / "models" / "tiny" / "tokenizer.json")
    parser.add_argument("--data", type=Path, default=EXAMPLES / "data" / "questions.jsonl")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pairs", type=int, default=8, help="in each step")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    options = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    conversations = [json.loads(line)["messages"] for line in options.data.read_text().splitlines()]
    chance = random.Random(0)
    trainer = tinker.ServiceClient().create_lora_training_client(base_model=options.model, rank=16, seed=0)

    # Right and wrong answers in turn, with what the untrained model makes of them.
    data: list[tinker.Datum] = []
    for question, answer in conversations[: 4 * options.pairs]:
        _, other = chance.choice(conversations)
        data += [to_datum(tokenizer, question, answer), to_datum(tokenizer, question, other)]
    before = [out["logprobs"].to_torch() for out in trainer.forward(data, "cross_entropy").result().loss_fn_outputs]
    reference = torch.stack([answer_logprob(datum, logprobs) for datum, logprobs in zip(data, before, strict=True)])

    for step in range(options.steps):
        pairs = chance.sample(range(len(data) // 2), options.pairs)
        rows = [row for pair in pairs for row in (2 * pair, 2 * pair + 1)]

        def preference(
            batch: list[tinker.Datum], logprobs: list[torch.Tensor], baseline: torch.Tensor = reference[rows]
        ) -> tuple[torch.Tensor, dict[str, float]]:
            now = torch.stack([answer_logprob(datum, each) for datum, each in zip(batch, logprobs, strict=True)])
            right, wrong = (now - baseline).reshape(-1, 2).unbind(1)
            loss = -torch.nn.functional.logsigmoid(BETA * (right - wrong)).mean()
            return loss, {"preferred": (right > wrong).float().mean().item()}

        passed = trainer.forward_backward_custom([data[row] for row in rows], preference)
        stepped = trainer.optim_step(tinker.AdamParams(learning_rate=options.learning_rate))
        metrics = passed.result().metrics
        print(f"step {step} loss {metrics['loss:sum']:.4f} preferred {metrics['preferred']:.2f}", flush=True)
        stepped.result()


def answer_logprob(datum: tinker.Datum, logprobs: torch.Tensor) -> torch.Tensor:
    """The log-probability of a whole answer."""
    return (logprobs * datum.loss_fn_inputs["weights"].to_torch()).sum()


def to_datum(tokenizer: Tokenizer, question: dict[str, str], answer: dict[str, str]) -> tinker.Datum:
    """A question with an answer; the weights say which tokens are the answer's."""
    prompt = tokenizer.encode(f"<|user|>{question['content']}<|assistant|>").ids
    reply = tokenizer.encode(f"{answer['content']}<|endoftext|>").ids
    tokens = prompt + reply
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(reply)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


if __name__ == "__main__":
    main()
