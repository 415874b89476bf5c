"""What a backward pass is said to take, and what follows from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tiny_models import make_checkpoint

from trainmaster.engine.config import ModelConfig
from trainmaster.engine.engine import Engine
from trainmaster.engine.memory import PassMemory, check_memory, memory_of
from trainmaster.engine.passes import check_pass
from trainmaster.engine.types import Datum, EngineError, LoraOptions, Pass, Trained

QWEN3_8B = ModelConfig.of(
    {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40_960,
    },
    Path("config.json"),
)
GIB = 2**30


@pytest.fixture
def memory() -> PassMemory:
    return PassMemory.of(QWEN3_8B, bytes_each=2, rank=32, gradients=350_000_000)


def test_more_layers_are_computed_again_the_less_memory_there_is(memory: PassMemory) -> None:
    lengths = [4096, 4096]
    everything = memory.needed(lengths, 0)
    assert memory.recomputed(lengths, everything) == 0
    found = [memory.recomputed(lengths, int(share * everything)) for share in (0.9, 0.7, 0.5, 0.3)]
    assert found == sorted(found)
    assert 0 < found[0] < found[-1] < memory.layers
    for share, count in zip((0.9, 0.7, 0.5, 0.3), found, strict=True):
        assert memory.needed(lengths, count) <= share * everything < memory.needed(lengths, count - 1)
    assert memory.recomputed(lengths, 0) == memory.layers


def test_8b_model_keeps_what_its_layers_read(memory: PassMemory) -> None:
    hidden, keys, inner = 4096, 1024, 12_288
    heads = 3 * hidden + 3 * keys  # before and after their norms, and values; and what attention gives
    assert memory.kept == 2 * (4 * hidden + heads + 3 * inner + 7 * 32) + 4 * 32
    assert 40 * GIB < memory.needed([8192], 0) < 46 * GIB
    assert 60 * GIB < memory.needed([131_072], 36) < 80 * GIB


def test_plain_attention_grows_with_the_square(memory: PassMemory) -> None:
    softcapped = PassMemory.of(dataclasses.replace(QWEN3_8B, attention_softcap=50.0), bytes_each=2)
    assert softcapped.needed([8192], 0) > 3 * softcapped.needed([1024] * 8, 0)
    assert memory.needed([8192], 0) == memory.needed([1024] * 8, 0)


def test_sequence_that_cannot_fit_is_refused_with_numbers(memory: PassMemory) -> None:
    memory.check("datum 3", 100_000, 60 * GIB)
    with pytest.raises(EngineError) as refused:
        memory.check("datum 3", 150_000, 60 * GIB)
    said = str(refused.value)
    assert said.startswith("datum 3 has 150,000 tokens: its backward pass needs 8")
    assert "even if every layer is computed again, and 60.0 GiB are free" in said
    longest = int(said.rpartition("up to ")[2].split()[0].replace(",", ""))
    memory.check("datum 3", longest, 60 * GIB)
    with pytest.raises(EngineError):
        memory.check("datum 3", longest + 1, 60 * GIB)


def test_pass_is_checked_by_its_longest_sequence(tmp_path: Path) -> None:
    engine = Engine(make_checkpoint(tmp_path))
    engine.create_model("m", Trained.ADAPTER, LoraOptions(rank=4))
    model = engine.models["m"]
    data = tuple(Datum(tokens=np.arange(length), inputs={"target_tokens": np.arange(length)}) for length in (3, 90, 40))
    request = Pass(model_id="m", data=data, loss="cross_entropy")
    checked = check_pass(request, model, vocabulary=272, context=100)
    enough = memory_of([model]).needed([90], engine.config.num_layers)
    check_memory(checked, enough)
    with pytest.raises(EngineError, match=r"datum 1 has 90 tokens: .* up to 89 tokens"):
        check_memory(checked, enough - 1)
