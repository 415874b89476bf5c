"""Supervised fine-tuning as a loop of your own: the model learns to answer questions, and is asked some in the end.

python examples/make_tiny_model.py
trainmaster up --model-alias tiny=examples/models/tiny
eval "$(trainmaster env)"
python examples/loops/sft_loop.py      # with `pip install tinker`, in any environment
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import tinker
from tokenizers import Tokenizer

EXAMPLES = Path(__file__).parents[1]


def main() -> None:
    """Train, and print the loss per token of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny", help="what the server calls the model")
    parser.add_argument("--tokenizer", type=Path, default=EXAMPLES / "models" / "tiny" / "tokenizer.json")
    parser.add_argument("--data", type=Path, default=EXAMPLES / "data" / "questions.jsonl")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    conversations = [json.loads(line)["messages"] for line in options.data.read_text().splitlines()]
    data = [to_datum(tokenizer, messages) for messages in conversations]
    trainer = tinker.ServiceClient().create_lora_training_client(base_model=options.model, rank=16, seed=0)

    chance = random.Random(0)
    for step in range(options.steps):
        batch = chance.sample(data, options.batch_size)
        # Both are sent before either has ended, so that the trainer never waits for this loop.
        passed = trainer.forward_backward(batch, "cross_entropy")
        stepped = trainer.optim_step(tinker.AdamParams(learning_rate=options.learning_rate))
        print(f"step {step} loss {loss_per_token(batch, passed.result()):.4f}", flush=True)
        stepped.result()

    print("saved", trainer.save_state("trained").result().path)
    sampler = trainer.save_weights_and_get_sampling_client()
    greedy = tinker.SamplingParams(max_tokens=16, temperature=0.0, stop=["<|endoftext|>"])
    for question, answer in conversations[:3]:
        prompt = tinker.ModelInput.from_ints(tokenizer.encode(asked(question)).ids)
        [said] = sampler.sample(prompt, num_samples=1, sampling_params=greedy).result().sequences
        print(f"{question['content']} {tokenizer.decode(said.tokens)} (right: {answer['content']})")


def asked(question: dict[str, str]) -> str:
    """A question, up to where the assistant's turn begins."""
    return f"<|user|>{question['content']}<|assistant|>"


def to_datum(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> tinker.Datum:
    """One conversation: each token says the next, and only what the assistant says is learned."""
    question, answer = messages
    prompt = tokenizer.encode(asked(question)).ids
    reply = tokenizer.encode(f"{answer['content']}<|endoftext|>").ids
    tokens = prompt + reply
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(reply),
        },
    )


def loss_per_token(batch: list[tinker.Datum], passed: tinker.ForwardBackwardOutput) -> float:
    """The mean of what a batch's learned tokens cost."""
    learned = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in batch)
    return passed.metrics["loss:sum"] / learned


if __name__ == "__main__":
    main()
