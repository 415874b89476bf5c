"""Tokens per second of the built-in trainers, through a job and by the same TRL script started by hand.

With a GPU the models have the shapes of Qwen3 0.6B and 8B, with random weights, and sequences of 2,048 tokens; without
one, a shape that a laptop trains. BENCH_SHAPES and BENCH_TYPES choose among them, and BENCH_FRAMEWORK names the loop
of the jobs: ENGINE or HF_TRAINER; unset, as a job that names none.

Both are timed between two logs, when they run as they will go on. What is lost before, once, is told apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.models import LARGE, SMALL, Shape, make_model
from benchmarks.report import Figure, Peer, Progress, WrongResultError
from benchmarks.server import Client, running_server, wait_for

T = TypeVar("T")

RATIO = 0.97
"""Of the speed of the script that is started by hand."""
_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 1.0
"""At both, alike: whoever looks takes time from what is measured."""
_TYPES = ("LORA", "FULL_FINETUNE")
_BY_HAND = Path(__file__).with_name("by_hand.py")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One measured training."""

    shape: Shape
    training_type: str
    length: int
    first: int
    last: int
    every: int
    """Timed from the log at step `first` to that at step `last`, with a log at each `every` steps."""
    packing: bool = True
    compile: bool = False
    attention: str | None = None
    """Of the job; the script takes what transformers chooses."""

    @staticmethod
    def of(shape: Shape, training_type: str, length: int) -> Plan:
        later = max(0, shape.settled.get(training_type, 0) - shape.steps["first"])
        first, last = shape.steps["first"] + later, shape.steps["last"] + later
        every = shape.steps["every"]
        return Plan(shape=shape, training_type=training_type, length=length, first=first, last=last, every=every)

    @property
    def batch(self) -> int:
        return self.shape.batch[self.training_type]

    @property
    def step_tokens(self) -> int:
        """When every sequence is full."""
        return self.batch * self.length


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When each log of a training came, by step."""

    plan: Plan
    at: Mapping[int, float]

    @property
    def rate(self) -> float:
        """Tokens a second of the steps that are timed."""
        return self.plan.step_tokens / self._step_s

    @property
    def lost_s(self) -> float:
        """What the steps from the first log to those that are timed took longer than these."""
        plan = self.plan
        return self.at[plan.first] - self.at[plan.every] - (plan.first - plan.every) * self._step_s

    @property
    def _step_s(self) -> float:
        return (self.at[self.plan.last] - self.at[self.plan.first]) / (self.plan.last - self.plan.first)

    def __str__(self) -> str:
        logs = sorted(self.at.items())
        rates = [
            self.plan.step_tokens * (step - earlier) / (at - before)
            for (earlier, before), (step, at) in itertools.pairwise(logs)
        ]
        return f"{self.rate:,.0f} tokens/s (from log to log: {' '.join(f'{rate:,.0f}' for rate in rates)})"


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
    with running_server(directory, "--data-root", str(directory)) as server:
        client = Client(server)
        for shape in shapes:
            progress(f"making a model of the shape {shape.name}")
            model = make_model(directory / shape.name, shape)
            for training_type in types:
                plan = Plan.of(shape, training_type, length)
                progress(f"{shape.name} {training_type}: by hand")
                by_hand = _run_by_hand(directory, model, full, plan)
                progress(f"{by_hand}; through a job")
                ours, metrics = _run_job(client, model, full, plan)
                progress(f"{ours}, {ours.rate / by_hand.rate:.3f} x by hand; {_rounded(metrics)}")
                figures.append(_compared(plan, ours, by_hand, metrics))
        if shapes and "LORA" in types:
            plain, plan = figures[types.index("LORA")], Plan.of(shapes[0], "LORA", length)
            model = directory / shapes[0].name
            if cuda:
                figures.append(_with_the_scripts_attention(client, model, full, plan, progress, plain))
            figures += list(_additions(client, model, full, ragged, plan, progress, plain=plain.measured))
        client.close()
    return figures


def _chosen(variable: str, known: Mapping[str, T]) -> list[T]:
    """Those that an environment variable names, with commas between; all, where it is not set."""
    names = os.environ.get(variable, ",".join(known)).split(",")
    return [each for name, each in known.items() if name in names]


def _rounded(metrics: dict[str, float]) -> str:
    names = ("loss", "tokens_per_s", "mfu", "gpu_memory_mb", "gpu_utilization_pct")
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)


def _compared(plan: Plan, ours: Times, by_hand: Times, metrics: dict[str, float]) -> Figure:
    share = f", {metrics['mfu']:.1%} of the matrix peak" if "mfu" in metrics else ""
    lost = ""
    if plan.first > plan.every:
        lost = f"; lost before step {plan.first}: {ours.lost_s:.1f} s, by hand {by_hand.lost_s:.1f} s"
    return Figure(
        name=f"{plan.training_type} of a {plan.shape.name} model, tokens/s through a job",
        measured=ours.rate,
        unit="tokens/s",
        target=RATIO * by_hand.rate,
        at_least=True,
        peer=Peer(name="the TRL script by hand", value=by_hand.rate, ours=ours.rate),
        note=f"{plan.batch} x {plan.length} tokens a step{share}{lost}",
    )


def _with_the_scripts_attention(
    client: Client, model: Path, data: Path, plan: Plan, progress: Progress, figure: Figure
) -> Figure:
    """What being a job costs, apart from what its attention wins."""
    assert figure.peer is not None
    by_hand = figure.peer.value
    progress("with the script's attention")
    times, _ = _run_job(client, model, data, dataclasses.replace(plan, attention="sdpa"))
    ours = times.rate
    progress(f"{times}, {ours / by_hand:.3f} x by hand")
    return dataclasses.replace(
        figure,
        name=f"{plan.training_type} of a {plan.shape.name} model, attn_implementation: sdpa",
        measured=ours,
        peer=Peer(name=figure.peer.name, value=by_hand, ours=ours),
        note="",
    )


def _additions(
    client: Client, model: Path, full: Path, ragged: Path, plan: Plan, progress: Progress, *, plain: float
) -> Iterator[Figure]:
    """What packing and compiling add."""
    rates = {}
    for packing in (False, True):
        progress(f"rows of mixed lengths, {'packed' if packing else 'padded'}")
        _, metrics = _run_job(client, model, ragged, dataclasses.replace(plan, packing=packing))
        rates[packing] = metrics["tokens_per_s"]
        progress(f"{rates[packing]:,.0f} tokens/s")
    yield Figure(
        name=f"LORA of a {plan.shape.name} model, rows of mixed lengths, packed",
        measured=rates[True],
        unit="tokens/s",
        peer=Peer(name="padded", value=rates[False], ours=rates[True]),
        note="tokens of rows alone count",
    )
    progress("compiled")
    times, _ = _run_job(client, model, full, dataclasses.replace(plan, compile=True))
    compiled = times.rate
    progress(f"{times}, {compiled / plain:.2f} x not compiled")
    yield Figure(
        name=f"LORA of a {plan.shape.name} model, compiled",
        measured=compiled,
        unit="tokens/s",
        peer=Peer(name="not compiled", value=plain, ours=compiled),
    )


def _run_by_hand(directory: Path, model: Path, data: Path, plan: Plan) -> Times:
    times = directory / f"by-hand-{random.randrange(1 << 30)}.jsonl"
    document = {
        "model": str(model),
        "data": str(data),
        "training_type": plan.training_type,
        "batch_size": plan.batch,
        "length": plan.length,
        "packing": plan.packing,
        "compile": plan.compile,
        "steps": plan.last + 1_000,
        "logging_steps": plan.every,
        "gradient_checkpointing": plan.training_type in plan.shape.checkpointing,
    }
    log = times.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(_BY_HAND), json.dumps(document), str(times)], stdout=output, stderr=output
        )

    def timed() -> dict[int, float] | None:
        if process.poll() is not None:
            raise WrongResultError(f"the script by hand failed: {log.read_text()[-2000:]}")
        lines = times.read_text().splitlines() if times.exists() else []
        seen = {entry["step"]: entry["t"] for entry in map(json.loads, lines)}
        return seen if plan.last in seen else None

    try:
        seen = wait_for(timed, f"step {plan.last} by hand", _TIMEOUT_S, every_s=_LOOK_EVERY_S)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return Times(plan=plan, at=seen)


def _run_job(client: Client, model: Path, data: Path, plan: Plan) -> tuple[Times, dict[str, float]]:
    """With the job's latest metrics."""
    lora = {"lora_r": "16", "lora_alpha": "32", "lora_dropout": "0", "lora_target_modules": "all-linear"}
    job_id = client.submit(
        {
            "name": f"bench-{plan.shape.name}-{plan.training_type}",
            "training_config": {
                "training_type": plan.training_type,
                # As the script does: in the form in which it is stored.
                "base_model": {"model_id": str(model), "dtype": plan.shape.dtype},
                **_framework(plan),
                "hyperparameters": {
                    "max_steps": str(plan.last + 1_000),
                    "learning_rate": "1e-5",
                    "logging_steps": str(plan.every),
                    "gradient_checkpointing": str(plan.training_type in plan.shape.checkpointing).lower(),
                    "torch_compile": str(plan.compile).lower(),
                    **({"attn_implementation": plan.attention} if plan.attention else {}),
                    **(lora if plan.training_type == "LORA" else {}),
                },
            },
            "data_config": {
                "sources": [{"path": str(data)}],
                "preprocess": {"packing": plan.packing},
                "max_seq_length": plan.length,
                "batch_size": plan.batch,
                "seed": 0,
            },
            "output_config": {"checkpoint": {"save_steps": 1_000_000}},
        }
    )

    def timed() -> tuple[dict[int, float], dict[str, float]] | None:
        job = client.call("GET", f"/v1/jobs/{job_id}")
        if job["status"] in ("FAILED", "COMPLETED", "CANCELLED"):
            raise WrongResultError(f"the job is {job['status']}: {job.get('error_message')}")
        found = client.call("GET", f"/v1/jobs/{job_id}/metrics")
        points: list[Any] = next((series["points"] for series in found["series"] if series["name"] == "loss"), [])
        seen = {int(step): datetime.fromisoformat(at).timestamp() for step, at, _ in points}
        return (seen, found["latest"]) if plan.last in seen else None

    try:
        seen, latest = wait_for(timed, f"step {plan.last} of {job_id}", _TIMEOUT_S, every_s=_LOOK_EVERY_S)
    finally:
        _end(client, job_id)
    return Times(plan=plan, at=seen), latest


def _framework(plan: Plan) -> dict[str, Any]:
    """What is asked for, unless the plan has an option that TRL alone has."""
    name = os.environ.get("BENCH_FRAMEWORK")
    return {"framework": {"type": name}} if name and not plan.compile and plan.attention is None else {}


def _end(client: Client, job_id: str) -> None:
    if client.call("GET", f"/v1/jobs/{job_id}")["status"] not in ("FAILED", "COMPLETED", "CANCELLED"):
        client.call("POST", f"/v1/jobs/{job_id}/cancel", {})
        client.wait(job_id, _TIMEOUT_S)


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
