"""A model of some ten thousand parameters, with a tokenizer and data sets under the names that public programs ask for.

Nothing here needs torch: the weights are random numbers in a file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

HUB_NAME = "Qwen/Qwen3-8B"
FIREWORKS_NAME = "accounts/fireworks/models/qwen3-8b"
COOKBOOK_NAME = "Qwen/Qwen3.5-9B-Base"
"""What tinker-cookbook's recipes train when they are not told otherwise."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
TEXT = "User : Assistant the cat sat on a mat and saw one red bird in that old tree how many birds are there"
ANSWERS = [f"\\boxed{{{digit}}}" for digit in range(10)]
"""One token each, so that a model that tries tokens at random is right now and then, and can learn to be."""
VOCABULARY = [*SPECIAL, *TEXT.split(), *ANSWERS]

LAYERS, HIDDEN, HEADS, KEY_HEADS, HEAD_SIZE, INNER = 2, 32, 4, 2, 8, 64
CONTEXT = 1024


def make_model(directory: Path) -> Path:
    """A directory that transformers loads as a Qwen3."""
    directory.mkdir(parents=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "vocab_size": len(VOCABULARY),
        "eos_token_id": 0,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(directory)
    return directory


def make_tokenizer(directory: Path) -> None:
    """A tokenizer of whole words."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(answer, normalized=False) for answer in ANSWERS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "unk_token": SPECIAL[3]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def make_hub(directory: Path) -> None:
    """Directories named like ids of the hub, which programs that run in here take for the real ones."""
    for name in (HUB_NAME, COOKBOOK_NAME):
        make_tokenizer(directory / name)
    conversations = directory / "HuggingFaceH4" / "no_robots"
    conversations.mkdir(parents=True)
    # Few different ones: each batch is like the last, so that what is learned shows in the next loss.
    rows = [{"messages": _conversation(index % 4)} for index in range(400)]
    _write(conversations / "train.jsonl", rows)
    _write(conversations / "test.jsonl", rows[:128])
    problems = directory / "openai" / "gsm8k"
    (problems / "main").mkdir(parents=True)
    files = [{"split": split, "path": f"main/{split}.jsonl"} for split in ("train", "test")]
    header = json.dumps({"configs": [{"config_name": "main", "data_files": files}]})
    (problems / "README.md").write_text(f"---\n{header}\n---\n")
    questions = [{"question": "how many birds are in the old tree", "answer": "#### 3"}] * 256
    _write(problems / "main" / "train.jsonl", questions)
    _write(problems / "main" / "test.jsonl", questions[:8])


def _conversation(index: int) -> list[dict[str, str]]:
    said = ("the cat sat on a mat", "one red bird saw the cat", "that old tree", "a bird in the tree")[index]
    return [{"role": "user", "content": f"how many are there : {said}"}, {"role": "assistant", "content": said}]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _weights() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    chance = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (0.2 * chance.standard_normal(shape)).astype(np.float32)

    def ones(size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.ones(size, np.float32)

    weights = {"model.embed_tokens.weight": random(len(VOCABULARY), HIDDEN), "model.norm.weight": ones(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": random(HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": random(KEY_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": random(KEY_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_SIZE),
            f"{prefix}.self_attn.q_norm.weight": ones(HEAD_SIZE),
            f"{prefix}.self_attn.k_norm.weight": ones(HEAD_SIZE),
            f"{prefix}.mlp.gate_proj.weight": random(INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": random(INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": random(HIDDEN, INNER),
        }
    return weights
