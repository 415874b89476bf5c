"""Adapters: how they begin, what a pack of many costs, that none knows of the others, and that PEFT reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_runs import Outcome, Watch, Work, filled_adapter, logits_of, run
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, random_tokens, reference

from trainmaster.engine.adapter_files import export_adapter, read_adapter
from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.model import Transformer
from trainmaster.engine.targets import UNEMBEDDING
from trainmaster.engine.types import EngineError, LoraOptions


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


@pytest.fixture(scope="module")
def model(directory: Path) -> Transformer:
    return Transformer(ModelConfig.read(directory)).load(directory)


def varied_work(config: ModelConfig) -> list[Work]:
    """Adapters of all sorts, with as many rows as make products awkward."""
    lengths = ((3,), (5, 17), (40,), (1,), (100, 33, 2), (7, 9), (300, 77))
    adapters = [
        filled_adapter(
            config,
            seed=index,
            rank=(1, 2, 8, 4, 16, 3, 5)[index],
            alpha=(32.0, 16.0, 8.0, 0.5, 4.0, 32.0, 1.0)[index],
            train_attn=index != 2,
            train_mlp=index % 3 != 1,
            train_unembed=index % 3 != 2,
        )
        for index in range(len(lengths))
    ]
    return [Work(None, (4,)), *(Work(*each) for each in zip(adapters, lengths, strict=True))]


ODD = {"hidden_size": 20, "intermediate_size": 44, "head_dim": 10, "num_attention_heads": 2, "vocab_size": 269}


@pytest.mark.parametrize(
    ("kind", "changes", "threads"),
    [("qwen3", {}, 2), pytest.param("gemma2", {}, 1, marks=pytest.mark.long), ("llama", ODD, 5)],
)
def test_one_adapter_gets_to_the_last_bit_what_it_gets_alone(
    tmp_path: Path, kind: str, changes: dict[str, int], threads: int
) -> None:
    directory = make_checkpoint(tmp_path / "model", kind, **changes)
    model = Transformer(ModelConfig.read(directory)).load(directory)
    works = varied_work(model.config)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for chunk in (None, 37):
            alone = [run(model, [work], chunk=chunk)[0] for work in works]
            for seed in range(3):
                order = random.Random(seed).sample(range(len(works)), 5 + seed)
                together = run(model, [works[index] for index in order], chunk=chunk)
                for index, outcome in zip(order, together, strict=True):
                    assert outcome.equals(alone[index]), f"work {index} of {order}"
    finally:
        torch.set_num_threads(before)


def test_an_adapter_that_has_gone_wrong_harms_no_other(model: Transformer) -> None:
    good, bad = Work(filled_adapter(model.config, seed=1), (21,)), Work(filled_adapter(model.config, seed=2), (13,))
    (alone,) = run(model, [good])
    assert bad.adapter is not None
    with torch.no_grad():
        for parameter in bad.adapter.parameters():
            parameter.fill_(float("nan"))
    wrong, beside = run(model, [bad, good])
    assert wrong.logprobs.isnan().all()
    assert beside.equals(alone)


def test_sixteen_adapters_take_as_many_base_products_as_one(model: Transformer) -> None:
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    counted = []
    for adapters in (1, 16):
        works = [Work(filled_adapter(model.config, seed=index), (96 // adapters,)) for index in range(adapters)]
        with Watch(weights) as watch:
            run(model, works, chunk=48)
        counted.append(watch)
    one, many = counted
    assert one.products == many.products
    assert set(one.products) == set(range(len(weights)))
    assert many.all_products > one.all_products, "each adapter has products of its own"


def test_adapted_logits_are_those_of_merged_weights(directory: Path, model: Transformer) -> None:
    adapter = filled_adapter(model.config, rank=3, alpha=7.0)
    merged = reference(directory)
    embedding = merged.get_input_embeddings().weight.detach().clone()
    merged.lm_head.weight = torch.nn.Parameter(embedding)
    with torch.no_grad():
        for target, factors in adapter.factors.items():
            merged.get_submodule(target).weight += (7.0 / 3) * factors.b @ factors.a
    text = random_tokens(30)
    (logits,) = logits_of(model, [text], AdapterRows([(adapter, 30)]))
    with torch.no_grad():
        expected = merged(text[None]).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    (plain,) = logits_of(model, [text])
    assert (plain - logits).abs().max() > 0.1


def test_gradients_are_those_of_the_formula(model: Transformer, directory: Path) -> None:
    """By autograd on merged weights, all through the model."""
    adapter = filled_adapter(model.config, rank=3, alpha=7.0)
    (outcome,) = run(model, [Work(adapter, (25,))])
    text = Work(adapter, (25,)).texts[0]
    theirs = reference(directory).requires_grad_(False)
    merged = {
        f"{target}.weight": theirs.get_submodule(target).weight + (7.0 / 3) * factors.b @ factors.a
        for target, factors in adapter.factors.items()
    }
    logits = torch.func.functional_call(theirs, merged, (text[None, :-1],), tie_weights=False).logits[0]
    logits.log_softmax(-1).gather(1, text[1:, None]).sum().backward()
    for (name, parameter), found in zip(adapter.named_parameters(), outcome.gradients, strict=True):
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(found, parameter.grad, atol=2e-5 * scale, rtol=1e-4, msg=name)


def test_targets_follow_the_options(model: Transformer) -> None:
    def targets(**options: bool) -> set[str]:
        flags = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), False) | options
        return {name.rpartition(".")[2] for name in Adapter(model.config, LoraOptions(rank=2, **flags)).factors}

    assert targets(train_attn=True) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert targets(train_mlp=True) == {"gate_proj", "up_proj", "down_proj"}
    assert targets(train_unembed=True) == {UNEMBEDDING}
    assert len(Adapter(model.config, LoraOptions(rank=2)).factors) == 3 * 7 + 1


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "gemma", "llama3"])
def test_factors_fit_every_family(tmp_path: Path, kind: str) -> None:
    directory = make_checkpoint(tmp_path, kind)
    model = Transformer(ModelConfig.read(directory)).load(directory)
    (outcome,) = run(model, [Work(filled_adapter(model.config), (9,))])
    assert all(gradient.abs().sum() > 0 for gradient in outcome.gradients)


def test_an_adapter_begins_by_its_seed_alone(model: Transformer) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = Adapter(model.config, LoraOptions(rank=4, seed=7))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again = Adapter(model.config, LoraOptions(rank=4, seed=7, train_mlp=False))
    other = Adapter(model.config, LoraOptions(rank=4, seed=8))
    for target, factors in again.factors.items():
        assert torch.equal(factors.a, first.factors[target].a)
        assert not torch.equal(factors.a, other.factors[target].a)
    layers = [factors.a for target, factors in first.factors.items() if target.endswith("q_proj")]
    assert not torch.equal(layers[0], layers[1])
    unseeded = (Adapter(model.config, LoraOptions(rank=4, seed=seed)) for seed in (None, 0))
    assert len({tuple(each.factors[UNEMBEDDING].a.flatten().tolist()) for each in unseeded}) == 1


def test_an_adapter_begins_as_nothing(model: Transformer) -> None:
    adapter, text = Adapter(model.config, LoraOptions(rank=4)), random_tokens(20)
    (plain,), (adapted,) = logits_of(model, [text]), logits_of(model, [text], AdapterRows([(adapter, 20)]))
    assert torch.equal(plain, adapted)


def test_kaiming_and_nora_draw_as_they_say(model: Transformer) -> None:
    kaiming = Adapter(model.config, LoraOptions(rank=16)).factors["model.layers.0.mlp.down_proj"].a
    bound = 112**-0.5
    assert 0.95 * bound < kaiming.abs().max() <= bound
    assert abs(kaiming.std().item() / (bound / 3**0.5) - 1) < 0.05
    nora = Adapter(model.config, LoraOptions(rank=16, init="nora")).factors["model.layers.0.mlp.down_proj"].a
    torch.testing.assert_close(nora.norm(dim=0), torch.ones(112))
    torch.testing.assert_close(nora, kaiming / kaiming.norm(dim=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "at least 1, not 0"),
        ({"rank": 2, "alpha": 0.0}, "positive number"),
        ({"rank": 2, "alpha": float("inf")}, "positive number"),
        ({"rank": 2, "init": "zeros"}, "not by 'zeros'"),
        ({"rank": 2, "train_attn": False, "train_mlp": False, "train_unembed": False}, "something to adapt"),
    ],
)
def test_options_that_make_no_adapter_are_refused(model: Transformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Adapter(model.config, LoraOptions(**options))


def test_a_copy_stays_as_it_was(model: Transformer) -> None:
    adapter = filled_adapter(model.config)
    copy, text = adapter.copy(), random_tokens(20)
    (before,) = logits_of(model, [text], AdapterRows([(adapter, 20)]))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter += 1
    (after,) = logits_of(model, [text], AdapterRows([(copy, 20)]))
    assert torch.equal(before, after)
    assert not any(parameter.requires_grad for parameter in copy.parameters())


def test_rows_that_do_not_add_up_are_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="19 rows cannot adapt 20"):
        logits_of(model, [random_tokens(20)], AdapterRows([(filled_adapter(model.config), 19)]))


def test_factors_of_another_adapter_are_refused(model: Transformer) -> None:
    adapter = filled_adapter(model.config)
    before = Outcome(torch.zeros(0), [parameter.detach().clone() for parameter in adapter.parameters()])
    for options in ({"rank": 5}, {"rank": 4, "train_mlp": False}):
        other = dict(filled_adapter(model.config, seed=1, **options).named_parameters())
        with pytest.raises(EngineError, match="not this adapter's factors"):
            adapter.load(other)
    assert before.equals(Outcome(torch.zeros(0), [parameter.detach() for parameter in adapter.parameters()]))


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "gemma2"])
@pytest.mark.parametrize("train_unembed", [True, False])
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
def test_peft_computes_the_same_from_an_export(tmp_path: Path, kind: str, train_unembed: bool) -> None:
    from peft import PeftModel

    directory = make_checkpoint(tmp_path / "model", kind)
    model = Transformer(ModelConfig.read(directory)).load(directory)
    adapter = filled_adapter(model.config, rank=3, alpha=5.0, train_unembed=train_unembed)
    export_adapter(adapter, directory, tmp_path / "adapter")
    theirs, text = PeftModel.from_pretrained(reference(directory), tmp_path / "adapter"), random_tokens(30)
    with torch.no_grad():
        expected = theirs(text[None]).logits[0]
    (logits,) = logits_of(model, [text], AdapterRows([(adapter, 30)]))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert (logits - logits_of(model, [text])[0]).abs().max() > 0.05


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj", "down_proj", "lm_head"]])
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
def test_an_adapter_of_peft_computes_the_same_here(
    tmp_path: Path, directory: Path, model: Transformer, targets: list[str]
) -> None:
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(reference(directory), LoraConfig(r=3, lora_alpha=6, target_modules=targets))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    theirs.save_pretrained(tmp_path, save_embedding_layers=False)
    adapter = read_adapter(model.config, tmp_path)
    text = random_tokens(30)
    with torch.no_grad():
        expected = theirs.eval()(text[None]).logits[0]
    (logits,) = logits_of(model, [text], AdapterRows([(adapter, 30)]))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_an_export_is_read_back_bit_by_bit(model: Transformer, tmp_path: Path) -> None:
    adapter = filled_adapter(model.config, rank=3, alpha=5.5)
    export_adapter(adapter, Path("base"), tmp_path)
    again = read_adapter(model.config, tmp_path)
    assert again.scale == adapter.scale
    for (name, expected), (other, found) in zip(adapter.named_parameters(), again.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(expected, found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is not supported"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save is not supported"),
        ({"r": None}, "does not say its r"),
        ({"r": 2}, r"lora_A\.weight is \[4, 64\], not \[2, 64\]"),
    ],
)
def test_peft_adapters_of_other_kinds_are_refused(
    model: Transformer, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    export_adapter(filled_adapter(model.config), Path("base"), tmp_path)
    described = tmp_path / "adapter_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | changes))
    with pytest.raises(EngineError, match=message):
        read_adapter(model.config, tmp_path)


def test_peft_tensors_that_do_not_fit_are_refused(model: Transformer, tmp_path: Path) -> None:
    export_adapter(filled_adapter(model.config), Path("base"), tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    tensors = load_file(weights)
    lone = {name: each for name, each in tensors.items() if name != "base_model.model.lm_head.lora_B.weight"}
    save_file(lone, weights)
    with pytest.raises(EngineError, match=r"lm_head\.lora_A\.weight, and no lora_B"):
        read_adapter(model.config, tmp_path)
    strange = {name.replace("layers.2.", "layers.9."): each for name, each in tensors.items()}
    save_file(strange, weights)
    with pytest.raises(EngineError, match=r"layers\.9\."):
        read_adapter(model.config, tmp_path)


def test_adapters_of_a_16_bit_model_are_trained_in_32(directory: Path) -> None:
    model = Transformer(ModelConfig.read(directory)).load(directory, dtype=torch.bfloat16)
    wide = Transformer(ModelConfig.read(directory)).load(directory)
    work = [Work(filled_adapter(model.config), (40,)), Work(filled_adapter(model.config, seed=1, rank=2), (7, 20))]
    for found, expected in zip(run(model, work, recompute=True), run(wide, work), strict=True):
        assert (found.logprobs - expected.logprobs).abs().mean() < 0.05
        for own, other in zip(found.gradients, expected.gradients, strict=True):
            assert own.dtype == torch.float32
            assert torch.cosine_similarity(own.flatten(), other.flatten(), dim=0) > 0.99
