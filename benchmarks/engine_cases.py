"""What `engine_tokens` measures, one case to a process: `python -m benchmarks.engine_cases DOCUMENT OUTCOME`.

Training and sampling by the engine, and by what its users would write instead: a plain loop over transformers and PEFT,
and transformers' `generate`. All cases of one kind get the same tokens, and rows that only fill up a batch never count.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_peers import sample_generate, train_peft
from benchmarks.engine_work import (
    BATCHES,
    LEARNING_RATE,
    RANK,
    Outcome,
    Setting,
    Step,
    measured,
    peak,
    prompts_of,
    tokens_of,
)
from benchmarks.kernels import profiled
from benchmarks.models import Shape, make_model
from trainmaster.engine.engine import Engine
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import (
    AdamOptions,
    Datum,
    EngineError,
    LoraOptions,
    Pass,
    PassResult,
    SampleRequest,
    Trained,
)

PROFILED_STEPS = 16
"""Of sampling."""


def main(document: str, outcome: Path) -> None:
    """Run one case, and write what came of it."""
    asked = json.loads(document)
    found = CASES[asked["program"]](Setting(**asked["setting"]), **asked["options"])
    outcome.write_text(json.dumps(dataclasses.asdict(found)))


# Training


def train_engine(setting: Setting, *, data: str, adapters: int = 1, unembedding: bool = False) -> Outcome:
    """Steps of the engine; with several adapters, each has its share of the sequences."""
    step = _engine_steps(setting, data=data, adapters=adapters, unembedding=unembedding)
    return measured(setting, step)


def _engine_steps(setting: Setting, *, data: str, adapters: int, unembedding: bool) -> Callable[[int], Step]:
    engine = _engine(setting)
    names = [f"model-{number}" for number in range(adapters)]
    for seed, name in enumerate(names):
        engine.create_model(name, Trained.ADAPTER, LoraOptions(rank=RANK, seed=seed, train_unembed=unembedding))
    batches = setting.batches(data)

    def step(number: int) -> Step:
        rows = batches[number]
        passes = [
            Pass(model_id=name, data=tuple(map(_datum, rows[index::adapters])), loss="cross_entropy")
            for index, name in enumerate(names)
        ]
        results = [_good(result) for result in engine.run(passes)]
        for name in names:
            engine.optim_step(name, AdamOptions(learning_rate=LEARNING_RATE))
        return Step(tokens_of(rows), sum(result.metrics["loss:sum"] for result in results))

    return step


# Sampling


def sample_engine(setting: Setting, *, count: int, adapters: int = 0) -> Outcome:
    """So many continuations at once, by the base model or by adapters in turn; all of it once before, to warm up."""
    sampler, snapshots = _sampler(setting, adapters)
    _sample(sampler, snapshots, prompts_of(setting, count), max_tokens=setting.new_tokens)
    if setting.cuda:
        torch.cuda.reset_peak_memory_stats()
    setting.settle()
    began = time.perf_counter()
    tokens = _sample(sampler, snapshots, prompts_of(setting, count), max_tokens=setting.new_tokens)
    setting.settle()
    return Outcome(tokens=tokens, seconds=time.perf_counter() - began, peak_bytes=peak(setting))


def _sampler(setting: Setting, adapters: int) -> tuple[Sampler, list[WeightsSnapshot]]:
    engine = _engine(setting)
    for number in range(adapters):
        engine.create_model(
            f"model-{number}", Trained.ADAPTER, LoraOptions(rank=RANK, seed=number, train_unembed=False)
        )
    snapshots = [engine.snapshot(name) for name in engine.models] or [engine.snapshot(None)]
    return Sampler(engine.base, Path(setting.model), context_length=setting.prompt + setting.new_tokens), snapshots


def _sample(
    sampler: Sampler, snapshots: Sequence[WeightsSnapshot], prompts: Sequence[np.ndarray], *, max_tokens: int
) -> int:
    """How many tokens there are once all have as many as they may."""
    for number, prompt in enumerate(prompts):
        request = SampleRequest(
            request_id=str(number), prompt=tuple(prompt.tolist()), max_tokens=max_tokens, seed=number, stop_tokens=()
        )
        sampler.submit(request, snapshots[number % len(snapshots)])
    tokens = 0
    while sampler.pending:
        for _, result in sampler.step():
            if isinstance(result, EngineError):
                raise result
            tokens += sum(len(sequence.tokens) for sequence in result.sequences)
    if tokens != len(prompts) * max_tokens:
        raise RuntimeError(f"{tokens} tokens came, not {len(prompts)} times {max_tokens}")
    return tokens


# Where the time goes


def profile_training(setting: Setting, *, trace: str | None = None) -> Outcome:
    """One step of the engine over sequences of mixed lengths."""
    step = _engine_steps(setting, data="mixed", adapters=1, unembedding=False)
    for number in range(BATCHES):
        step(number)
    setting.settle()
    began = time.perf_counter()
    with profiled(cuda=setting.cuda, trace=trace) as profile:
        taken = step(0)
        setting.settle()
    return Outcome(tokens=taken.tokens, seconds=time.perf_counter() - began, profile=profile())


def profile_sampling(setting: Setting, *, count: int, trace: str | None = None) -> Outcome:
    """Steps in the middle of so many continuations."""
    sampler, snapshots = _sampler(setting, 0)
    for number, prompt in enumerate(prompts_of(setting, count)):
        request = SampleRequest(
            request_id=str(number), prompt=tuple(prompt.tolist()), max_tokens=setting.new_tokens, stop_tokens=()
        )
        sampler.submit(request, snapshots[0])
    # Prompts are read in pieces first; then all continuations run.
    for _ in range(setting.new_tokens // 2):
        sampler.step()
    steps = min(PROFILED_STEPS, setting.new_tokens // 4)
    setting.settle()
    began = time.perf_counter()
    with profiled(cuda=setting.cuda, trace=trace) as profile:
        for _ in range(steps):
            sampler.step()
        setting.settle()
    return Outcome(tokens=count * steps, seconds=time.perf_counter() - began, profile=profile())


def make_checkpoint(setting: Setting, *, shape: Mapping[str, Any]) -> Outcome:
    """The model that all others load. It is there as a whole or not at all."""
    began = time.perf_counter()
    target = Path(setting.model)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = make_model(target.with_name(f"{target.name}.{os.getpid()}"), Shape(**shape))
    made.rename(target)
    return Outcome(tokens=0, seconds=time.perf_counter() - began)


# Used by several


def _engine(setting: Setting) -> Engine:
    longest = max(setting.longest, setting.equal, setting.prompt + setting.new_tokens)
    return Engine(
        Path(setting.model),
        device=setting.device,
        dtype=setting.torch_dtype,
        max_context_length=longest,
        pack_tokens=setting.together,
    )


def _datum(row: np.ndarray) -> Datum:
    weights = np.ones(len(row) - 1, np.float32)
    return Datum(tokens=row[:-1], inputs={"target_tokens": row[1:], "weights": weights})


def _good(result: PassResult | EngineError) -> PassResult:
    if isinstance(result, EngineError):
        raise result
    return result


CASES: Mapping[str, Callable[..., Outcome]] = {
    each.__name__: each
    for each in (
        make_checkpoint,
        train_engine,
        train_peft,
        sample_engine,
        sample_generate,
        profile_training,
        profile_sampling,
    )
}

if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
