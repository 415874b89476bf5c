"""Models of random weights, in the shapes that benchmarks train."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and how it is trained."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    batch: dict[str, int]
    """By training type."""
    steps: dict[str, int]
    """`first`, `last` and `every` of its plans."""
    checkpointing: frozenset[str]
    """The training types that need gradient checkpointing to fit."""
    dtype: str = "bfloat16"
    settled: dict[str, int] = dataclasses.field(default_factory=dict)
    """By training type, the step from which on it is timed, where that is later than `steps` says: a job gets the
    memory for its first save while it trains, which for many weights and their moments takes a while."""


SMALL = Shape(
    name="0.6B",
    layers=28,
    hidden=1024,
    intermediate=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
    batch={"LORA": 8, "FULL_FINETUNE": 8},
    steps={"first": 10, "last": 30, "every": 5},
    checkpointing=frozenset(),
)
LARGE = Shape(
    name="8B",
    layers=36,
    hidden=4096,
    intermediate=12_288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
    batch={"LORA": 4, "FULL_FINETUNE": 2},
    steps={"first": 10, "last": 30, "every": 5},
    checkpointing=frozenset({"LORA", "FULL_FINETUNE"}),
    # 48 GB are to be saved.
    settled={"FULL_FINETUNE": 30},
)


def make_model(directory: Path, shape: Shape) -> Path:
    """A model of random weights with a tokenizer, as transformers writes it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # One token for each letter: a text has as many tokens as it has letters.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    wrapped.save_pretrained(directory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.layers <= 28,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=wrapped.pad_token_id,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(directory)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return directory
