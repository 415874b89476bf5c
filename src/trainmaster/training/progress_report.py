"""Reports metrics, progress and speed of a training to the server and the log, whichever loop runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainmaster.jobs.report import Reporter
from trainmaster.jobs.tracker import Mirror

_GPU_SIZE = 8192
"""Rows and columns of the matrix product that is timed on a GPU."""
_CPU_SIZE = 512
"""The same on a CPU, where the larger product would take minutes."""


def flops_per_token(model: nn.Module, sequence_length: float) -> float:
    """Floating-point operations for a token: forward and backward through all matrices, the output layer included.

    Twice the matrix parameters for the forward pass and twice for the gradient of the inputs; twice more for the
    gradient of the weights, where those of the base model are trained. Embeddings are looked up and cost nothing; of
    experts, only those count that a token is routed to.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    frozen = any(not parameter.requires_grad for parameter in model.parameters())
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention: float = 6 * config.num_hidden_layers * heads * head_size * sequence_length
    return (4 if frozen else 6) * _matrix_parameters(model) + attention


def matrix_peak(device: torch.device) -> float:
    """The measured operations per second of a large matrix product on this device."""
    cuda = device.type == "cuda"
    size = _GPU_SIZE if cuda else _CPU_SIZE
    left = torch.zeros(size, size, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    best_s = float("inf")
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(left, left)
        if cuda:
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - began)
    return 2 * size**3 / best_s


def _matrix_parameters(model: nn.Module) -> float:
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    used = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    share = used / experts if used and experts else 1.0
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    output = model.get_output_embeddings()  # type: ignore[operator]
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "lora_" in name or parameter is embedding.weight:
            continue
        total += parameter.numel() * (share if ".experts." in name else 1.0)
    if output is not None and output.weight is embedding.weight:
        total += output.weight.numel()
    return total


PROGRESS_EVERY_S = 0.5
_NOT_REPORTED = ("_runtime", "_per_second", "total_flos", "epoch", "train_loss", "_preparation_time", "num_tokens")
"""Suffixes of logged names that are reported elsewhere, or are no series."""


def reported_metrics(logs: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in logs.items() if not name.endswith(_NOT_REPORTED)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What stays the same from a training's first step to its last."""

    device: torch.device
    ranks: int
    step_rows: int
    """Samples of an optimizer step, over all ranks."""
    steps: int


class Reporting:
    """Reports the course of a training, on the first rank only."""

    def __init__(self, reporter: Reporter, tracker: Mirror, *, flops_per_token: float, tokens: float) -> None:
        """`tokens`: those that earlier attempts trained on."""
        self._reporter = reporter
        self._tracker = tracker
        self._flops_per_token = flops_per_token
        self._peak: float | None = None
        self._progress_at = 0.0
        self._tokens = tokens
        self._gauge = _Gauge()
        self.course = Course(device=torch.device("cpu"), ranks=1, step_rows=1, steps=0)
        """The loop sets it before anything is reported."""

    def not_training(self) -> contextlib.AbstractContextManager[None]:
        """The time of the block does not count against the speed of training."""
        return self._gauge.stopped()

    def begin(self, step: int, epoch: float | None, model: nn.Module) -> None:
        self._peak = matrix_peak(self.course.device) * self.course.ranks
        self._reporter.phase("training")
        self._reporter.progress(step, total_steps=self.course.steps, epoch=epoch)
        print(_opening(self.course, step, model), flush=True)  # noqa: T201
        self._gauge.start(step, self._tokens)

    def step_ended(self, step: int, epoch: float | None) -> None:
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_EVERY_S:
            self._progress_at = now
            self._reporter.progress(step, total_steps=self.course.steps, epoch=epoch)

    def log(self, step: int, epoch: float | None, logs: Mapping[str, Any]) -> None:
        values = reported_metrics(logs)
        if not values:
            return
        if "loss" in values:
            values |= self._speed(step, float(logs.get("num_tokens", 0.0))) | _device(self.course.device)
        self._reporter.metrics(values, step=step, epoch=epoch, total_steps=self.course.steps)
        self._tracker.log(values, step=step)
        print(_line(step, self.course.steps, epoch, values), flush=True)  # noqa: T201

    def _speed(self, step: int, tokens: float) -> dict[str, float]:
        steps, new_tokens, seconds = self._gauge.lap(step, tokens)
        if seconds <= 0 or steps <= 0:
            return {}
        speed = {"samples_per_s": steps * self.course.step_rows / seconds, "tokens_per_s": new_tokens / seconds}
        if self._peak:
            speed["mfu"] = self._flops_per_token * speed["tokens_per_s"] / self._peak
        return speed


class _Gauge:
    def __init__(self) -> None:
        self.start(0, 0.0)

    def start(self, step: int, tokens: float) -> None:
        self._since, self._idle_s, self._step, self._tokens = time.monotonic(), 0.0, step, tokens

    def lap(self, step: int, tokens: float) -> tuple[int, float, float]:
        seconds = time.monotonic() - self._since - self._idle_s
        passed = step - self._step, tokens - self._tokens, seconds
        self.start(step, tokens)
        return passed

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._idle_s += time.monotonic() - began


def _device(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    values = {"gpu_memory_mb": torch.cuda.max_memory_allocated(device) / 2**20}
    with contextlib.suppress(Exception):  # no NVML, or no permission: the metric is left out
        values["gpu_utilization_pct"] = float(torch.cuda.utilization(device))
    return values


def _opening(course: Course, step: int, model: nn.Module) -> str:
    every = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    share = "all" if trained == every else f"{trained:,} of"
    ranks = f"{course.ranks} {'GPU' if course.device.type == 'cuda' else 'CPU process'}"
    plural = "" if course.ranks == 1 else "s" if course.device.type == "cuda" else "es"
    begins = f"continues at step {step:,} of" if step else "takes"
    return f"training {begins} {course.steps:,} steps: {share} {every:,} parameters, on {ranks}{plural}"


def _line(step: int, steps: int, epoch: float | None, values: Mapping[str, float]) -> str:
    said = [f"step {step:,} of {steps:,}"]
    if epoch is not None:
        said.append(f"epoch {epoch:.2f}")
    for name, form in _FORMS.items():
        if name in values:
            said.append(form.format(values[name]))
    return ", ".join(said)


_FORMS = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval loss {:.4f}",
    "grad_norm": "gradient norm {:.3f}",
    "learning_rate": "learning rate {:.3g}",
    "tokens_per_s": "{:,.0f} tokens/s",
}
