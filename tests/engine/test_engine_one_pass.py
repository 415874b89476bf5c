"""Packs as a GPU computes them, against the formulas of the CPU; see `kernel_runs` for where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from kernel_runs import DEVICE, a_model, apart, drawn
from torch import Tensor

from trainmaster.engine import kernels, loss_head, packs
from trainmaster.engine.cross_entropy import cross_entropy
from trainmaster.engine.kernels import vocabulary
from trainmaster.engine.packs import compute
from trainmaster.engine.passes import Chunk, ChunkResult, check_pass
from trainmaster.engine.trained_model import TrainedModel
from trainmaster.engine.types import Datum, EngineError, LoraOptions, Pass, Trained

SIZES = {"vocabulary": 70, "context": 64}


@pytest.fixture(autouse=True)
def _several_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_BLOCK", 32)
    monkeypatch.setattr(loss_head, "_ROWS", 4)
    monkeypatch.setattr(loss_head, "LOGITS", 1)


def a_chunk(model: TrainedModel, lengths: Sequence[int], loss: str, *, backward: bool = True, wide: int = 0) -> Chunk:
    random = np.random.default_rng(sum(lengths))
    data = []
    for length in lengths:
        shape = (length, wide) if wide else (length,)
        inputs = {"target_tokens": random.integers(0, 70, shape)}
        if loss == "cross_entropy":
            inputs["weights"] = random.uniform(0, 1, shape).astype(np.float32)
        else:
            inputs["logprobs"] = -random.uniform(3, 5, length).astype(np.float32)
            inputs["advantages"] = random.normal(size=length).astype(np.float32)
        data.append(Datum(tokens=random.integers(0, 70, length), inputs=inputs))
    request = Pass(model_id=model.model_id, data=tuple(data), loss=loss, backward=backward)
    return Chunk(number=0, of=check_pass(request, model, **SIZES), data=range(len(data)))


def adapted(kind: str, count: int, *, base_seed: int = 0) -> list[TrainedModel]:
    """Models on one base, whose adapters do something."""
    base = a_model(kind)
    models = []
    for seed in range(count):
        model = TrainedModel(f"m{seed}", base, Trained.ADAPTER, LoraOptions(rank=4 + seed, seed=seed))
        assert model.adapter is not None
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.adapter.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        models.append(model)
    return models


def good(parts: Sequence[ChunkResult | EngineError]) -> list[ChunkResult]:
    for part in parts:
        assert not isinstance(part, EngineError), part
    return [part for part in parts if isinstance(part, ChunkResult)]


def logprobs(part: ChunkResult) -> Tensor:
    return torch.from_numpy(np.concatenate([each["logprobs"] for each in part.outputs]))


def assert_alike(ours: Sequence[ChunkResult], theirs: Sequence[ChunkResult]) -> None:
    assert len(ours) == len(theirs)
    for mine, exact in zip(ours, theirs, strict=True):
        assert apart(logprobs(mine), logprobs(exact)) < 1e-5
        assert mine.metrics == pytest.approx(exact.metrics, rel=1e-4, abs=1e-5)
        assert mine.gradients.keys() == exact.gradients.keys()
        assert_gradients(mine.gradients, exact.gradients)


def assert_gradients(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    for name, exact in theirs.items():
        assert apart(ours[name], exact) < 1e-4, name


LOSSES = ["cross_entropy", "ppo", "gspo", "cispo"]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
@pytest.mark.parametrize("loss", LOSSES)
def test_pack_of_two_models_gets_what_formulas_give(loss: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (kind, loss) in (("gemma2", "ppo"), ("gemma2", "cispo")):
        pytest.skip("each loss once, and each head once")
    models = adapted(kind, 2)
    found = []
    for served in (True, False):
        monkeypatch.setattr(kernels, "serve", lambda _, served=served: served)
        chunks = [a_chunk(model, lengths, loss) for model, lengths in zip(models, ((5, 2), (6,)), strict=True)]
        found.append(good(compute(chunks).parts()))
    assert_alike(*found)
    assert len(found[0][0].gradients) > 20


def test_full_finetuning_gets_what_formulas_give(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TrainedModel("m", a_model("qwen3"), Trained.ALL, None)
    found = []
    for served in (True, False):
        monkeypatch.setattr(kernels, "serve", lambda _, served=served: served)
        found.append(good(compute([a_chunk(model, (5, 4), "cross_entropy")]).parts()))
    assert_alike(*found)


def test_forward_pass_with_several_targets_gets_logprobs_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    models = adapted("qwen3", 1)
    found = []
    for served in (True, False):
        monkeypatch.setattr(kernels, "serve", lambda _, served=served: served)
        chunk = a_chunk(models[0], (5, 4), "cross_entropy", backward=served, wide=3)
        found.append(good(compute([chunk]).parts()))
        assert bool(found[-1][0].gradients) is served
    assert logprobs(found[0][0]).shape == (9, 3)
    assert apart(logprobs(found[0][0]), logprobs(found[1][0])) < 1e-5


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_single_tokens_need_one_pass(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "serve", lambda _: True)
    passes: list[str] = []
    for name in ("_in_one_pass", "_in_two_passes"):
        function = getattr(packs, name)

        def noted(*args: object, name: str = name, function: object = function, **options: object) -> None:
            passes.append(name)
            function(*args, **options)  # type: ignore[operator]

        monkeypatch.setattr(packs, name, noted)
    good(compute([a_chunk(adapted("qwen3", 1)[0], (4,), loss)]).parts())
    assert passes == ["_in_two_passes" if loss == "gspo" else "_in_one_pass"]


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_cross_entropy_of_jobs_is_what_formulas_give(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    head = a_model("llama").unembedding.requires_grad_()
    head.logit_softcap = softcap
    targets = torch.arange(11, device=DEVICE) * 6
    targets[:5] = (drawn(11, 32, dtype=torch.float32, seed=2)[:5] @ head.weight.detach().t()).argmax(1)
    found = []
    for served in (True, False):
        monkeypatch.setattr(kernels, "serve", lambda _, served=served: served)
        rows = drawn(11, 32, dtype=torch.float32, seed=2).requires_grad_()
        said = cross_entropy(rows, targets, head, torch.tensor(7.0, device=DEVICE), chunk=4)
        said.loss.backward()
        assert rows.grad is not None
        assert head.weight.grad is not None
        found.append([said.loss, said.entropy, said.correct, rows.grad, head.weight.grad])
        head.weight.grad = None
    for ours, theirs in zip(*found, strict=True):
        assert apart(ours, theirs) < 1e-5
    with torch.no_grad():
        alone = cross_entropy(rows, targets, head, torch.tensor(7.0, device=DEVICE), chunk=4)
    assert apart(alone.loss, found[0][0]) < 1e-6


def test_loss_that_is_not_finite_names_its_datum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "serve", lambda _: True)
    models = adapted("qwen3", 2)
    chunks = [a_chunk(model, (4, 3), "ppo") for model in models]
    chunks[1].of.inputs[1]["logprobs"][2] = -1e38
    fine, failed = compute(chunks).parts()
    assert isinstance(fine, ChunkResult)
    assert isinstance(failed, EngineError)
    assert "the loss of datum 1 is not finite" in str(failed)
