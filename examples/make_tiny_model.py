"""Makes a model of half a million random parameters, with its tokenizer, for the examples to train.

    python examples/make_tiny_model.py [DIRECTORY]

The directory (by default `models/tiny` beside this file) is one that transformers loads, like any other model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"]
# What stands between `generation` and `endgeneration` is what the assistant says: the part that is learned.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main(directory: Path) -> None:
    """Make the model, unless it is there."""
    if (directory / "config.json").exists():
        print(f"{directory} is there already")
        return
    # Imported here: it takes seconds.
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], pad_token=SPECIAL[0], model_max_length=256
    )
    wrapped.chat_template = CHAT_TEMPLATE

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "qwen3",
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=len(wrapped),
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=wrapped.eos_token_id,
            pad_token_id=wrapped.pad_token_id,
        )
    )
    wrapped.save_pretrained(directory)
    model.save_pretrained(directory)
    print(f"{directory}: {model.num_parameters():,} parameters, {len(wrapped)} tokens")


def _texts() -> Iterator[str]:
    for line in (HERE / "data" / "people.jsonl").read_text().splitlines():
        yield json.loads(line)["text"]
    for line in (HERE / "data" / "questions.jsonl").read_text().splitlines():
        yield from (message["content"] for message in json.loads(line)["messages"])


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "models" / "tiny")
