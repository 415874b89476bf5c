"""Products with weights of 8 bits as a GPU computes them, against the formulas of the CPU; see `kernel_runs` for where.

What tensor cores for 8 bits compute is tested where there are some. Triton's interpreter rounds to e4m3 by rules of its
own: there, the kernel gets numbers that need no rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kernel_runs import DEVICE, INTERPRETED, TYPES, apart, drawn
from test_engine_one_pass import a_chunk, adapted, good, logprobs
from torch import Tensor

from trainmaster.engine import kernels, quantized
from trainmaster.engine.kernels.quantization import quantize_rows
from trainmaster.engine.layers import Linear
from trainmaster.engine.packs import compute
from trainmaster.engine.passes import ChunkResult
from trainmaster.engine.quantized import CAPABILITY, LARGEST, SMALLEST_ROW, QuantizedRows, quantize, quantized_rows
from trainmaster.engine.trained_model import TrainedModel

multiplies = pytest.mark.skipif(
    INTERPRETED or torch.cuda.get_device_capability() < CAPABILITY, reason="needs tensor cores for e4m3"
)


def by_kernel(parts: Sequence[Tensor], factors: Tensor | None = None) -> QuantizedRows:
    return QuantizedRows(*quantize_rows(parts, factors, largest=LARGEST, smallest_row=SMALLEST_ROW))


def by_formula(parts: Sequence[Tensor], factors: Tensor | None = None) -> QuantizedRows:
    found = quantized_rows([part.cpu() for part in parts], None if factors is None else factors.cpu())
    return QuantizedRows(found.values.to(DEVICE), found.scales.to(DEVICE))


WIDTHS = [(48,), (100, 28), (256, 64, 64), (16,) * 5, (4096, 1024, 1024)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_kernel_finds_scales_and_keeps_what_needs_no_rounding(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    count = 5
    whole = (drawn(count, sum(widths), dtype=torch.float32, seed=1) * 100).clamp(-440, 440)
    whole = whole.sign() * whole.abs().clamp(min=0.5)
    exact = whole.to(torch.float8_e4m3fn).float()
    exact[:, 3] = LARGEST
    exact[4] = 0
    sizes = torch.tensor([1.0, 0.5, 2**-20, 2**20, 1.0], device=DEVICE)[:, None]
    factors = 2.0 ** torch.arange(sum(widths), device=DEVICE).remainder(5)
    for factor in (None, factors):
        given = exact * sizes if factor is None else exact * sizes / factor
        wide = torch.cat([given.to(dtype), given.to(dtype)], dim=1)  # rows that do not follow each other
        parts = torch.split_with_sizes(wide[:, : sum(widths)], list(widths), dim=1)
        found = by_kernel(parts, factor)
        assert torch.equal(found.values.float(), exact)
        assert torch.equal(found.scales[:4], sizes[:4, 0])
        assert torch.equal(found.dequantized()[4], torch.zeros_like(exact[4]))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter rounds otherwise")
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_kernel_rounds_as_the_formula_does(widths: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = [drawn(300, width, dtype=dtype, seed=seed) for seed, width in enumerate(widths)]
    factors = drawn(sum(widths), dtype=torch.float32, seed=9).abs()
    for factor in (None, factors):
        ours, exact = by_kernel(parts, factor), by_formula(parts, factor)
        torch.testing.assert_close(ours.scales, exact.scales, rtol=1e-6, atol=0)
        # A quotient's last bit decides on which side of a border between two steps a number lies.
        other = ours.values.float() != exact.values.float()
        assert float(other.float().mean()) < 5e-4
        assert apart(ours.dequantized(), exact.dequantized()) < 1e-3


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no e4m3 that is not finite")
def test_row_that_is_not_finite_stays_so() -> None:
    rows = drawn(3, 64, dtype=torch.bfloat16, seed=1)
    rows[0, 5], rows[1, 7] = torch.nan, torch.inf
    assert by_kernel([rows]).dequantized().isfinite().all(1).tolist() == [False, False, True]


@multiplies
@pytest.mark.parametrize("count", [1, 5, 130, 2048])
@pytest.mark.parametrize("bias", [False, True])
def test_tensor_cores_multiply_what_the_cpu_multiplies(count: int, bias: bool) -> None:
    widths = (512, 128, 128)
    layers = []
    for seed, width in enumerate(widths):
        layer = Linear(f"layer{seed}", 256, width, bias=bias).requires_grad_(False).to(DEVICE, torch.bfloat16)
        for parameter in layer.parameters():
            parameter.copy_(drawn(*parameter.shape, dtype=torch.bfloat16, seed=seed))
        layers.append(layer)
    quantize(layers, torch.device(DEVICE))
    assert layers[0].quantized is not None
    weights = layers[0].quantized.joined([layer.quantized for layer in layers[1:]])
    assert isinstance(weights, quantized.QuantizedWeights)
    exact = weights.values.double() * weights.scales.double()[:, None]
    rows = drawn(count, 256, dtype=torch.bfloat16, seed=5)
    added = torch.cat([layer.bias for layer in layers]) if bias else None
    expected = by_formula([rows]).dequantized().double() @ exact.t() + (0 if added is None else added.double())
    assert apart(weights.product(rows, added), expected) < 5e-3
    grads = [drawn(count, width, dtype=torch.bfloat16, seed=width) for width in widths]
    pulled = by_formula(grads, weights.scales).dequantized().double() @ weights.values.double()
    assert apart(weights.back_product(grads), pulled) < 5e-3
    assert apart(weights.back_product(grads), torch.cat(grads, dim=1).double() @ exact) < 0.05
    part = weights.part(1, 2)
    assert apart(part.product(rows, None), by_formula([rows]).dequantized().double() @ exact[512:640].t()) < 5e-3
    assert apart(part.back_product(grads[1:2]), grads[1].double() @ exact[512:640]) < 0.05


def assert_near(ours: Sequence[ChunkResult], theirs: Sequence[ChunkResult], *, most: float) -> None:
    """Now and then a number is rounded to another side, which no sum of squares hides."""
    for mine, exact in zip(ours, theirs, strict=True):
        assert apart(logprobs(mine), logprobs(exact)) < most
        assert mine.gradients.keys() == exact.gradients.keys()
        parts = [torch.cat([each.flatten() for each in part.gradients.values()]) for part in (mine, exact)]
        assert 0 < apart(*parts) < most


def a_pack(models: Sequence[TrainedModel]) -> list[ChunkResult]:
    lengths = ((5, 2), (6,))
    chunks = [a_chunk(model, own, "cross_entropy") for model, own in zip(models, lengths, strict=True)]
    return good(compute(chunks).parts())


@pytest.mark.skipif(not INTERPRETED, reason="the CPU's products are what a GPU's are compared with")
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_pack_of_two_models_gets_what_formulas_give(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels but the one that rounds."""
    counts, found = by_the_cpu(monkeypatch), []
    models = adapted(kind, 2)
    models[0].transformer.quantize()
    for served in (True, False):
        monkeypatch.setattr(kernels, "serve", lambda _, served=served: served)
        found.append(a_pack(models))
    assert counts
    assert_near(*found, most=2e-3)


