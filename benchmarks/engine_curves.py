"""Losses of many steps, by the engine and by a loop over PEFT, from the same adapter and on the same batches.

The texts are random walks, in which every token has four successors: a model of random weights learns that.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from benchmarks.engine_peers import pretrained
from benchmarks.engine_training import datum, engine_of, good
from benchmarks.engine_work import RANK, Outcome, Setting
from trainmaster.engine.engine import Engine
from trainmaster.engine.types import AdamOptions, LoraOptions, Normalization, Pass, Trained

_RATE = 5e-4
OPTIONS = AdamOptions(learning_rate=_RATE, eps=1e-8, normalization=Normalization.NUM_LOSS_TOKENS)
_WORDS = 256
"""Tokens that occur in the texts."""
_SUCCESSORS = 4


def curve_engine(setting: Setting, *, fp8: bool = False) -> Outcome:
    with engine_of(setting, fp8=fp8) as engine:
        engine.create_model("model", Trained.ADAPTER, LoraOptions(rank=RANK, seed=0, train_unembed=False))
        engine.load_adapter("model", _first_adapter(setting))

        def step(rows: np.ndarray) -> float:
            [result] = engine.run([Pass(model_id="model", data=tuple(map(datum, rows)), loss="cross_entropy")])
            engine.optim_step("model", OPTIONS)
            return good(result).metrics["loss:sum"]

        return _curve(setting, step)


def curve_peft(setting: Setting, *, seed: int | None = None) -> Outcome:
    """From the same adapter; with a seed from another one, which shows how far apart two runs of one kind are."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model = pretrained(setting)
    if seed is None:
        adapted = PeftModel.from_pretrained(model, str(_first_adapter(setting)), is_trainable=True)
    else:
        torch.manual_seed(seed)
        lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        adapted = get_peft_model(model, lora)
    trained = [each for each in adapted.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def step(rows: np.ndarray) -> float:
        tokens = torch.from_numpy(rows).to(setting.device)
        with torch.autocast("cuda", torch.bfloat16) if setting.cuda else contextlib.nullcontext():
            logits = adapted(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item()) * (tokens.numel() - len(tokens))

    try:
        return _curve(setting, step)
    finally:
        adapted.unload()


def _curve(setting: Setting, step: Callable[[np.ndarray], float]) -> Outcome:
    began = setting.begin()
    tokens = setting.curve_sequences * setting.curve_length
    curve = [step(rows) / tokens for rows in texts(setting)]
    last = float(np.mean(curve[-len(curve) // 10 :]))
    return Outcome(
        tokens=tokens * len(curve),
        seconds=setting.end(began),
        value=last,
        unit="nats/token",
        note=f"from {curve[0]:.3f} in {len(curve)} steps",
        curve=curve,
    )


def texts(setting: Setting) -> Iterator[np.ndarray]:
    """A batch for each step: int64 [sequences, tokens and one more]."""
    chance = np.random.default_rng(0)
    words = chance.choice(setting.vocabulary, _WORDS, replace=False)
    following = chance.integers(0, _WORDS, (_WORDS, _SUCCESSORS))
    for _ in range(setting.curve_steps):
        rows = np.empty((setting.curve_sequences, setting.curve_length + 1), np.int64)
        rows[:, 0] = chance.integers(0, _WORDS, len(rows))
        for place in range(1, rows.shape[1]):
            rows[:, place] = following[rows[:, place - 1], chance.integers(0, _SUCCESSORS, len(rows))]
        yield words[rows]


def _first_adapter(setting: Setting) -> Path:
    """The adapter that all begin with, as a directory that PEFT reads: made once, on the CPU."""
    directory = Path(f"{setting.model}-adapter")
    if not directory.exists():
        engine = Engine(Path(setting.model), dtype=setting.torch_dtype)
        lora = LoraOptions(rank=RANK, alpha=RANK, seed=0, train_unembed=False)
        engine.create_model("model", Trained.ADAPTER, lora)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            engine.export(engine.snapshot("model"), Path(scratch) / "adapter", merged=False)
            shutil.move(Path(scratch) / "adapter", directory)
    return directory
