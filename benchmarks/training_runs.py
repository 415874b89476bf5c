"""How `training` runs what it compares: a job, the TRL script by hand, and the engine alone.

Job and script are timed between two logs, when they run as they will go on. What is lost before, once, is told apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.engine_processes import run_cases
from benchmarks.engine_tokens import setting_of
from benchmarks.models import Shape
from benchmarks.report import WrongResultError
from benchmarks.server import Client, wait_for

_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 1.0
"""At both, alike: whoever looks takes time from what is measured."""
_RANK = 16
_ENGINE_S = 15.0
"""For so long the engine alone trains."""
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """A job that was timed."""

    times: Times
    metrics: Mapping[str, float]
    """The latest ones."""
    by_engine: bool
    """The engine trained, and not TRL."""


def what_the_script_lacks() -> str:
    """Why the script cannot be run by hand, in a line; empty: it can."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import benchmarks.by_hand"],
        capture_output=True,
        text=True,
        cwd=_BY_HAND.parents[1],
    )
    return ran.stderr.strip().splitlines()[-1] if ran.returncode else ""


def run_by_hand(directory: Path, model: Path, data: Path, plan: Plan) -> Times:
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


def run_job(client: Client, model: Path, data: Path, plan: Plan) -> JobRun:
    lora = {"lora_r": str(_RANK), "lora_alpha": "32", "lora_dropout": "0", "lora_target_modules": "all-linear"}
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
                    # TRL recomputes all layers with `auto`; the engine only those that do not fit.
                    "gradient_checkpointing": "auto" if plan.training_type in plan.shape.checkpointing else "false",
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
        lines = client.call("GET", f"/v1/jobs/{job_id}/logs?limit=10000")["lines"]
    finally:
        _end(client, job_id)
    by_engine = any("the engine trains" in line["message"] for line in lines)
    return JobRun(times=Times(plan=plan, at=seen), metrics=latest, by_engine=by_engine)


def engine_rate(directory: Path, model: Path, plan: Plan) -> float:
    """As many tokens a step as the job has, computed together as there."""
    sizes = {"sequences": plan.batch, "equal": plan.length, "together": plan.step_tokens}
    setting = setting_of(plan.shape, model, seconds=_ENGINE_S) | sizes
    case = ("the engine alone", "train_engine", {"data": "equal", "rank": _RANK})
    [(key, outcome)] = run_cases([case], setting, directory, until=math.inf)
    if isinstance(outcome, str):
        raise WrongResultError(f"{key}: {outcome}")
    return float(outcome["tokens"]) / float(outcome["seconds"])


def _framework(plan: Plan) -> dict[str, Any]:
    """What is asked for, unless the plan has an option that TRL alone has."""
    name = os.environ.get("BENCH_FRAMEWORK")
    return {"framework": {"type": name}} if name and not plan.compile and plan.attention is None else {}


def _end(client: Client, job_id: str) -> None:
    if client.call("GET", f"/v1/jobs/{job_id}")["status"] not in ("FAILED", "COMPLETED", "CANCELLED"):
        client.call("POST", f"/v1/jobs/{job_id}/cancel", {})
        client.wait(job_id, _TIMEOUT_S)