def by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Round by the formula even where kernels serve; the number of parts of each."""
    counts: list[int] = []
    original = quantized.quantized_rows

    def rounded(parts: Sequence[Tensor], factors: Tensor | None = None) -> QuantizedRows:
        counts.append(len(parts))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "serve", lambda _: False)
            return original(parts, factors)

    monkeypatch.setattr(quantized, "quantized_rows", rounded)
    return counts


@pytest.mark.skipif(not INTERPRETED, reason="counts what a GPU does, too")
def test_rows_of_several_layers_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = by_the_cpu(monkeypatch)
    models = adapted("llama", 1)
    models[0].transformer.quantize()
    layers = models[0].transformer.config.num_layers
    counts.clear()
    monkeypatch.setattr(kernels, "serve", lambda _: True)
    good(compute([a_chunk(models[0], (5,), "cross_entropy")]).parts())
    # q, k and v; o; gate and up; down. Nothing before the first layer's projections has a gradient.
    assert counts.count(1) == layers * 4 + layers * 2
    assert counts.count(2) == layers
    assert counts.count(3) == layers - 1


@multiplies
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_training_step_is_about_that_of_whole_weights(kind: str) -> None:
    found = []
    for narrow in (True, False):
        models = adapted(kind, 2)
        transformer = models[0].transformer
        transformer.use({name: halved(each) for name, each in transformer.named_parameters()}, {})
        if narrow:
            transformer.quantize()
        found.append(a_pack(models))
    assert_near(*found, most=0.1)


def halved(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """In 16 bits on a GPU; and small, as layers of tiny random models blow up what rounding changes."""
    small = parameter.detach() * (0.1 if parameter.dim() > 1 else 1)
    return torch.nn.Parameter(small.to(torch.float32 if INTERPRETED else torch.bfloat16), requires_grad=False)
