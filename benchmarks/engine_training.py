"""Training by the engine, as `engine_tokens` measures it; and the model that all of its cases load."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_work import (
    BATCHES,
    LEARNING_RATE,
    RANK,
    NotAvailableError,
    Outcome,
    Setting,
    Step,
    measured,
    tokens_of,
)
from benchmarks.kernels import profiled
from benchmarks.models import Shape, make_model
from trainmaster.engine.engine import Engine
from trainmaster.engine.types import AdamOptions, Datum, EngineError, LoraOptions, Pass, PassResult, Trained


def make_checkpoint(setting: Setting, *, shape: Mapping[str, Any]) -> Outcome:
    """The model that all others load. It is there as a whole or not at all."""
    began = time.perf_counter()
    target = Path(setting.model)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = make_model(target.with_name(f"{target.name}.{os.getpid()}"), Shape(**shape))
    made.rename(target)
    return Outcome(tokens=0, seconds=time.perf_counter() - began)


def train_engine(
    setting: Setting,
    *,
    data: str,
    adapters: int = 1,
    unembedding: bool = False,
    fp8: bool = False,
    full: bool = False,
    rank: int = RANK,
) -> Outcome:
    """Steps of the engine; with several adapters, each has its share of the sequences."""
    with engine_of(setting, fp8=fp8) as engine:
        step = _steps(setting, engine, data=data, adapters=adapters, unembedding=unembedding, full=full, rank=rank)
        return measured(setting, step)


def profile_training(setting: Setting, *, trace: str | None = None) -> Outcome:
    """One step of the engine over sequences of mixed lengths."""
    with engine_of(setting) as engine:
        step = _steps(setting, engine, data="mixed")
        for number in range(BATCHES):
            step(number)
        began = setting.begin()
        with profiled(cuda=setting.cuda, trace=trace) as profile:
            taken = step(0)
            setting.settle()
        return Outcome(tokens=taken.tokens, seconds=setting.end(began), profile=profile())


def _steps(
    setting: Setting,
    engine: Engine,
    *,
    data: str,
    adapters: int = 1,
    unembedding: bool = False,
    full: bool = False,
    rank: int = RANK,
) -> Callable[[int], Step]:
    names = [f"model-{number}" for number in range(adapters)]
    for seed, name in enumerate(names):
        lora = None if full else LoraOptions(rank=rank, seed=seed, train_unembed=unembedding)
        engine.create_model(name, Trained.ALL if full else Trained.ADAPTER, lora)
    batches = setting.batches(data)

    def step(number: int) -> Step:
        rows = batches[number]
        passes = [
            Pass(model_id=name, data=tuple(map(datum, rows[index::adapters])), loss="cross_entropy")
            for index, name in enumerate(names)
        ]
        results = [good(result) for result in engine.run(passes)]
        for name in names:
            engine.optim_step(name, AdamOptions(learning_rate=LEARNING_RATE))
        return Step(tokens_of(rows), sum(result.metrics["loss:sum"] for result in results))

    return step


@contextlib.contextmanager
def engine_of(setting: Setting, *, fp8: bool = False) -> Iterator[Engine]:
    """An engine without models, which are unloaded again in the end. It is loaded once in a process.

    `fp8`: its frozen base model has weights of 8 bits.
    """
    engine = _loaded(setting, fp8)
    try:
        yield engine
    finally:
        for name in list(engine.models):
            engine.unload(name)


@functools.lru_cache(maxsize=1)
def _loaded(setting: Setting, fp8: bool) -> Engine:
    options: dict[str, Any] = {}
    if fp8:
        if "fp8" not in inspect.signature(Engine.__init__).parameters:
            raise NotAvailableError("the engine has no option `fp8`")
        options["fp8"] = True
    try:
        return Engine(
            Path(setting.model),
            device=setting.device,
            dtype=setting.torch_dtype,
            max_context_length=max(setting.longest, setting.equal, setting.prompt + setting.new_tokens),
            pack_tokens=setting.together,
            **options,
        )
    except EngineError as error:
        if not fp8:
            raise
        raise NotAvailableError(str(error)) from error


def datum(row: np.ndarray) -> Datum:
    weights = np.ones(len(row) - 1, np.float32)
    return Datum(tokens=row[:-1], inputs={"target_tokens": row[1:], "weights": weights})


def good(result: PassResult | EngineError) -> PassResult:
    if isinstance(result, EngineError):
        raise result
    return result
