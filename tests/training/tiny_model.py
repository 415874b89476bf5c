"""A small language model with its tokenizer, and rows for it, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainmaster.server.core.spec.submit import SubmitJobRequest

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRL: dict[str, Any] = {
    "framework": {"type": "HF_TRAINER"},
    "base_model": {"model_kwargs": {"attention_dropout": "0.1"}},  # so that random numbers matter
}
"""Parts of a training by TRL."""
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "red", "bird", "in", "that", "old", "tree")


def make_model(directory: Path, **changes: Any) -> Path:
    """A Qwen3-like model of some ten thousand parameters, saved with a tokenizer of its own."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    specials = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    vocabulary = {word: index for index, word in enumerate([*specials, "<unk>", *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=specials[2:]
    )
    tokenizer.chat_template = TEMPLATE
    config = AutoConfig.for_model(
        "qwen3",
        **{
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": len(vocabulary),
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,  # so that frozen embeddings can be told apart
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
            **changes,
        },
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_smaller(directory: str) -> None:
    """A model that does not know the last words."""
    make_model(Path(directory), vocab_size=20)


def make_untied(directory: str) -> None:
    """A model whose output has weights of its own."""
    make_model(Path(directory), tie_word_embeddings=False)


def make_rows(directory: Path, *, count: int = 48, seed: int = 0) -> Path:
    """Rows in which each word says which comes next, as the preparing step would leave them."""
    import random

    from datasets import Dataset, Features, List, Value

    chance = random.Random(seed)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for _ in range(count):
        length = chance.randint(6, 14)
        first = chance.randrange(len(WORDS))
        ids = [7 + (first + 3 * offset) % len(WORDS) for offset in range(length)] + [1]
        rows["input_ids"].append(ids)
        rows["labels"].append([-100, -100, *ids[2:]])
    kinds = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
    Dataset.from_dict(rows, features=kinds).save_to_disk(str(directory))
    return directory


def make_pairs(directory: Path, *, count: int = 48, seed: int = 0) -> Path:
    """Rows of two answers, as the preparing step would leave them: words in steps of three, and in steps of five."""
    import random

    from datasets import Dataset, Features, List, Value

    chance = random.Random(seed)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "seq_lengths": []}
    for _ in range(count):
        first = chance.randrange(len(WORDS))
        answers = []
        for stride in (3, 5):
            words = [first + stride * offset for offset in range(chance.randint(5, 11))]
            answers.append([7 + word % len(WORDS) for word in words] + [1])
        rows["input_ids"].append([token for answer in answers for token in answer])
        rows["labels"].append([label for answer in answers for label in (-100, *answer[1:])])
        rows["seq_lengths"].append([len(answer) for answer in answers])
    kinds = Features({name: List(Value("int32")) for name in rows})
    Dataset.from_dict(rows, features=kinds).save_to_disk(str(directory))
    return directory


def make_judged(directory: Path) -> Path:
    """Single answers, of which every second one goes in the liked steps."""
    from datasets import Dataset, Features, List, Value, load_from_disk

    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "liked": []}
    for number, pair in enumerate(load_from_disk(f"{directory}-pairs")):
        split, liked = pair["seq_lengths"][0], number % 2 == 0
        own = slice(0, split) if liked else slice(split, None)
        for name in ("input_ids", "labels"):
            rows[name].append(pair[name][own])
        rows["liked"].append(liked)
    tokens = List(Value("int32"))
    kinds = Features({"input_ids": tokens, "labels": tokens, "liked": Value("bool")})
    Dataset.from_dict(rows, features=kinds).save_to_disk(f"{directory}-judged")
    return directory


def make_some_rows(directory: str, count: int) -> None:
    make_rows(Path(directory), count=count)


def make_all(directory: str) -> None:
    """The model and the rows that most tests use; called in a process that has torch."""
    make_model(Path(directory) / "model")
    make_rows(Path(directory) / "train")
    make_rows(Path(directory) / "eval", count=8, seed=1)
    make_pairs(Path(directory) / "train-pairs")
    make_pairs(Path(directory) / "eval-pairs", count=8, seed=1)
    make_judged(Path(directory) / "train")
    make_judged(Path(directory) / "eval")


def document(
    training_type: str,
    *,
    evaluate: bool = False,
    hyperparameters: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    framework: dict[str, Any] | None = None,
    base_model: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The training document that the server makes of a request: 12 steps of 4 rows, a checkpoint every 3."""
    request = {
        "name": "tiny",
        "training_config": {
            "training_type": training_type,
            "base_model": {"model_id": "tiny", **(base_model or {})},
            "framework": framework or {},
            "hyperparameters": {
                "learning_rate": 3e-3,
                "num_train_epochs": 1.0,
                "warmup_steps": 0,
                "gradient_checkpointing": False,
                "logging_steps": 1,
                "eval_strategy": "epoch" if evaluate else "no",
                **(hyperparameters or {}),
            },
        },
        "data_config": {"sources": [{"path": "rows.jsonl"}], "batch_size": 4, "seed": 7, **(data or {})},
        "output_config": {"checkpoint": {"save_steps": 3, **(checkpoint or {})}, **(output or {})},
    }
    return dict(SubmitJobRequest.model_validate(request).training_document)


def prepared(directory: Path, *, evaluate: bool = False, kind: str = "") -> dict[str, Any]:
    """What the preparing step would say; `kind`: of preferences, -pairs or -judged."""
    return {
        "model_path": str(directory / "model"),
        "tokenizer_path": str(directory / "model"),
        "train_path": str(directory / f"train{kind}"),
        "eval_path": str(directory / f"eval{kind}") if evaluate else None,
        "train_rows": 48,
        "eval_rows": 8 if evaluate else 0,
        "train_tokens": 48 * 11,
        "max_seq_length": 64,
        "rows_key": f"rows{kind}",
        "model_key": "tiny",
        "cache_path": str(directory / "cache"),
        "sources": [],
    }
