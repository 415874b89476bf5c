"""Tokens per second of the built-in trainers, through a job, by the same TRL script started by hand, and by the engine
alone.

With a GPU the models have the shapes of Qwen3 0.6B and 8B, with random weights, and sequences of 2,048 tokens; without
one, a shape that a laptop trains. BENCH_SHAPES and BENCH_TYPES choose among them, and BENCH_FRAMEWORK names the loop
of the jobs: ENGINE or HF_TRAINER; unset, as a job that names none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.models import LARGE, SMALL, Shape, make_model
from benchmarks.report import Figure, Peer, Progress
from benchmarks.server import Client, running_server
from benchmarks.training_runs import JobRun, Plan, Times, engine_rate, run_by_hand, run_job, what_the_script_lacks

T = TypeVar("T")

RATIO = 0.97
"""Of the speed of the script that is started by hand, and of the engine."""
_TYPES = ("LORA", "FULL_FINETUNE")
_LAPTOP = Shape(
    name="tiny",
    layers=4,
    hidden=256,
    intermediate=768,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocabulary=8192,
    batch={"LORA": 4, "FULL_FINETUNE": 4},
    steps={"first": 10, "last": 60, "every": 10},
    checkpointing=frozenset(),
    dtype="float32",
)


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """The ratio of a job's speed to that of the script, for LoRA and for full fine-tuning; what packing and compiling
    add."""
    import torch

    cuda = torch.cuda.is_available()
    shapes = _chosen("BENCH_SHAPES", {shape.name: shape for shape in ([SMALL, LARGE] if cuda else [_LAPTOP])})
    types = _chosen("BENCH_TYPES", {name: name for name in _TYPES})
    length = 2048 if cuda else 128
    full, ragged = directory / "full.jsonl", directory / "ragged.jsonl"
    _write_texts(full, [length * 4] * (1024 if cuda else 512))
    _write_texts(ragged, _lengths(4096 if cuda else 1024, longest=length))
    figures: list[Figure] = []
    lora: Figure | None = None
    absent = what_the_script_lacks()
    with running_server(directory, "--data-root", str(directory)) as server:
        client = Client(server)
        for shape in shapes:
            progress(f"making a model of the shape {shape.name}")
            model = make_model(directory / shape.name, shape)
            for training_type in types:
                plan = Plan.of(shape, training_type, length)
                progress(f"{shape.name} {training_type}: by hand")
                by_hand = None if absent else run_by_hand(directory, model, full, plan)
                progress(f"{by_hand or absent}; through a job")
                run = run_job(client, model, full, plan)
                figure = compared(plan, run, by_hand, absent)
                figures.append(figure)
                progress(f"{run.times}, {figure.ratio}; {_rounded(run.metrics)}")
                if training_type == "LORA":
                    lora = lora or figure
                    if run.by_engine:
                        progress("by the engine alone")
                        figures.append(against_engine(figure, engine_rate(directory, model, plan)))
                        progress(figures[-1].ratio)
        if lora is not None:
            plan, model = Plan.of(shapes[0], "LORA", length), directory / shapes[0].name
            if cuda and lora.peer is not None:
                figures.append(_with_the_scripts_attention(client, model, full, plan, progress, lora))
            figures += list(
                _additions(client, model, full, ragged, plan, progress, plain=lora.measured, compiled=not absent)
            )
        client.close()
    return figures


def _chosen(variable: str, known: Mapping[str, T]) -> list[T]:
    """Those that an environment variable names, with commas between; all, where it is not set."""
    names = os.environ.get(variable, ",".join(known)).split(",")
    return [each for name, each in known.items() if name in names]


def _rounded(metrics: Mapping[str, float]) -> str:
    names = ("loss", "tokens_per_s", "mfu", "gpu_memory_mb", "gpu_utilization_pct")
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)


def compared(plan: Plan, run: JobRun, by_hand: Times | None, absent: str) -> Figure:
    """A job against the script by hand, or with why there is none."""
    ours = run.times
    note = f"{plan.batch} x {plan.length} tokens a step"
    if "mfu" in run.metrics:
        note += f", {run.metrics['mfu']:.1%} of the matrix peak"
    if plan.first > plan.every:
        note += f"; lost before step {plan.first}: {ours.lost_s:.1f} s"
        note += f", by hand {by_hand.lost_s:.1f} s" if by_hand else ""
    figure = Figure(
        name=f"{plan.training_type} of a {plan.shape.name} model, tokens/s through a job",
        measured=ours.rate,
        unit="tokens/s",
        note=note if by_hand else f"{note}; nothing by hand: {absent}",
    )
    return _set_against(figure, "the TRL script by hand", by_hand.rate) if by_hand else figure


def against_engine(figure: Figure, engine: float) -> Figure:
    """The same job against the engine's tokens per second."""
    name = f"{figure.name}, against the engine"
    return _set_against(dataclasses.replace(figure, name=name, note=""), "the engine alone", engine)


