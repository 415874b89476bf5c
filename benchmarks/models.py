"""Models of random weights, in the shapes that benchmarks train."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SHARDS = 16
"""Files of weights, which are made and written at the same time."""
_DEVIATION = 0.02
"""Of weights, as transformers initializes them."""


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
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    _write_weights(
        directory, {name: each for name, each in model.state_dict().items() if name not in tied}, device=device
    )
    if device == "cuda":
        torch.cuda.empty_cache()
    return directory


def _write_weights(directory: Path, like: Mapping[str, torch.Tensor], *, device: str) -> None:
    """Random weights of these shapes: several files at once, as one writer would take a minute for a large model."""
    import torch
    from safetensors.torch import save_file

    shards: list[list[str]] = [[] for _ in range(min(_SHARDS, len(like)))]
    sizes = [0] * len(shards)
    for name in sorted(like, key=lambda name: -like[name].nbytes):
        smallest = sizes.index(min(sizes))
        shards[smallest].append(name)
        sizes[smallest] += like[name].nbytes
    seeds = {name: seed for seed, name in enumerate(like)}
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]

    def made(name: str) -> torch.Tensor:
        empty = torch.empty_like(like[name], device=device)
        if name.endswith("norm.weight"):
            return empty.fill_(1).cpu()
        return empty.normal_(0, _DEVIATION, generator=torch.Generator(device).manual_seed(seeds[name])).cpu()

    def write(file: str, names: list[str]) -> None:
        save_file({name: made(name) for name in names}, directory / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(len(shards)) as pool:
        list(pool.map(write, files, shards))
    index = {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {name: file for file, names in zip(files, shards, strict=True) for name in names},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
