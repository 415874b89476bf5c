"""Reinforcement learning as a loop of your own (GRPO): the model learns to say words with the letter `e` in them.

Answers to one question are sampled as a group; what is better than its group's mean becomes likelier. See sft_loop.py
for how to start the server.

    python examples/loops/grpo_loop.py
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import tinker
from tokenizers import Tokenizer

EXAMPLES = Path(__file__).parents[1]


def main() -> None:
    """Train, and print the mean reward of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny", help="what the server calls the model")
    parser.add_argument("--tokenizer", type=Path, default=EXAMPLES / "models" / "tiny" / "tokenizer.json")
    parser.add_argument("--data", type=Path, default=EXAMPLES / "data" / "questions.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--questions", type=int, default=4, help="in each step")
    parser.add_argument("--group-size", type=int, default=16, help="answers to each question")
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    options = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    rows = [json.loads(line) for line in options.data.read_text().splitlines()]
    prompts = [tokenizer.encode(f"<|user|>{row['messages'][0]['content']}<|assistant|>").ids for row in rows]
    trainer = tinker.ServiceClient().create_lora_training_client(base_model=options.model, rank=16, seed=0)

    for step in range(options.steps):
        sampler = trainer.save_weights_and_get_sampling_client()  # the weights as they are now
        asked = [prompts[(step * options.questions + index) % len(prompts)] for index in range(options.questions)]
        sampled = [
            sampler.sample(
                tinker.ModelInput.from_ints(prompt),
                num_samples=options.group_size,
                sampling_params=tinker.SamplingParams(max_tokens=8, temperature=1.0, seed=step),
            )
            for prompt in asked
        ]
        batch: list[tinker.Datum] = []
        rewards: list[float] = []
        for prompt, group in zip(asked, sampled, strict=True):
            answers = group.result().sequences
            scores = [reward(tokenizer, answer.tokens) for answer in answers]
            rewards += scores
            spread = statistics.pstdev(scores) or 1.0
            for answer, score in zip(answers, scores, strict=True):
                batch.append(to_datum(prompt, answer, (score - statistics.fmean(scores)) / spread))
        passed = trainer.forward_backward(batch, "importance_sampling")
        stepped = trainer.optim_step(tinker.AdamParams(learning_rate=options.learning_rate, grad_clip_norm=1.0))
        passed.result()
        stepped.result()
        print(f"step {step} reward {statistics.fmean(rewards):.4f}", flush=True)


def reward(tokenizer: Tokenizer, tokens: list[int]) -> float:
    """The share of tokens that have the letter."""
    return sum("e" in tokenizer.decode([token]) for token in tokens) / max(len(tokens), 1)


def to_datum(prompt: list[int], answer: tinker.SampledSequence, advantage: float) -> tinker.Datum:
    """A question with a sampled answer; the question's tokens have no advantage, and so are not learned."""
    tokens = prompt + answer.tokens
    unlearned = [0.0] * (len(prompt) - 1)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": unlearned + list(answer.logprobs or ()),
            "advantages": unlearned + [advantage] * len(answer.tokens),
        },
    )


if __name__ == "__main__":
    main()
