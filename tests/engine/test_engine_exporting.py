"""Exported weights, as PEFT and transformers load them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_checkpoint, random_tokens, reference

from trainmaster.engine import weight_files
from trainmaster.engine.engine import Engine
from trainmaster.engine.types import AdamOptions, Datum, EngineError, LoraOptions, Pass, Trained

TOKENS = random_tokens(40, seed=9)


def a_pass(model_id: str, seed: int = 0, *, backward: bool = True) -> Pass:
    random = np.random.default_rng(seed)
    datum = Datum(tokens=random.integers(0, 256, 30), inputs={"target_tokens": random.integers(0, 256, 30)})
    return Pass(model_id=model_id, data=(datum,), loss="cross_entropy", backward=backward)


def trained_engine(checkpoint: Path, trained: Trained, lora: LoraOptions | None, **options: Any) -> Engine:
    """With a model `m` that a few large steps took away from the base model."""
    engine = Engine(checkpoint, **options)
    engine.create_model("m", trained, lora)
    engine.create_model("base", Trained.NOTHING)
    for seed in range(4):
        engine.run([a_pass("m", seed)])
        engine.optim_step("m", AdamOptions(learning_rate=1e-2))
    return engine


def logprobs(engine: Engine, model_id: str) -> np.ndarray:
    """Of every token at every position of TOKENS."""
    targets = np.tile(np.arange(engine.config.vocab_size), (len(TOKENS), 1))
    datum = Datum(tokens=TOKENS.numpy(), inputs={"target_tokens": targets})
    [result] = engine.run([Pass(model_id=model_id, data=(datum,), loss="cross_entropy", backward=False)])
    assert not isinstance(result, EngineError)
    return result.outputs[0]["logprobs"]


def their_logprobs(model: Any) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = torch.log_softmax(model(TOKENS[None]).logits[0].float(), dim=-1).numpy()
    return found


OPTIONS = {
    "everything": LoraOptions(rank=4, seed=1),
    "attention": LoraOptions(rank=2, seed=1, alpha=5.0, train_mlp=False, train_unembed=False),
    "unembedding": LoraOptions(rank=3, seed=2, train_mlp=False, train_attn=False),
}

_EACH_ONCE = [
    ("qwen3", "everything"),
    ("qwen3", "unembedding"),  # which is tied
    ("llama", "unembedding"),
    ("gemma2", "attention"),
]
KINDS_AND_OPTIONS = [
    pytest.param(kind, what, marks=() if (kind, what) in _EACH_ONCE else pytest.mark.long)
    for kind in ("qwen3", "llama", "gemma2")
    for what in OPTIONS
]


@pytest.mark.parametrize(("kind", "what"), KINDS_AND_OPTIONS)
def test_adapter_loads_in_peft(tmp_path: Path, kind: str, what: str) -> None:
    import peft

    checkpoint = make_checkpoint(tmp_path / "base", kind)
    engine = trained_engine(checkpoint, Trained.ADAPTER, OPTIONS[what])
    engine.export(engine.snapshot("m"), tmp_path / "adapter", merged=False)
    with warnings.catch_warnings():
        # PEFT warns of adapted unembeddings that are tied; here they are what was trained.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        theirs = peft.PeftModel.from_pretrained(reference(checkpoint), tmp_path / "adapter")
    expected = their_logprobs(theirs)
    np.testing.assert_allclose(logprobs(engine, "m"), expected, rtol=1e-4, atol=2e-5)
    assert np.abs(expected - logprobs(engine, "base")).max() > 0.05


@pytest.mark.parametrize(("kind", "what"), KINDS_AND_OPTIONS)
def test_merged_model_loads_in_transformers(tmp_path: Path, kind: str, what: str) -> None:
    from transformers import AutoTokenizer

    checkpoint = make_checkpoint(tmp_path / "base", kind)
    engine = trained_engine(checkpoint, Trained.ADAPTER, OPTIONS[what])
    engine.export(engine.snapshot("m"), tmp_path / "merged", merged=True)
    theirs = reference(tmp_path / "merged")
    np.testing.assert_allclose(logprobs(engine, "m"), their_logprobs(theirs), rtol=1e-4, atol=2e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("hello") == AutoTokenizer.from_pretrained(checkpoint)(
        "hello"
    )
    # An engine of its own takes it too.
    again = Engine(tmp_path / "merged")
    again.create_model("base", Trained.NOTHING)
    np.testing.assert_allclose(logprobs(again, "base"), logprobs(engine, "m"), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_full_model_loads_in_transformers(tmp_path: Path, kind: str) -> None:
    engine = trained_engine(make_checkpoint(tmp_path / "base", kind), Trained.ALL, None)
    engine.export(engine.snapshot("m"), tmp_path / "trained", merged=True)
    theirs = reference(tmp_path / "trained")
    np.testing.assert_allclose(logprobs(engine, "m"), their_logprobs(theirs), rtol=1e-4, atol=2e-5)
    weights = engine.state("m")["weights"]
    for name, each in theirs.named_parameters():
        assert torch.equal(each, weights[name])


def test_export_is_of_the_snapshot_and_not_of_later_weights(tmp_path: Path) -> None:
    engine = trained_engine(make_checkpoint(tmp_path / "base"), Trained.ADAPTER, OPTIONS["everything"])
    snapshot, before = engine.snapshot("m"), logprobs(engine, "m")
    engine.run([a_pass("m", 7)])
    engine.optim_step("m", AdamOptions(learning_rate=1e-1))
    engine.export(snapshot, tmp_path / "merged", merged=True)
    np.testing.assert_allclose(before, their_logprobs(reference(tmp_path / "merged")), rtol=1e-4, atol=2e-5)


def test_large_model_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 150_000)
    engine = trained_engine(
        make_checkpoint(tmp_path / "base", shard_size="100KB"), Trained.ADAPTER, OPTIONS["everything"]
    )
    engine.export(engine.snapshot("m"), tmp_path / "merged", merged=True)
    written = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    assert len(written) > 2
    assert written[0] == f"model-00001-of-{len(written):05d}.safetensors"
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == written
    np.testing.assert_allclose(
        logprobs(engine, "m"), their_logprobs(reference(tmp_path / "merged")), rtol=1e-4, atol=2e-5
    )


@pytest.mark.parametrize("trained", [Trained.ADAPTER, Trained.ALL])
@pytest.mark.parametrize(
    ("stored", "computed"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_exported_model_is_of_the_type_of_its_base_whatever_it_was_trained_in(
    tmp_path: Path, trained: Trained, stored: torch.dtype, computed: torch.dtype
) -> None:
    checkpoint = tmp_path / "base"
    reference(make_checkpoint(tmp_path / "made"), dtype=stored).save_pretrained(checkpoint)
    engine = trained_engine(
        checkpoint, trained, OPTIONS["everything"] if trained is Trained.ADAPTER else None, dtype=computed
    )
    engine.export(engine.snapshot("m"), tmp_path / "merged", merged=True)
    described = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert described["dtype"] == str(stored).removeprefix("torch.")
    weights, base = load_file(tmp_path / "merged" / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert {each.dtype for each in weights.values()} == {stored}
    theirs = reference(tmp_path / "merged", dtype="auto")  # type: ignore[arg-type]
    assert theirs.dtype == stored
    assert np.abs(their_logprobs(theirs) - logprobs(engine, "m")).mean() < 0.05
    if trained is Trained.ADAPTER:
        # What the adapter does not change is as it was, and what it changes is rounded once, at the end.
        assert torch.equal(weights["model.norm.weight"], base["model.norm.weight"])
        adapter = engine.models["m"].adapter
        assert adapter is not None
        name = "model.layers.1.mlp.up_proj"
        expected = (base[f"{name}.weight"].float() + adapter.delta(name)).to(stored)
        assert torch.equal(weights[f"{name}.weight"], expected)


def test_base_model_is_exported_as_it_is(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "base")
    engine = Engine(checkpoint)
    engine.export(engine.snapshot(None), tmp_path / "copy", merged=True)
    np.testing.assert_array_equal(their_logprobs(reference(tmp_path / "copy")), their_logprobs(reference(checkpoint)))
    with pytest.raises(EngineError, match="these weights have no adapter: export them merged"):
        engine.export(engine.snapshot(None), tmp_path / "adapter", merged=False)


def test_exported_adapter_is_a_model_to_begin_with(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "base")
    engine = trained_engine(checkpoint, Trained.ADAPTER, OPTIONS["everything"])
    engine.export(engine.snapshot("m"), tmp_path / "adapter", merged=False)
    engine.create_model("n", Trained.ADAPTER, LoraOptions(rank=4, seed=8))
    engine.run([a_pass("n")])
    engine.load_adapter("n", tmp_path / "adapter")
    np.testing.assert_array_equal(logprobs(engine, "n"), logprobs(engine, "m"))
    assert engine.state("n")["optimizer"]["steps"] == 0
    assert engine.state("n")["gradients"]["tensors"] == {}


def test_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "base")
    engine = trained_engine(checkpoint, Trained.ADAPTER, OPTIONS["everything"])
    engine.export(engine.snapshot("m"), tmp_path / "adapter", merged=False)
    engine.create_model("rank 2", Trained.ADAPTER, LoraOptions(rank=2))
    engine.create_model("full", Trained.ALL)
    with pytest.raises(EngineError, match="the saved adapter has rank 4, and model 'rank 2' has 2"):
        engine.load_adapter("rank 2", tmp_path / "adapter")
    with pytest.raises(EngineError, match="of a model with an adapter, and model 'full' is one with all parameters"):
        engine.load_adapter("full", tmp_path / "adapter")
    with pytest.raises(EngineError, match=r"is not a PEFT adapter: it has no adapter_config\.json"):
        engine.load_adapter("m", checkpoint)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(EngineError, match="cannot be read"):
        engine.load_adapter("m", tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"it has no adapter_model\.safetensors"):
        engine.load_adapter("m", tmp_path / "adapter")
