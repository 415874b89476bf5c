"""Mixtures of experts: products by group, files with the experts of a layer together, and Tinker's adapters."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from packed_runs import Work, filled_adapter, logits_of, run
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint, random_tokens, reference
from torch.nn import functional

from trainmaster.engine import grouped_products
from trainmaster.engine.adapter_files import export_adapter, read_adapter
from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.factor_stacks import FactorStack, flat_factors
from trainmaster.engine.grouped_products import Choices, GroupedShare, adapted_grouped_product
from trainmaster.engine.model import Transformer
from trainmaster.engine.products import AdapterShare, Factors
from trainmaster.engine.types import EngineError
from trainmaster.engine.weight_files import export_model

TEXT = random_tokens(40)


def load(directory: Path, dtype: torch.dtype = torch.float64) -> Transformer:
    return Transformer(ModelConfig.read(directory)).load(directory, dtype=dtype)


@pytest.mark.parametrize("one_kernel", [False, True])
def test_grouped_product_and_its_gradients_are_those_of_the_formula(one_kernel: bool) -> None:
    """One group has no rows, and adapters have the tokens of a part of the pack."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if one_kernel else torch.float64

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(True)

    tokens, weight = drawn(11, 16), drawn(4, 24, 16)
    chosen = torch.tensor([[0, 3], [3, 1], [0, 1], [1, 0], [3, 0], [0, 1], [1, 3], [3, 0], [0, 3], [3, 1], [0, 1]])
    factors = [(drawn(4, 8, 16), drawn(4, 8, 8)) for _ in range(2)]
    ranges = ((0, 5, slice(0, 8)), (7, 11, slice(16, 24)))
    weights = torch.rand(11, 2, generator=generator, dtype=torch.float64).to(dtype)
    expected_rows = []
    for token in range(11):
        total = torch.zeros(24, dtype=dtype)
        for choice, group in enumerate(chosen[token].tolist()):
            row = weight[group] @ tokens[token]
            for (a, b), (start, stop, columns) in zip(factors, ranges, strict=True):
                if start <= token < stop:
                    part = torch.zeros(24, dtype=dtype)
                    part[columns] = 0.5 * b[group] @ (a[group] @ tokens[token])
                    row = row + part
            total = total + weights[token, choice] * row
        expected_rows.append(total)
    every = [tokens, weight, *(each for pair in factors for each in pair)]
    expected = torch.stack(expected_rows)
    grads = torch.autograd.grad(expected.square().sum(), every)
    shares = [
        GroupedShare(
            AdapterShare(
                start,
                stop,
                0.5,
                Factors(torch.nn.Parameter(a.detach()), torch.nn.Parameter(b.detach())),
                a.detach(),
                b.detach(),
            ),
            columns,
        )
        for (a, b), (start, stop, columns) in zip(factors, ranges, strict=True)
    ]
    choices = Choices(chosen, 4)
    with mock.patch.object(grouped_products, "_one_kernel", return_value=one_kernel):
        rows = adapted_grouped_product(choices.spread(tokens), weight, None, choices, shares)
        found = choices.gathered(rows, weights)
        own = [tokens, weight, *(each for s in shares for each in (s.share.factors.a, s.share.factors.b))]
        found_grads = torch.autograd.grad(found.square().sum(), own)
    near = {"atol": 2.0, "rtol": 0.05} if one_kernel else {"atol": 1e-9, "rtol": 1e-9}
    torch.testing.assert_close(found, expected, **near)
    for each, truth in zip(found_grads, grads, strict=True):
        torch.testing.assert_close(each, truth, **near)


@pytest.mark.parametrize(("adapters", "experts", "rank"), [(1, 8, 8), (3, 8, 8), (3, 16, 8), (2, 8, 5)])
def test_kernels_of_a_layer_are_as_many_for_any_number_of_experts_and_adapters(
    tmp_path: Path, adapters: int, experts: int, rank: int
) -> None:
    """As on GPUs: no kernel is called once for each expert, or for each adapter."""
    model = load(make_checkpoint(tmp_path, "qwen3_moe", num_experts=experts, num_hidden_layers=1), torch.bfloat16)
    owners = [filled_adapter(model.config, seed=seed, rank=rank) for seed in range(adapters)]
    with (
        mock.patch.object(grouped_products, "_has_kernel", return_value=True),
        mock.patch.object(functional, "grouped_mm", side_effect=functional.grouped_mm) as kernel,
    ):
        outcomes = run(model, [Work(owner, (20, 15)) for owner in owners])
    # Of gate and up and of down, and of the two factors of each of three products; backward of rows, and of factors.
    assert kernel.call_count == (2 + 3 * 2) + (2 + 3 * 4)
    for owner, outcome in zip(owners, outcomes, strict=True):
        for (name, _), gradient in zip(owner.named_parameters(), outcome.gradients, strict=True):
            if ".experts." in name:
                assert gradient.flatten(1).any(1).sum() > 1, name


