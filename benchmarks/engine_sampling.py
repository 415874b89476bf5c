"""Sampling by the engine, as `engine_tokens` measures it, and training together with it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import engine_curves
from benchmarks.engine_training import datum, engine_of, good
from benchmarks.engine_work import LEARNING_RATE, RANK, Outcome, Setting, peak
from benchmarks.kernels import profiled
from trainmaster.engine.engine import Engine
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import (
    AdamOptions,
    Datum,
    EngineError,
    LoraOptions,
    Pass,
    SampledSequence,
    SampleRequest,
    Trained,
)

PROFILED_STEPS = 16
ROUNDS = 7
"""Of what takes some tens of milliseconds: the median is told."""
_AGREED_SEQUENCES = 16
_SAME_LOGPROBS = {"float32": 1e-5}
"""How far the logprobs of sampling and of training may lie apart on average, where rounding does not decide it."""


def sample_engine(setting: Setting, *, count: int, adapters: int = 0, fp8: bool = False) -> Outcome:
    """So many continuations at once, by the base model or by adapters in turn."""
    with engine_of(setting, fp8=fp8) as engine:
        snapshots = _snapshots(engine, adapters)
        sampler = _sampler(setting, engine)
        _sample(sampler, snapshots, setting.prompts(count, seed=0), max_tokens=setting.warm_tokens)
        began = setting.begin()
        found = _sample(sampler, snapshots, setting.prompts(count, seed=1), max_tokens=setting.new_tokens)
        return Outcome(tokens=_count(found), seconds=setting.end(began), peak_bytes=peak(setting))


def first_tokens_engine(setting: Setting, *, count: int, prompts: str) -> Outcome:
    """The time until all of so many requests have their first tokens, after long prompts.

    Args:
        prompts: `different`; `same`: one prompt, which is new; `again`: the same once more.
    """
    with engine_of(setting) as engine:
        snapshots = _snapshots(engine, 0)
        sampler = _sampler(setting, engine, context=setting.shared_prompt + setting.new_tokens)
        times = []
        for number in range(1 + (2 if prompts == "different" else ROUNDS)):
            distinct = count if prompts == "different" else 1
            seed = 0 if prompts == "again" else number
            asked = setting.prompts(distinct, seed=seed, length=setting.shared_prompt) * (count // distinct)
            began = setting.begin()
            _sample(sampler, snapshots, asked, max_tokens=1)
            times.append(setting.end(began))
        return _median_ms(times[1:], tokens=count, note=f"{count} prompts of {setting.shared_prompt:,} tokens")


def first_token_after_step_engine(setting: Setting) -> Outcome:
    """From the call of `optim_step` to the first token that was drawn from the new weights."""
    with engine_of(setting) as engine:
        engine.create_model("model", Trained.ADAPTER, LoraOptions(rank=RANK, seed=0, train_unembed=False))
        sampler = _sampler(setting, engine)
        rows = setting.batches("equal")[0][:2]
        times = []
        for number, prompt in enumerate(setting.prompts(2 + ROUNDS, seed=0)):
            _train(engine, "model", [datum(row) for row in rows], "cross_entropy")
            began = setting.begin()
            engine.optim_step("model", AdamOptions(learning_rate=LEARNING_RATE))
            _sample(sampler, [engine.snapshot("model")], [prompt], max_tokens=1)
            if number >= 2:
                times.append(setting.end(began))
        return _median_ms(times, tokens=1, note=f"a prompt of {setting.prompt} tokens")


def agreement_engine(setting: Setting, *, trained: str, fp8: bool = False, exact: bool = False) -> Outcome:
    """The mean difference of the logprobs that sampling gave to its tokens and training gives to them.

    Args:
        trained: `nothing`: the model has random weights, whose results change the most with each rounding; `adapter`:
            one on top of them; `all`: the model has learnt a language, and continues texts of it.
        exact: Tell how far training lies from training in 32 bits, too: that much is rounding.
    """
    with engine_of(setting, fp8=fp8) as engine:
        lora = LoraOptions(rank=RANK, seed=0, train_unembed=False) if trained == "adapter" else None
        engine.create_model("model", Trained[{"nothing": "NOTHING", "adapter": "ADAPTER", "all": "ALL"}[trained]], lora)
        prompts = setting.prompts(_AGREED_SEQUENCES, seed=0)
        if trained == "adapter":
            for rows in setting.batches("equal"):
                # A new adapter adds nothing: half of its factors are zero.
                _train(engine, "model", [datum(row) for row in rows[:2]], "cross_entropy")
                engine.optim_step("model", AdamOptions(learning_rate=1e-3))
        elif trained == "all":
            for texts in engine_curves.texts(setting):
                _train(engine, "model", list(map(datum, texts)), "cross_entropy")
                engine.optim_step("model", engine_curves.OPTIONS)
            prompts = [text[: setting.prompt] for text in np.concatenate(list(engine_curves.texts(setting)))]
            prompts = prompts[:_AGREED_SEQUENCES]
        sampler = _sampler(setting, engine)
        began = setting.begin()
        found = _sample(sampler, [engine.snapshot("model")], prompts, max_tokens=setting.new_tokens)
        rows = [np.concatenate([prompts[number], each.tokens]) for number, [each] in found.items()]
        logprobs = _logprobs(setting, engine, rows)
        sampled = np.concatenate([each.logprobs for [each] in found.values()])
        apart = np.abs(logprobs - sampled)
        seconds = setting.end(began)
        note = f"at most {apart.max():.2g}, tokens of {-sampled.mean():.3g} nats"
    if exact:
        wide = Engine(
            Path(setting.model), device=setting.device, max_context_length=setting.prompt + setting.new_tokens
        )
        wide.create_model("model", Trained.NOTHING, None)
        note += f"; from 32 bits: training {np.abs(_logprobs(setting, wide, rows) - logprobs).mean():.3g}"
    return Outcome(
        tokens=_count(found),
        seconds=seconds,
        value=float(apart.mean()),
        unit="nats",
        limit=_SAME_LOGPROBS.get(setting.dtype),
        note=note,
    )


def _logprobs(setting: Setting, engine: Engine, rows: Sequence[np.ndarray]) -> np.ndarray:
    """Those of training, of what follows the prompts."""
    [result] = engine.run([Pass(model_id="model", data=tuple(map(datum, rows)), loss="cross_entropy", backward=False)])
    return np.concatenate([output["logprobs"][setting.prompt - 1 :] for output in good(result).outputs])


def grpo_engine(setting: Setting) -> Outcome:
    """A whole step: samples of each prompt by a snapshot, and one training step on all of them."""
    with engine_of(setting) as engine:
        engine.create_model("policy", Trained.ADAPTER, LoraOptions(rank=RANK, seed=0, train_unembed=False))
        sampler = _sampler(setting, engine)

        def step(seed: int, new_tokens: int) -> tuple[float, float, int]:
            prompts = setting.prompts(setting.groups, seed=seed)
            began = setting.begin()
            found = _sample(
                sampler, [engine.snapshot("policy")], prompts, max_tokens=new_tokens, samples=setting.group_size
            )
            sampled_s = setting.end(began)
            advantages = np.random.default_rng(seed).normal(size=(len(prompts), setting.group_size))
            data = [
                _graded(prompts[number], sequence, advantage)
                for number, sequences in found.items()
                for sequence, advantage in zip(sequences, advantages[number], strict=True)
            ]
            _train(engine, "policy", data, "importance_sampling")
            engine.optim_step("policy", AdamOptions(learning_rate=LEARNING_RATE))
            return sampled_s, setting.end(began), _count(found)

        step(0, setting.warm_tokens)
        sampled_s, seconds, tokens = step(1, setting.new_tokens)
        return Outcome(
            tokens=tokens,
            seconds=seconds,
            peak_bytes=peak(setting),
            sampled_s=sampled_s,
            note=f"{sampled_s:.1f} s of sampling, {seconds - sampled_s:.1f} s of training",
        )


def profile_sampling(setting: Setting, *, count: int, trace: str | None = None) -> Outcome:
    """Steps in the middle of so many continuations."""
    with engine_of(setting) as engine:
        sampler = _sampler(setting, engine)
        for number, prompt in enumerate(setting.prompts(count, seed=0)):
            sampler.submit(_request(number, prompt, setting.new_tokens), engine.snapshot(None))
        # Prompts are read in pieces first; then all continuations run.
        for _ in range(setting.new_tokens // 2):
            sampler.step()
        steps = min(PROFILED_STEPS, setting.new_tokens // 4)
        began = setting.begin()
        with profiled(cuda=setting.cuda, trace=trace) as profile:
            for _ in range(steps):
                sampler.step()
            setting.settle()
        return Outcome(tokens=count * steps, seconds=setting.end(began), profile=profile())


# Used by several


def _snapshots(engine: Engine, adapters: int) -> list[WeightsSnapshot]:
    for number in range(adapters):
        engine.create_model(
            f"model-{number}", Trained.ADAPTER, LoraOptions(rank=RANK, seed=number, train_unembed=False)
        )
    return [engine.snapshot(name) for name in engine.models] or [engine.snapshot(None)]


def _sampler(setting: Setting, engine: Engine, context: int | None = None) -> Sampler:
    return Sampler(engine.base, Path(setting.model), context_length=context or setting.prompt + setting.new_tokens)


def _request(number: int, prompt: np.ndarray, max_tokens: int, samples: int = 1) -> SampleRequest:
    return SampleRequest(
        request_id=str(number),
        prompt=tuple(prompt.tolist()),
        num_samples=samples,
        max_tokens=max_tokens,
        seed=number,
        stop_tokens=(),
    )


def _sample(
    sampler: Sampler,
    snapshots: Sequence[WeightsSnapshot],
    prompts: Sequence[np.ndarray],
    *,
    max_tokens: int,
    samples: int = 1,
) -> dict[int, tuple[SampledSequence, ...]]:
    """The continuations of each prompt, by its number, once all have as many tokens as they may."""
    for number, prompt in enumerate(prompts):
        sampler.submit(_request(number, prompt, max_tokens, samples), snapshots[number % len(snapshots)])
    found: dict[int, tuple[SampledSequence, ...]] = {}
    while sampler.pending:
        for request_id, result in sampler.step():
            if isinstance(result, EngineError):
                raise result
            found[int(request_id)] = result.sequences
    if _count(found) != len(prompts) * samples * max_tokens:
        raise RuntimeError(f"{_count(found)} tokens came, not {len(prompts)} times {samples} times {max_tokens}")
    return found


def _count(found: dict[int, tuple[SampledSequence, ...]]) -> int:
    return sum(len(sequence.tokens) for sequences in found.values() for sequence in sequences)


def _graded(prompt: np.ndarray, sequence: SampledSequence, advantage: float) -> Datum:
    row = np.concatenate([prompt, sequence.tokens])
    new = np.arange(1, len(row)) >= len(prompt)
    logprobs, advantages = np.zeros(len(new), np.float32), np.where(new, advantage, 0).astype(np.float32)
    logprobs[new] = sequence.logprobs
    return Datum(tokens=row[:-1], inputs={"target_tokens": row[1:], "logprobs": logprobs, "advantages": advantages})


def _train(engine: Engine, name: str, data: Sequence[Datum], loss: str) -> None:
    [result] = engine.run([Pass(model_id=name, data=tuple(data), loss=loss)])
    good(result)


def _median_ms(times: Sequence[float], *, tokens: int, note: str) -> Outcome:
    spread = f"{min(times) * 1000:,.0f} to {max(times) * 1000:,.0f} ms in {len(times)} rounds"
    median = statistics.median(times)
    return Outcome(tokens=tokens, seconds=median, value=median * 1000, unit="ms", note=f"{note}, {spread}")
