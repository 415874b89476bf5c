"""The language model of a checkpoint that has a vision tower too: the same numbers as transformers, and exports that
leave the rest of the checkpoint as it was."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_runs import filled_adapter, logits_of
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, random_tokens, reference

from trainmaster.engine.adapter_files import export_adapter, read_adapter
from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.engine import Engine
from trainmaster.engine.model import Transformer
from trainmaster.engine.ropes import Rope
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import AdamOptions, Datum, EngineError, Pass, Trained
from trainmaster.engine.weight_files import export_model
from trainmaster.server.coordinator.base_models import BaseModel

TOKENS = random_tokens(40, seed=9)
FILES, MODULES = "language_model.model.", "model.language_model."
"""How names begin that transformers saves by itself, and when it is told to save those of its modules."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same one by both kinds of names."""
    root = tmp_path_factory.mktemp("nested")
    made = {FILES: make_checkpoint(root / "files", "gemma3"), MODULES: root / "modules"}
    reference(made[FILES]).save_pretrained(made[MODULES], save_original_format=False)
    return made


@pytest.fixture(params=[FILES, MODULES])
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    directory = checkpoints[request.param]
    assert any(name.startswith(request.param) for name in weights_of(directory))
    return directory


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def vision_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: each for name, each in weights_of(directory).items() if "language_model" not in name}


def load(directory: Path) -> Transformer:
    return Transformer(ModelConfig.read(directory)).load(directory)


def logits(directory: Path) -> torch.Tensor:
    (found,) = logits_of(load(directory), [TOKENS])
    return found


def their_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS[None]).logits[0]
    return found


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def adapted(directory: Path, **options: Any) -> tuple[WeightsSnapshot, torch.Tensor]:
    """The model with an adapter beside it, and the logits of both."""
    transformer = load(directory)
    adapter = filled_adapter(transformer.config, **options)
    (found,) = logits_of(transformer, [TOKENS], AdapterRows([(adapter, len(TOKENS))]))
    return WeightsSnapshot(transformer=transformer, adapter=adapter), found


def test_logits_are_those_of_transformers_by_both_kinds_of_names(checkpoint: Path) -> None:
    from transformers import Gemma3ForConditionalGeneration

    theirs = reference(checkpoint)
    assert type(theirs) is Gemma3ForConditionalGeneration
    assert_near(logits(checkpoint), their_logits(theirs))