@pytest.mark.parametrize("kind", ["qwen3_moe_mixed", "mixtral"])
def test_experts_of_a_layer_may_be_together_in_files(tmp_path: Path, kind: str) -> None:
    """As transformers' modules have them."""
    directory = make_checkpoint(tmp_path / "each", kind)
    together = tmp_path / "together"
    reference(directory, dtype=torch.float64).save_pretrained(together, save_original_format=False)
    names = load_file(together / "model.safetensors").keys()
    assert "model.layers.3.mlp.experts.gate_up_proj" in names or "model.layers.2.mlp.experts.gate_up_proj" in names
    (expected,) = logits_of(load(directory), [TEXT])
    model = load(together)
    (found,) = logits_of(model, [TEXT])
    assert torch.equal(found, expected)
    adapter = filled_adapter(model.config)
    (adapted,) = logits_of(model, [TEXT], AdapterRows([(adapter, 40)]))
    export_model(model, model.config, adapter, together, tmp_path / "merged", trained=False)
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() >= names
    (merged,) = logits_of(load(tmp_path / "merged"), [TEXT])
    torch.testing.assert_close(merged, adapted, atol=2e-4, rtol=2e-4)


def test_adapter_whose_factors_are_shared_by_experts_is_read(tmp_path: Path) -> None:
    """Tinker's shares one of the two among all experts of a layer."""
    directory = make_checkpoint(tmp_path / "base", "qwen3_moe")
    config = ModelConfig.read(directory)
    export_adapter(filled_adapter(config), directory, tmp_path / "adapter", tinker_names=True)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    factors = load_file(file)
    name = "base_model.model.model.layers.1.mlp.experts.w1.lora_A.weight"
    assert factors[name].shape == (8, 4, 64)
    save_file({**factors, name: factors[name][3:4].clone()}, file)
    read = dict(read_adapter(config, tmp_path / "adapter").named_parameters())
    own = read["model.layers.1.mlp.experts.gate_proj.lora_A.weight"]
    assert all(torch.equal(each, factors[name][3]) for each in own)


def test_adapter_of_some_experts_alone_is_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "base", "qwen3_moe")
    config = ModelConfig.read(directory)
    export_adapter(filled_adapter(config), directory, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    some = {name: each for name, each in load_file(file).items() if ".experts.5." not in name}
    save_file(some, file)
    with pytest.raises(EngineError, match=r"experts\.\w+\.lora_A\.weight is not of one shape for all experts"):
        read_adapter(config, tmp_path / "adapter")


def test_stack_for_gpus_has_the_factors_of_single_layers_alone(tmp_path: Path) -> None:
    """Experts are computed by other kernels, and their gradients are autograd's."""
    config = ModelConfig.read(make_checkpoint(tmp_path, "qwen3_moe"))
    adapter, experts_alone = filled_adapter(config), filled_adapter(config, train_attn=False, train_unembed=False)
    stack = FactorStack([adapter], torch.float32)
    stack.fill()
    assert stack.rank == 8
    assert stack.a(["model.layers.0.mlp.experts.gate_proj"]) is None
    own = adapter.factors["model.layers.0.self_attn.o_proj"]
    assert torch.equal(stack.b("model.layers.0.self_attn.o_proj")[0, :, :4], own.b * adapter.scale)
    assert flat_factors(experts_alone) == {}
    gradients = torch.ones_like(stack.values)
    stack.hand_out(gradients, adapter.factors)
    assert own.a.grad is not None
    assert adapter.factors["model.layers.0.mlp.experts.gate_proj"].a.grad is None


def test_experts_that_lie_the_other_way_round_are_read_and_written_so(tmp_path: Path) -> None:
    """As Qwen 3 VL is published; transformers tells the two forms apart by their shapes."""
    directory = make_checkpoint(tmp_path / "base", "qwen3_vl_moe")
    model = load(directory)
    adapter = filled_adapter(model.config)
    (expected,) = logits_of(model, [TEXT], AdapterRows([(adapter, 40)]))
    file = directory / "model.safetensors"
    weights = load_file(file)
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert weights[name].shape == (8, 96, 64)
    turned = {
        name: each.transpose(1, 2).contiguous() if ".experts." in name else each for name, each in weights.items()
    }
    save_file(turned, file, metadata={"format": "pt"})
    again = load(directory)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))
    export_model(again, again.config, adapter, directory, tmp_path / "merged", trained=False)
    assert load_file(tmp_path / "merged" / "model.safetensors")[name].shape == (8, 64, 96)
    for found in (
        logits_of(load(tmp_path / "merged"), [TEXT])[0],
        reference(tmp_path / "merged")(TEXT[None]).logits[0],
    ):
        torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-3)
