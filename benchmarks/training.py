"""Tokens per second of the built-in trainers, through a job and by the same TRL script started by hand.

With a GPU the models have the shapes of Qwen3 0.6B and 8B, with random weights, and sequences of 2,048 tokens; without
one, a shape that a laptop trains.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from benchmarks.report import Figure, Peer, Progress, WrongResultError
from benchmarks.server import Client, running_server, wait_for

RATIO = 0.97
"""Of the speed of the script that is started by hand."""
_TIMEOUT_S = 600.0
_TYPES = ("LORA", "FULL_FINETUNE")
_BY_HAND = Path(__file__).with_name("by_hand.py")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and how it is trained."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    batch: dict[str, int]
    """By training type."""
    steps: dict[str, int]
    """`first`, `last` and `every` of its plans."""
    checkpointing: frozenset[str]
    """The training types that need gradient checkpointing to fit."""
    dtype: str = "bfloat16"


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

    @property
    def batch(self) -> int:
        return self.shape.batch[self.training_type]

    @property
    def tokens(self) -> int:
        """Of the steps that are timed, when every sequence is full."""
        return (self.last - self.first) * self.batch * self.length


_SMALL = Shape(
    name="0.6B",
    layers=28,
    hidden=1024,
    intermediate=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
    batch={"LORA": 8, "FULL_FINETUNE": 8},
    steps={"first": 10, "last": 30, "every": 5},
    checkpointing=frozenset(),
)
_LARGE = Shape(
    name="8B",
    layers=36,
    hidden=4096,
    intermediate=12_288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
    batch={"LORA": 4, "FULL_FINETUNE": 2},
    steps={"first": 10, "last": 30, "every": 5},
    checkpointing=frozenset({"LORA", "FULL_FINETUNE"}),
)
_LAPTOP = Shape(
    name="7M",
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
    shapes = [_SMALL, _LARGE] if cuda else [_LAPTOP]
    if chosen := os.environ.get("BENCH_SHAPES"):
        shapes = [shape for shape in shapes if shape.name in chosen.split(",")]
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
            for training_type in _TYPES:
                plan = Plan(shape=shape, training_type=training_type, length=length, **shape.steps)
                progress(f"{shape.name} {training_type}: by hand")
                by_hand = plan.tokens / _run_by_hand(directory, model, full, plan)
                progress(f"{shape.name} {training_type}: through a job")
                seconds, metrics = _run_job(client, model, full, plan)
                ours = plan.tokens / seconds
                progress(f"{ours:,.0f} tokens/s, {ours / by_hand:.3f} x by hand ({by_hand:,.0f}); {_rounded(metrics)}")
                figures.append(_compared(plan, ours, by_hand, metrics))
        first = shapes[0]
        plan = Plan(shape=first, training_type="LORA", length=length, **first.steps)
        model = directory / first.name
        if cuda:
            figures.append(_with_the_scripts_attention(client, model, full, plan, progress, figures[0]))
        figures += list(_additions(client, model, full, ragged, plan, progress, plain=figures[0].measured))
        client.close()
    return figures


def _rounded(metrics: dict[str, float]) -> str:
    names = ("loss", "tokens_per_s", "mfu", "gpu_memory_mb", "gpu_utilization_pct")
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)


def _compared(plan: Plan, ours: float, by_hand: float, metrics: dict[str, float]) -> Figure:
    share = f", {metrics['mfu']:.1%} of the matrix peak" if "mfu" in metrics else ""
    return Figure(
        name=f"{plan.training_type} of a {plan.shape.name} model, tokens/s through a job",
        measured=ours,
        unit="tokens/s",
        target=RATIO * by_hand,
        at_least=True,
        peer=Peer(name="the TRL script by hand", value=by_hand, ours=ours),
        note=f"{plan.batch} x {plan.length} tokens a step{share}",
    )


def _with_the_scripts_attention(
    client: Client, model: Path, data: Path, plan: Plan, progress: Progress, figure: Figure
) -> Figure:
    """What being a job costs, apart from what its attention wins."""
    assert figure.peer is not None
    by_hand = figure.peer.value
    progress("with the script's attention")
    seconds, _ = _run_job(client, model, data, dataclasses.replace(plan, attention="sdpa"))
    ours = plan.tokens / seconds
    progress(f"{ours:,.0f} tokens/s, {ours / by_hand:.3f} x by hand")
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
    seconds, _ = _run_job(client, model, full, dataclasses.replace(plan, compile=True))
    compiled = plan.tokens / seconds
    progress(f"{compiled:,.0f} tokens/s, {compiled / plain:.2f} x not compiled")
    yield Figure(
        name=f"LORA of a {plan.shape.name} model, compiled",
        measured=compiled,
        unit="tokens/s",
        peer=Peer(name="not compiled", value=plain, ours=compiled),
    )


def _run_by_hand(directory: Path, model: Path, data: Path, plan: Plan) -> float:
    """Seconds between the two logs."""
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
        seen = wait_for(timed, f"step {plan.last} by hand", _TIMEOUT_S, every_s=0.2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return float(seen[plan.last] - seen[plan.first])


def _run_job(client: Client, model: Path, data: Path, plan: Plan) -> tuple[float, dict[str, float]]:
    """Seconds between the two logs, and the job's latest metrics."""
    lora = {"lora_r": "16", "lora_alpha": "32", "lora_dropout": "0", "lora_target_modules": "all-linear"}
    job_id = client.submit(
        {
            "name": f"bench-{plan.shape.name}-{plan.training_type}",
            "training_config": {
                "training_type": plan.training_type,
                # As the script does: in the form in which it is stored.
                "base_model": {"model_id": str(model), "dtype": plan.shape.dtype},
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
        points = next((series["points"] for series in found["series"] if series["name"] == "loss"), [])
        seen = {int(step): datetime.fromisoformat(at).timestamp() for step, at, _ in points}
        return (seen, found["latest"]) if plan.last in seen else None

    try:
        seen, latest = wait_for(timed, f"step {plan.last} of {job_id}", _TIMEOUT_S, every_s=0.2)
    finally:
        _end(client, job_id)
    return seen[plan.last] - seen[plan.first], latest


def _end(client: Client, job_id: str) -> None:
    if client.call("GET", f"/v1/jobs/{job_id}")["status"] not in ("FAILED", "COMPLETED", "CANCELLED"):
        client.call("POST", f"/v1/jobs/{job_id}/cancel", {})
        client.wait(job_id, _TIMEOUT_S)


def make_model(directory: Path, shape: Shape) -> Path:
    """A model of random weights with a tokenizer, as transformers writes it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # One token for each letter: a text has as many tokens as it has letters.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    wrapped.save_pretrained(directory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.layers <= 28,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=wrapped.pad_token_id,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    model.save_pretrained(directory)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return directory


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