def test_configuration_of_before_version_5_means_the_same(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    raw = json.loads((checkpoints[FILES] / "config.json").read_text())
    inner = raw["text_config"]
    for name in ("rope_parameters", "layer_types", "tie_word_embeddings", "_sliding_window_pattern"):
        inner.pop(name)
    inner |= {
        "rope_theta": 900.0,
        "rope_local_base_freq": 50.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 2,
    }
    del raw["tie_word_embeddings"]
    shutil.copytree(checkpoints[FILES], tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.read(tmp_path) == ModelConfig.read(checkpoints[FILES])
    assert_near(logits(tmp_path), their_logits(reference(tmp_path)))


def test_sizes_that_published_files_leave_out_are_those_of_the_configuration_class(tmp_path: Path) -> None:
    from transformers import Gemma3Config

    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    own = ModelConfig.read(tmp_path)
    theirs: Any = Gemma3Config.from_pretrained(tmp_path).text_config
    assert (own.vocab_size, own.max_positions) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert (own.num_heads, own.num_key_value_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (own.head_dim, own.attention_scale) == (theirs.head_dim, theirs.query_pre_attn_scalar**-0.5)
    assert own.windows == tuple(1024 if each == "sliding_attention" else None for each in theirs.layer_types)
    assert set(own.ropes) == {Rope(theta=1e4), Rope(theta=1e6, kind="linear", factor=8.0)}
    assert own.tied
    # The server, which lists it, says the same.
    assert BaseModel(name="m", path=tmp_path).context_length == theirs.max_position_embeddings


def test_embeddings_that_are_not_tied(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "untied", "gemma3", tie_word_embeddings=False)
    assert "language_model.lm_head.weight" in weights_of(checkpoint)
    assert_near(logits(checkpoint), their_logits(reference(checkpoint)))


def test_strange_and_missing_weights_are_refused_by_the_names_of_the_file(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    weights = weights_of(checkpoint)
    norm = next(name for name in weights if name.endswith("layers.1.self_attn.q_norm.weight"))
    save_file({**weights, "audio_tower.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"does not: audio_tower\.weight"):
        load(tmp_path)
    save_file({name: each for name, each in weights.items() if name != norm}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=f"has no weight {norm}"):
        load(tmp_path)


@pytest.mark.parametrize("unembed", [False, True])
def test_merged_model_is_of_the_same_class_with_the_same_vision(
    checkpoint: Path, tmp_path: Path, unembed: bool
) -> None:
    from transformers import Gemma3ForConditionalGeneration

    snapshot, expected = adapted(checkpoint, train_unembed=unembed)
    transformer = snapshot.transformer
    export_model(transformer, transformer.config, snapshot.adapter, checkpoint, tmp_path, trained=False)
    theirs = reference(tmp_path)
    assert type(theirs) is Gemma3ForConditionalGeneration
    # What is added to the weights is rounded otherwise than what is added to their products.
    assert_near(their_logits(theirs), expected, 1e-4)
    assert_near(logits(tmp_path), expected, 1e-4)
    assert (logits(checkpoint) - expected).abs().max() > 0.1
    was, now = vision_of(checkpoint), vision_of(tmp_path)
    assert len(was) > 10
    assert {name for name in now if "lm_head" not in name} == set(was)
    assert all(torch.equal(now[name], each) for name, each in was.items())
    raw, base = (json.loads((each / "config.json").read_text()) for each in (tmp_path, checkpoint))
    assert raw["tie_word_embeddings"] is raw["text_config"]["tie_word_embeddings"] is not unembed
    for each in (raw, base):
        del each["tie_word_embeddings"], each["text_config"]["tie_word_embeddings"]
    assert raw == base


@pytest.mark.parametrize("unembed", [False, True])
def test_adapter_loads_in_peft_and_here(checkpoint: Path, tmp_path: Path, unembed: bool) -> None:
    import peft

    snapshot, expected = adapted(checkpoint, train_unembed=unembed)
    assert snapshot.adapter is not None
    export_adapter(snapshot.adapter, checkpoint, tmp_path)
    with warnings.catch_warnings():
        # A name that PEFT does not find would be a warning, no more.
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        theirs = peft.PeftModel.from_pretrained(reference(checkpoint), tmp_path)
    assert_near(their_logits(theirs), expected, 1e-4)
    named = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    assert named.keys() == load_file(tmp_path / "adapter_model.safetensors").keys()
    again = dict(read_adapter(snapshot.transformer.config, tmp_path).named_parameters())
    assert all(torch.equal(again[name], each) for name, each in snapshot.adapter.named_parameters())


def test_adapter_by_older_names_is_read(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As PEFT wrote them when modules were called otherwise."""
    snapshot, _ = adapted(checkpoints[FILES])
    assert snapshot.adapter is not None
    export_adapter(snapshot.adapter, checkpoints[FILES], tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    older = {
        name.replace(".model.model.language_model.", ".model.language_model.model.").replace(
            ".model.lm_head.", ".model.language_model.lm_head."
        ): each
        for name, each in load_file(file).items()
    }
    assert not older.keys() & load_file(file).keys()
    save_file(older, file)
    again = dict(read_adapter(snapshot.transformer.config, tmp_path).named_parameters())
    assert all(torch.equal(again[name], each) for name, each in snapshot.adapter.named_parameters())


def test_whole_model_is_trained_and_exported(checkpoint: Path, tmp_path: Path) -> None:
    engine = Engine(checkpoint)
    engine.create_model("m", Trained.ALL)
    text = TOKENS.numpy()
    datum = Datum(tokens=text[:-1], inputs={"target_tokens": text[1:]})
    engine.run([Pass(model_id="m", data=(datum,), loss="cross_entropy", backward=True)])
    engine.optim_step("m", AdamOptions(learning_rate=1e-2))
    [result] = engine.run([Pass(model_id="m", data=(datum,), loss="cross_entropy", backward=False)])
    assert not isinstance(result, EngineError)
    engine.export(engine.snapshot("m"), tmp_path, merged=True)
    trained, base = (their_logits(reference(each))[:-1].log_softmax(-1) for each in (tmp_path, checkpoint))
    targets = TOKENS[1:, None]
    found = trained.gather(1, targets)[:, 0].numpy()
    np.testing.assert_allclose(result.outputs[0]["logprobs"], found, rtol=1e-4, atol=2e-5)
    assert found.mean() > base.gather(1, targets).mean().item() + 0.1
    assert all(torch.equal(vision_of(tmp_path)[name], each) for name, each in vision_of(checkpoint).items())
