"""Training against transformers' own models, in company and alone, and across interruptions."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_checkpoint, reference

from trainmaster.engine import engine as engine_module
from trainmaster.engine import losses
from trainmaster.engine.engine import Engine
from trainmaster.engine.trained_model import SKIPPED, WeightsSnapshot, weights_state
from trainmaster.engine.types import (
    AdamOptions,
    Blame,
    Datum,
    EngineError,
    LoraOptions,
    Normalization,
    Pass,
    PassResult,
    Trained,
)
from trainmaster.jobs import trees

STEP = AdamOptions(learning_rate=3e-3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "qwen3")


@pytest.fixture
def engine(checkpoint: Path) -> Engine:
    return Engine(checkpoint)


def a_datum(length: int, seed: int, loss: str = "cross_entropy", width: int = 0) -> Datum:
    random = np.random.default_rng(seed)
    shape = (length, width) if width else (length,)
    inputs: dict[str, np.ndarray] = {"target_tokens": random.integers(0, 256, shape)}
    if loss == "cross_entropy":
        inputs["weights"] = random.uniform(-0.2, 1, shape).astype(np.float32)
    else:
        inputs["logprobs"] = -random.uniform(4, 7, length).astype(np.float32)
        inputs["advantages"] = random.normal(0, 1, length).astype(np.float32)
    return Datum(tokens=random.integers(0, 256, length), inputs=inputs)


def a_pass(
    model_id: str, lengths: list[int], seed: int = 0, loss: str = "cross_entropy", *, backward: bool = True
) -> Pass:
    data = tuple(a_datum(length, 100 * seed + index, loss) for index, length in enumerate(lengths))
    return Pass(model_id=model_id, data=data, loss=loss, backward=backward)


def run(engine: Engine, *passes: Pass) -> list[PassResult]:
    results = engine.run(passes)
    for result in results:
        if isinstance(result, EngineError):
            raise result
    return results  # type: ignore[return-value]


def gradients(engine: Engine, model_id: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = copy.deepcopy(engine.state(model_id)["gradients"]["tensors"])
    return found


def assert_same_bits(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name, each in ours.items() if not torch.equal(each, theirs[name])]
    assert not different


def their_logprobs(model: Any, datum: Datum) -> torch.Tensor:
    logits = model(torch.tensor(datum.tokens)[None]).logits[0].float()
    targets = torch.tensor(datum.inputs["target_tokens"])
    wide = targets[:, None] if targets.dim() == 1 else targets
    return torch.log_softmax(logits, dim=-1).gather(1, wide).view(targets.shape)


def their_loss(model: Any, request: Pass) -> torch.Tensor:
    return sum(-(their_logprobs(model, datum) * torch.tensor(datum.inputs["weights"])).sum() for datum in request.data)  # type: ignore[return-value]


# What transformers computes


def test_logprobs_and_loss_are_those_of_transformers(engine: Engine, checkpoint: Path) -> None:
    engine.create_model("frozen", Trained.NOTHING)
    request = a_pass("frozen", [5, 64, 1, 17], backward=False)
    [result] = run(engine, request)
    theirs = reference(checkpoint)
    for datum, output in zip(request.data, result.outputs, strict=True):
        assert output["logprobs"].dtype == np.float32
        expected = their_logprobs(theirs, datum).detach().numpy()
        np.testing.assert_allclose(output["logprobs"], expected, rtol=1e-4, atol=1e-5)
    assert result.metrics["loss:sum"] == pytest.approx(their_loss(theirs, request).item(), rel=1e-5)
    assert result.metrics["loss_tokens:sum"] == 87


def test_full_gradients_are_those_of_transformers(engine: Engine, checkpoint: Path) -> None:
    engine.create_model("full", Trained.ALL)
    request = a_pass("full", [5, 40, 17])
    run(engine, request)
    theirs = reference(checkpoint)
    their_loss(theirs, request).backward()
    ours = gradients(engine, "full")
    expected = {name: each.grad for name, each in theirs.named_parameters()}
    assert ours.keys() == expected.keys()
    for name, each in ours.items():
        torch.testing.assert_close(each, expected[name], rtol=1e-3, atol=2e-4 * float(expected[name].abs().max()))


def test_full_training_follows_transformers_and_pytorch(engine: Engine, checkpoint: Path) -> None:
    engine.create_model("full", Trained.ALL)
    theirs = reference(checkpoint)
    # An eps above rounding errors: Adam makes steps of full size of gradients that are nearly 0.
    options = AdamOptions(learning_rate=3e-3, beta2=0.99, eps=1e-3, weight_decay=0.1, grad_clip_norm=30.0)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=3e-3, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.1)
    for step in range(4):
        request = a_pass("full", [30, 12, 50], seed=step)
        [result] = run(engine, request)
        loss = their_loss(theirs, request)
        assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 30.0)
        optimizer.step()
        engine.optim_step("full", options)
    weights = engine.state("full")["weights"]
    for name, each in theirs.named_parameters():
        torch.testing.assert_close(weights[name], each, rtol=1e-3, atol=1e-4)


def test_adapter_gradients_are_those_of_peft(tmp_path: Path) -> None:
    import peft

    checkpoint = make_checkpoint(tmp_path / "llama", "llama")
    engine = Engine(checkpoint)
    engine.create_model("lora", Trained.ADAPTER, LoraOptions(rank=3, seed=5, alpha=8.0))
    for step in range(3):  # away from where B is 0, and with it A's gradient
        run(engine, a_pass("lora", [30, 12], seed=step))
        engine.optim_step("lora", AdamOptions(learning_rate=2e-2))
    request = a_pass("lora", [5, 40, 17], seed=9)
    run(engine, request)
    engine.export(engine.snapshot("lora"), tmp_path / "adapter", merged=False)
    theirs = peft.PeftModel.from_pretrained(reference(checkpoint), tmp_path / "adapter", is_trainable=True)
    their_loss(theirs, request).backward()
    expected = {name: each.grad for name, each in theirs.named_parameters() if each.requires_grad}
    ours = gradients(engine, "lora")
    assert len(ours) == len(expected) == 2 * (7 * 3 + 1)
    for name, each in ours.items():
        theirs_of_it = expected["base_model.model." + name.replace(".weight", ".default.weight")]
        largest = float(theirs_of_it.abs().max())
        torch.testing.assert_close(each, theirs_of_it, rtol=1e-3, atol=3e-4 * largest)


def test_several_targets_at_a_position(engine: Engine, checkpoint: Path) -> None:
    engine.create_model("lora", Trained.ADAPTER, LoraOptions(rank=3, seed=5))
    # One request may have both kinds.
    data = (a_datum(9, 1, width=4), a_datum(5, 2, width=4), a_datum(7, 3), a_datum(6, 4, width=2))
    request = Pass(model_id="lora", data=data, loss="cross_entropy")
    [result] = run(engine, request)
    theirs = reference(checkpoint)
    assert [output["logprobs"].shape for output in result.outputs] == [(9, 4), (5, 4), (7,), (6, 2)]
    for datum, output in zip(data, result.outputs, strict=True):
        expected = their_logprobs(theirs, datum).detach().numpy()
        np.testing.assert_allclose(output["logprobs"], expected, rtol=1e-4, atol=1e-5)
    assert result.metrics["loss:sum"] == pytest.approx(their_loss(theirs, request).item(), rel=1e-5)


def test_loss_of_ones_own_by_negative_weights_gives_its_gradient(engine: Engine, checkpoint: Path) -> None:
    def custom(logprobs: list[torch.Tensor]) -> torch.Tensor:
        return sum((each.square().mean() - 0.1 * each.exp().sum()) for each in logprobs)  # type: ignore[return-value]

    engine.create_model("full", Trained.ALL)
    request = a_pass("full", [12, 20], backward=False)
    [result] = run(engine, request)
    logprobs = [torch.tensor(output["logprobs"], requires_grad=True) for output in result.outputs]
    custom(logprobs).backward()
    data = tuple(
        Datum(tokens=datum.tokens, inputs={**datum.inputs, "weights": -each.grad.numpy()})  # type: ignore[union-attr]
        for datum, each in zip(request.data, logprobs, strict=True)
    )
    run(engine, Pass(model_id="full", data=data, loss="cross_entropy"))
    theirs = reference(checkpoint)
    custom([their_logprobs(theirs, datum) for datum in request.data]).backward()
    ours = gradients(engine, "full")
    for name, each in theirs.named_parameters():
        assert each.grad is not None
        torch.testing.assert_close(ours[name], each.grad, rtol=1e-3, atol=3e-4 * float(each.grad.abs().max()))


@pytest.mark.parametrize("trained", [Trained.ADAPTER, Trained.ALL])
def test_training_lowers_the_loss(engine: Engine, trained: Trained) -> None:
    engine.create_model("m", trained, LoraOptions(rank=8) if trained is Trained.ADAPTER else None)
    request = a_pass("m", [20, 30])
    for datum in request.data:
        datum.inputs["weights"][:] = 1
    found = []
    for _ in range(12):
        found.append(run(engine, request)[0].metrics["loss:sum"])
        engine.optim_step("m", AdamOptions(learning_rate=1e-2, normalization=Normalization.NUM_LOSS_TOKENS))
    assert found[-1] < 0.5 * found[0]


# Accumulation and steps


def test_passes_accumulate_by_sum_until_the_step(engine: Engine) -> None:
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4, seed=1))
    first, second = a_pass("a", [9, 30], seed=1), a_pass("a", [12], seed=2)
    run(engine, first)
    alone = gradients(engine, "a")
    run(engine, second)
    both = gradients(engine, "a")
    counts = engine.state("a")["gradients"]
    assert (counts["loss_tokens"], counts["sequences"]) == (51, 3)
    engine.optim_step("a", AdamOptions(learning_rate=0.0))
    assert engine.state("a")["gradients"]["tensors"] == {}
    run(engine, second)
    rest = gradients(engine, "a")
    assert_same_bits(both, {name: alone[name] + rest[name] for name in rest})


def test_two_passes_of_a_model_in_one_run_are_as_one_after_the_other(engine: Engine) -> None:
    for model_id in "ab":
        engine.create_model(model_id, Trained.ADAPTER, LoraOptions(rank=4, seed=1))
    together = run(engine, a_pass("a", [9, 30], seed=1), a_pass("a", [12], seed=2, loss="ppo"))
    apart = run(engine, a_pass("b", [9, 30], seed=1)) + run(engine, a_pass("b", [12], seed=2, loss="ppo"))
    assert [each.metrics for each in together] == [each.metrics for each in apart]
    assert_same_bits(gradients(engine, "a"), gradients(engine, "b"))


@pytest.mark.parametrize(
    ("normalization", "divisor"), [(Normalization.NUM_LOSS_TOKENS, 51), (Normalization.NUM_SEQUENCES, 3)]
)
def test_normalization_divides_by_what_was_summed_over(
    engine: Engine, normalization: Normalization, divisor: int
) -> None:
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4, seed=1))
    norms = []
    for wanted in (Normalization.NONE, normalization):
        run(engine, a_pass("a", [9, 30], seed=1), a_pass("a", [12], seed=2))
        options = AdamOptions(learning_rate=0.0, normalization=wanted, grad_norm_metrics="basic")
        norms.append(engine.optim_step("a", options)["grad_norm"])
    assert norms[0] / norms[1] == pytest.approx(divisor)


def test_step_without_gradients_changes_nothing_and_says_so(engine: Engine) -> None:
    """As after a forward pass, or twice in a row: no weight decays, no moment fades, no step is counted."""
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4))
    decays = replace(STEP, weight_decay=0.5)
    assert engine.optim_step("a", decays) == {SKIPPED: 1.0}
    run(engine, a_pass("a", [9]))
    assert SKIPPED not in engine.optim_step("a", decays)
    run(engine, a_pass("a", [9], backward=False))
    before = copy.deepcopy(engine.state("a"))
    assert engine.optim_step("a", decays) == {SKIPPED: 1.0}
    assert engine.optim_step("a", replace(decays, grad_norm_metrics="basic")) == {SKIPPED: 1.0, "grad_norm": 0.0}
    after = engine.state("a")
    assert after["optimizer"]["steps"] == before["optimizer"]["steps"] == 1
    assert after["gradients"] == before["gradients"]
    assert_same_bits(after["weights"], before["weights"])
    for moments in ("first_moments", "second_moments"):
        assert_same_bits(after["optimizer"][moments], before["optimizer"][moments])


def test_step_without_gradients_does_not_count_towards_accumulation(checkpoint: Path) -> None:
    engine = Engine(checkpoint, gradient_accumulation_steps=2)
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4))
    assert engine.optim_step("a", STEP) == {SKIPPED: 1.0}
    run(engine, a_pass("a", [9]))
    assert engine.optim_step("a", STEP) == {"accumulated_steps": 1.0}
    run(engine, a_pass("a", [9]))
    engine.optim_step("a", STEP)
    assert engine.models["a"].optimizer.steps == 1


def test_step_that_is_refused_changes_nothing(engine: Engine) -> None:
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4))
    run(engine, a_pass("a", [9]))
    before = copy.deepcopy(engine.state("a"))
    with pytest.raises(EngineError, match="learning_rate is -1"):
        engine.optim_step("a", AdamOptions(learning_rate=-1))
    after = engine.state("a")
    assert_same_bits(after["weights"], before["weights"])
    assert_same_bits(after["gradients"]["tensors"], before["gradients"]["tensors"])


def test_gradients_that_are_not_finite_are_dropped_by_the_step(engine: Engine) -> None:
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4))
    run(engine, a_pass("a", [9]))
    before = copy.deepcopy(engine.state("a")["weights"])
    next(iter(engine.models["a"].gradients.tensors.values()))[0, 0] = float("nan")
    with pytest.raises(EngineError, match="not finite"):
        engine.optim_step("a", STEP)
    assert_same_bits(engine.state("a")["weights"], before)
    run(engine, a_pass("a", [9]))
    engine.optim_step("a", STEP)


def test_job_can_make_several_optim_steps_one(checkpoint: Path) -> None:
    every_second, every = Engine(checkpoint, gradient_accumulation_steps=2), Engine(checkpoint)
    for each in (every_second, every):
        each.create_model("a", Trained.ADAPTER, LoraOptions(rank=4, seed=1))
    before = copy.deepcopy(every.state("a")["weights"])
    run(every_second, a_pass("a", [9, 30], seed=1))
    assert every_second.optim_step("a", STEP) == {"accumulated_steps": 1.0}
    assert_same_bits(every_second.state("a")["weights"], before)
    run(every_second, a_pass("a", [12], seed=2))
    assert every_second.optim_step("a", STEP) == {}
    run(every, a_pass("a", [9, 30], seed=1), a_pass("a", [12], seed=2))
    every.optim_step("a", STEP)
    assert_same_bits(every_second.state("a")["weights"], every.state("a")["weights"])


# Many models at once


def the_company(engine: Engine) -> list[Pass]:
    """Models of different kinds and ranks, and passes of each with a loss of its own."""
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4, seed=1))
    engine.create_model("b", Trained.ADAPTER, LoraOptions(rank=16, seed=2, train_mlp=False, alpha=16.0))
    engine.create_model("c", Trained.ADAPTER, LoraOptions(rank=1, seed=3, train_unembed=False))
    engine.create_model("d", Trained.ADAPTER, LoraOptions(rank=8, seed=4, train_attn=False))
    engine.create_model("frozen", Trained.NOTHING)
    engine.create_model("full", Trained.ALL)
    return [
        a_pass("b", [33, 2], seed=2, loss="ppo"),
        a_pass("a", [7, 64, 21, 3], seed=1),
        a_pass("frozen", [9], seed=5, backward=False),
        a_pass("c", [1], seed=3, loss="gspo"),
        a_pass("full", [18, 5], seed=6),
        a_pass("d", [50, 50, 50], seed=4, loss="importance_sampling"),
        a_pass("a", [11], seed=7, loss="dro"),
        a_pass("b", [12], seed=8, backward=False),
    ]


@pytest.mark.parametrize(
    ("threads", "pack_tokens"),
    [
        (1, 8192),
        (1, 8),
        (2, 70),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 70), (2, 8192), (2, 8))),
    ],
)
def test_models_in_company_get_the_bits_that_they_get_alone(checkpoint: Path, pack_tokens: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        company, alone = (Engine(checkpoint, pack_tokens=pack_tokens) for _ in range(2))
        passes = the_company(company)
        the_company(alone)
        for _ in range(2):  # the second time from weights that a step changed
            together = run(company, *passes)
            apart = [run(alone, each)[0] for each in passes]
            for ours, theirs in zip(together, apart, strict=True):
                assert ours.metrics == theirs.metrics
                for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
                    np.testing.assert_array_equal(mine["logprobs"], other["logprobs"])
            for model_id in ("a", "b", "c", "d", "full"):
                assert_same_bits(gradients(company, model_id), gradients(alone, model_id))
                for each in (company, alone):
                    each.optim_step(model_id, STEP)
    finally:
        torch.set_num_threads(before)


def test_many_adapters_make_the_products_on_the_base_that_one_makes(checkpoint: Path) -> None:
    ranks = (3, 5, 7, 11)
    """No other side of any product is so long: what has such a side is an adapter's own, and all else is the base's."""

    def products(adapters: int) -> tuple[Counter[Any], int]:
        engine = Engine(checkpoint)
        passes = []
        for number in range(adapters):
            lora = LoraOptions(rank=ranks[number % len(ranks)], seed=number)
            engine.create_model(str(number), Trained.ADAPTER, lora)
            passes.append(a_pass(str(number), [64 // adapters] * 2, seed=number))
        with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
            run(engine, *passes)
        made = [
            (event.name, *map(tuple, event.input_shapes))
            for event in profile.events()
            if event.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm")
        ]
        own = [each for each in made if {side for shape in each[1:] for side in shape} & set(ranks)]
        return Counter(made) - Counter(own), len(own)

    one, own_of_one = products(1)
    many, own_of_many = products(4)
    assert many == one
    # Seven layers thrice, forward and backward but for the gradient of the first three's inputs, which are embeddings;
    # logits forward, and once more and backward for the gradients.
    assert one.total() == 3 * 7 + (3 * 7 - 3) + 3
    # Two forward and four backward in each layer that is adapted; logits two more, as they are made twice.
    assert own_of_one == (3 * 7) * (2 + 4) - 3 + (2 + 4 + 2)
    assert own_of_many == 4 * own_of_one


def test_one_bad_request_spoils_no_other(engine: Engine, checkpoint: Path) -> None:
    passes = the_company(engine)
    bad = {
        0: Pass(model_id="a", data=passes[1].data, loss="grpo"),
        2: a_pass("nobody", [3]),
        3: a_pass("a", [5, 600]),
        5: a_pass("frozen", [5]),
        6: Pass(model_id="a", data=(), loss="cross_entropy"),
        9: Pass(model_id="b", data=(a_datum(4, 1), a_datum(4, 2, "ppo")), loss="cross_entropy"),
    }
    good = iter(passes)
    results = engine.run([bad.get(index) or next(good) for index in range(len(passes) + len(bad))])
    messages = {index: str(each) for index, each in enumerate(results) if isinstance(each, EngineError)}
    assert messages == {
        0: f"unknown loss function 'grpo'; there are {', '.join(losses.LOSSES)}",
        2: "there is no model 'nobody'",
        3: "datum 1 has 600 tokens; the context length is 512",
        5: "model 'frozen' is frozen: it computes forward passes, and there is nothing to train in it",
        6: "the request has no data",
        9: "datum 1 has an input 'advantages' that cross_entropy does not know; it knows target_tokens, weights"
        if "advantages" in messages[9]
        else "datum 1 has an input 'logprobs' that cross_entropy does not know; it knows target_tokens, weights",
    }
    alone = Engine(checkpoint)
    expected = run(alone, *the_company(alone))
    done = [each for each in results if isinstance(each, PassResult)]
    assert [each.metrics for each in done] == [each.metrics for each in expected]
    for model_id in ("a", "b", "c", "d", "full"):
        assert_same_bits(gradients(engine, model_id), gradients(alone, model_id))


def test_loss_that_is_not_finite_fails_its_request_alone(engine: Engine, checkpoint: Path) -> None:
    passes = the_company(engine)
    datum = a_datum(6, 1, "importance_sampling")
    datum.inputs["logprobs"][3] = -3000
    datum.inputs["advantages"][:] = 1
    data = (a_datum(5, 0, "importance_sampling"), datum)
    bad = Pass(model_id="a", data=data, loss="importance_sampling")
    failed, *results = engine.run([bad, *passes])
    assert str(failed) == "the loss of datum 1 is not finite; the request added nothing to the gradients"
    alone = Engine(checkpoint)
    expected = run(alone, *the_company(alone))
    assert [each.metrics for each in results] == [each.metrics for each in expected]  # type: ignore[union-attr]
    for model_id in ("a", "b", "c", "d", "full"):
        assert_same_bits(gradients(engine, model_id), gradients(alone, model_id))


def test_loss_without_weights_and_advantages_trains(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    unweighted = losses.LossFunction(formula=lambda tokens: losses.TokenLosses(-tokens.logprobs))
    monkeypatch.setitem(losses.LOSSES, "unweighted", unweighted)  # type: ignore[arg-type]
    for model_id in ("a", "b"):
        engine.create_model(model_id, Trained.ADAPTER, LoraOptions(rank=4, seed=1))
    data = tuple(Datum(tokens=np.arange(n), inputs={"target_tokens": np.arange(1, n + 1)}) for n in (5, 7))
    own, expected = run(
        engine,
        Pass(model_id="a", data=data, loss="unweighted"),
        Pass(model_id="b", data=data, loss="cross_entropy"),
    )
    assert own.metrics == expected.metrics
    assert own.metrics["loss_tokens:sum"] == 12
    by_token = replace(STEP, normalization=Normalization.NUM_LOSS_TOKENS)
    for model_id in ("a", "b"):
        engine.optim_step(model_id, by_token)
    assert_same_bits(engine.state("a")["weights"], engine.state("b")["weights"])


def test_optional_input_may_be_in_some_data_of_a_request(engine: Engine) -> None:
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4))
    full = a_datum(5, 1, "reinforce")
    bare = Datum(tokens=full.tokens, inputs={k: v for k, v in full.inputs.items() if k != "logprobs"})
    for data in ((full, bare), (bare, full)):
        [result] = run(engine, Pass(model_id="a", data=data, loss="reinforce"))
        np.testing.assert_allclose(*(each["logprobs"] for each in result.outputs), rtol=1e-5)


def test_error_within_a_pack_fails_whose_it_is(
    engine: Engine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tokens: losses.Tokens) -> losses.TokenLosses:
        raise ValueError("it broke")

    monkeypatch.setitem(losses.LOSSES, "broken", replace(losses.LOSSES["cross_entropy"], formula=broken))  # type: ignore[arg-type]
    computed, recomputed = engine_module.compute, []

    def noted(chunks: Any, *, recompute: float | None = None, **options: Any) -> Any:
        recomputed.append(recompute)
        return computed(chunks, recompute=recompute, **options)

    monkeypatch.setattr(engine_module, "compute", noted)
    passes = the_company(engine)
    bad = Pass(model_id="a", data=passes[1].data, loss="broken")
    results = engine.run([*passes[:1], bad, *passes[1:]])
    failed = results.pop(1)
    assert isinstance(failed, EngineError)
    assert (str(failed), failed.blame) == ("ValueError: it broke", Blame.SERVER)
    # As much is computed again as the memory asks for, as ever.
    assert set(recomputed) == {None}
    alone = Engine(checkpoint)
    expected = run(alone, *the_company(alone))
    assert [each.metrics for each in results] == [each.metrics for each in expected]  # type: ignore[union-attr]
    for model_id in ("a", "b", "c", "d", "full"):
        assert_same_bits(gradients(engine, model_id), gradients(alone, model_id))


def test_pass_that_fails_midway_adds_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(checkpoint, pack_tokens=8)
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4))
    computed = engine_module.compute
    calls = 0

    def fails_at_the_third(chunks: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("gone")
        return computed(chunks, **options)

    monkeypatch.setattr(engine_module, "compute", fails_at_the_third)
    [failed] = engine.run([a_pass("a", [8, 8, 8, 8])])
    assert str(failed) == "RuntimeError: gone"
    assert calls == 3
    assert engine.optim_step("a", STEP) == {SKIPPED: 1.0}


def test_pack_without_room_in_memory_is_computed_in_parts(
    engine: Engine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = engine_module.compute

    def small(chunks: Any, *, recompute: float | None = None, **options: Any) -> Any:
        if not recompute:
            raise torch.OutOfMemoryError("no room")
        return computed(chunks, recompute=recompute, **options)

    monkeypatch.setattr(engine_module, "compute", small)
    results = run(engine, *the_company(engine))
    monkeypatch.setattr(engine_module, "compute", computed)
    alone = Engine(checkpoint)
    expected = run(alone, *the_company(alone))
    assert [each.metrics for each in results] == [each.metrics for each in expected]
    for model_id in ("a", "b", "c", "d", "full"):
        assert_same_bits(gradients(engine, model_id), gradients(alone, model_id))


# What is refused


def a_token(token: int) -> Datum:
    return Datum(tokens=np.array([1, token]), inputs={"target_tokens": np.array([1, 2])})


@pytest.mark.parametrize(
    ("datum", "message"),
    [
        (a_token(272), "the tokens of datum 0 have a token 272; the model's vocabulary has 272, from 0 on"),
        (a_token(-1), "the tokens of datum 0 have a token -1"),
        (
            Datum(tokens=np.array([1]), inputs={"target_tokens": np.array([300])}),
            "target_tokens of datum 0 have a token",
        ),
        (Datum(tokens=np.array([], np.int64), inputs={"target_tokens": np.array([1])}), "datum 0 has no tokens"),
        (
            Datum(tokens=np.array([[1]]), inputs={"target_tokens": np.array([1])}),
            "datum 0: its tokens are not a sequence of whole",
        ),
        (
            Datum(tokens=np.array([1.0]), inputs={"target_tokens": np.array([1])}),
            "datum 0: its tokens are not a sequence of whole",
        ),
    ],
)
def test_tokens_that_cannot_be_are_refused(engine: Engine, datum: Datum, message: str) -> None:
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4))
    [refused] = engine.run([Pass(model_id="a", data=(datum,), loss="cross_entropy")])
    assert isinstance(refused, EngineError)
    assert message in str(refused)
    assert refused.blame is Blame.USER


def test_context_length_is_that_of_the_job(checkpoint: Path) -> None:
    engine = Engine(checkpoint, max_context_length=10)
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4))
    run(engine, a_pass("a", [10]))
    [refused] = engine.run([a_pass("a", [11])])
    assert str(refused) == "datum 0 has 11 tokens; the context length is 10"
    with pytest.raises(EngineError, match="max_context_length is 1000; the model was made for 1 to 512"):
        Engine(checkpoint, max_context_length=1000)


def test_models_that_cannot_be_are_refused(engine: Engine, checkpoint: Path) -> None:
    engine.create_model("a", Trained.ADAPTER, LoraOptions(rank=4))
    with pytest.raises(EngineError, match="there is a model 'a' already"):
        engine.create_model("a", Trained.NOTHING)
    with pytest.raises(EngineError, match="model 'b': an adapter needs LoRA options"):
        engine.create_model("b", Trained.ADAPTER)
    with pytest.raises(EngineError, match="model 'b': an adapter needs LoRA options, and only an adapter can"):
        engine.create_model("b", Trained.ALL, LoraOptions(rank=4))
    with pytest.raises(EngineError, match="rank is at least 1"):
        engine.create_model("b", Trained.ADAPTER, LoraOptions(rank=0))
    assert list(engine.models) == ["a"]
    with pytest.raises(EngineError, match="gradient_accumulation_steps is 0"):
        Engine(checkpoint, gradient_accumulation_steps=0)


def test_frozen_model_steps_no_step_and_unloads(engine: Engine) -> None:
    engine.create_model("f", Trained.NOTHING)
    with pytest.raises(EngineError, match="model 'f' is frozen: it has nothing to step"):
        engine.optim_step("f", STEP)
    engine.unload("f")
    for call in (engine.unload, engine.state, engine.snapshot):
        with pytest.raises(EngineError, match="there is no model 'f'"):
            call("f")


# Saving and loading


def through_files(state: dict[str, Any], tmp_path: Path) -> Any:
    (tmp_path / "state").mkdir()
    trees.write(state, tmp_path / "state")
    return trees.read(tmp_path / "state")


def rounds(engine: Engine, model_id: str, first: int, last: int) -> list[float]:
    found = []
    for step in range(first, last):
        found += [each.metrics["loss:sum"] for each in run(engine, a_pass(model_id, [20, 9], seed=step))]
        found += [each.metrics["loss:sum"] for each in run(engine, a_pass(model_id, [14], seed=50 + step, loss="ppo"))]
        engine.optim_step(model_id, STEP)
    return found


KINDS: dict[str, Callable[[Engine, str], None]] = {
    "adapter": lambda engine, model_id: engine.create_model(model_id, Trained.ADAPTER, LoraOptions(rank=4, seed=3)),
    "all": lambda engine, model_id: engine.create_model(model_id, Trained.ALL),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_training_gives_the_bits_of_an_uninterrupted_one(
    checkpoint: Path, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    straight = Engine(checkpoint, dtype=dtype)
    KINDS[kind](straight, "m")
    rounds(straight, "m", 0, 3)
    run(straight, a_pass("m", [17], seed=77))
    saved = through_files(straight.state("m"), tmp_path)
    uninterrupted = rounds(straight, "m", 3, 6)

    resumed = Engine(checkpoint, dtype=dtype)
    KINDS[kind](resumed, "m")
    resumed.load_state("m", saved, optimizer=True)
    assert rounds(resumed, "m", 3, 6) == uninterrupted
    ours, theirs = resumed.state("m"), straight.state("m")
    assert_same_bits(ours["weights"], theirs["weights"])
    assert_same_bits(ours["optimizer"]["second_moments"], theirs["optimizer"]["second_moments"])
    assert ours["optimizer"]["steps"] == theirs["optimizer"]["steps"] == 6


def test_state_without_optimizer_begins_a_new_one(engine: Engine, tmp_path: Path) -> None:
    KINDS["adapter"](engine, "m")
    rounds(engine, "m", 0, 2)
    run(engine, a_pass("m", [17], seed=77))
    saved = through_files(engine.state("m"), tmp_path)
    KINDS["adapter"](engine, "n")
    rounds(engine, "n", 7, 8)
    run(engine, a_pass("n", [17], seed=77))
    engine.load_state("n", saved, optimizer=False)
    loaded = engine.state("n")
    assert_same_bits(loaded["weights"], saved["weights"])
    assert loaded["optimizer"]["steps"] == 0
    assert loaded["gradients"] == {"tensors": {}, "loss_tokens": 0, "sequences": 0, "waiting": 0}


def test_state_keeps_where_between_steps_a_job_was(checkpoint: Path, tmp_path: Path) -> None:
    engine, other = (Engine(checkpoint, gradient_accumulation_steps=2) for _ in range(2))
    for each in (engine, other):
        KINDS["adapter"](each, "m")
    run(engine, a_pass("m", [17]))
    engine.optim_step("m", STEP)
    other.load_state("m", through_files(engine.state("m"), tmp_path), optimizer=True)
    for each in (engine, other):
        run(each, a_pass("m", [9], seed=2))
        assert each.optim_step("m", STEP) == {}
    assert_same_bits(engine.state("m")["weights"], other.state("m")["weights"])


def test_state_of_another_model_is_refused_and_changes_nothing(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    KINDS["adapter"](engine, "m")
    before = copy.deepcopy(engine.state("m"))
    engine.create_model("rank 8", Trained.ADAPTER, LoraOptions(rank=8))
    engine.create_model("alpha", Trained.ADAPTER, LoraOptions(rank=4, alpha=1.0))
    engine.create_model("full", Trained.ALL)
    other = Engine(make_checkpoint(tmp_path_factory.mktemp("other"), hidden_size=32))
    KINDS["adapter"](other, "m")
    for state, message in (
        (
            engine.state("rank 8"),
            "the saved adapter has rank 8, and model 'm' has 4: create the model with the options",
        ),
        (engine.state("alpha"), "the saved adapter has alpha 1.0, and model 'm' has 32.0"),
        (engine.state("full"), "of a model with all parameters trained, and model 'm' is one with an adapter"),
        (other.state("m"), "of another base model: .* is \\["),
        (snapshot_state(engine, engine.snapshot("m")), "weights alone, and no optimizer's state"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.load_state("m", state, optimizer=True)
    assert_same_bits(engine.state("m")["weights"], before["weights"])


# Snapshots


def snapshot_state(engine: Engine, snapshot: WeightsSnapshot) -> dict[str, Any]:
    """A snapshot as a tree, for `Engine.snapshot_from`; its tensors are the snapshot's own."""
    if snapshot.adapter is not None:
        weights = {name: each.detach() for name, each in snapshot.adapter.named_parameters()}
        return weights_state(Trained.ADAPTER, snapshot.adapter.options, weights)
    if snapshot.transformer is engine.base:
        return weights_state(Trained.NOTHING, None, {})
    return weights_state(Trained.ALL, None, dict(snapshot.transformer.named_parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_snapshots_stay_as_they_were_taken(engine: Engine, kind: str, tmp_path: Path) -> None:
    KINDS[kind](engine, "m")
    rounds(engine, "m", 0, 2)
    snapshot = engine.snapshot("m")
    before = copy.deepcopy(snapshot_state(engine, snapshot))
    assert_same_bits(before["weights"], engine.state("m")["weights"])
    rounds(engine, "m", 2, 5)
    assert_same_bits(snapshot_state(engine, snapshot)["weights"], before["weights"])
    assert not torch.equal(*(next(iter(each["weights"].values())) for each in (before, engine.state("m"))))
    loaded = engine.snapshot_from(through_files(before, tmp_path))
    assert_same_bits(snapshot_state(engine, loaded)["weights"], before["weights"])
    engine.unload("m")
    assert_same_bits(snapshot_state(engine, snapshot)["weights"], before["weights"])


def test_snapshot_of_a_training_state_has_its_weights(engine: Engine) -> None:
    KINDS["adapter"](engine, "m")
    rounds(engine, "m", 0, 2)
    snapshot = engine.snapshot_from(engine.state("m"))
    before = copy.deepcopy(engine.state("m")["weights"])
    rounds(engine, "m", 2, 3)
    assert_same_bits(snapshot_state(engine, snapshot)["weights"], before)


def test_snapshot_of_the_base_is_the_base(engine: Engine) -> None:
    engine.create_model("frozen", Trained.NOTHING)
    for snapshot in (
        engine.snapshot(None),
        engine.snapshot("frozen"),
        engine.snapshot_from(snapshot_state(engine, engine.snapshot(None))),
    ):
        assert snapshot.transformer is engine.base
        assert snapshot.adapter is None