def _set_against(figure: Figure, peer: str, rate: float) -> Figure:
    return dataclasses.replace(
        figure, target=RATIO * rate, at_least=True, peer=Peer(name=peer, value=rate, ours=figure.measured)
    )


def _with_the_scripts_attention(
    client: Client, model: Path, data: Path, plan: Plan, progress: Progress, figure: Figure
) -> Figure:
    """What being a job costs, apart from what its attention wins."""
    assert figure.peer is not None
    by_hand = figure.peer.value
    progress("with the script's attention")
    times = run_job(client, model, data, dataclasses.replace(plan, attention="sdpa")).times
    progress(f"{times}, {times.rate / by_hand:.3f} x by hand")
    name = f"{plan.training_type} of a {plan.shape.name} model, attn_implementation: sdpa"
    return _set_against(dataclasses.replace(figure, name=name, measured=times.rate, note=""), figure.peer.name, by_hand)


def _additions(
    client: Client,
    model: Path,
    full: Path,
    ragged: Path,
    plan: Plan,
    progress: Progress,
    *,
    plain: float,
    compiled: bool,
) -> Iterator[Figure]:
    """What packing and, where TRL can be used, compiling add."""
    rates = {}
    for packing in (False, True):
        progress(f"rows of mixed lengths, {'packed' if packing else 'padded'}")
        run = run_job(client, model, ragged, dataclasses.replace(plan, packing=packing))
        rates[packing] = run.metrics["tokens_per_s"]
        progress(f"{rates[packing]:,.0f} tokens/s")
    yield Figure(
        name=f"LORA of a {plan.shape.name} model, rows of mixed lengths, packed",
        measured=rates[True],
        unit="tokens/s",
        peer=Peer(name="padded", value=rates[False], ours=rates[True]),
        note="tokens of rows alone count",
    )
    if not compiled:
        return
    progress("compiled")
    times = run_job(client, model, full, dataclasses.replace(plan, compile=True)).times
    progress(f"{times}, {times.rate / plain:.2f} x not compiled")
    yield Figure(
        name=f"LORA of a {plan.shape.name} model, compiled",
        measured=times.rate,
        unit="tokens/s",
        peer=Peer(name="not compiled", value=plain, ours=times.rate),
    )


def _lengths(rows: int, *, longest: int) -> list[int]:
    """Realistic lengths: log-normal with a median of 400 and sigma 1 where sequences have 2,048 tokens."""
    chance = random.Random(0)
    scale = longest / 2048
    return [int(min(longest - 1, max(16 * scale, 400 * scale * chance.lognormvariate(0, 1)))) for _ in range(rows)]


def _write_texts(path: Path, lengths: Sequence[int]) -> None:
    chance = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz "
    with path.open("w") as file:
        for length in lengths:
            file.write(json.dumps({"text": "".join(chance.choices(letters, k=length))}) + "\n")
