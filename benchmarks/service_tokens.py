"""Tokens per second of a trainer service through the public tinker client, against its engine alone.

With a GPU the model has the shape of Qwen3 8B, with random weights; without one, a tiny one, which shows that all of it
works, and has no targets. BENCH_SHAPES chooses, as for `engine_tokens`, whose cases the peers are.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine_tokens import SAME_LOSS, Bench, Plan, chosen_shapes
from benchmarks.report import Figure, Peer, Progress, WrongResultError
from benchmarks.server import environment
from benchmarks.service_front import TINKER
from benchmarks.service_steps import ALIAS, serving

if TYPE_CHECKING:
    from benchmarks.engine_work import Setting

SFT_RATIO = 0.97
RL_RATIO = 0.9
"""Of the engine's tokens per second."""
SFT_CASE, RL_CASE = "engine-equal", "grpo-engine"
"""The cases of `engine_tokens` with the same work."""
ROUNDS = 3
"""Of all batches, after one that does not count."""
_TIMEOUT_S = 600.0


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Pipelined SFT steps, and the sampling of an RL step."""
    import torch

    targets = torch.cuda.is_available()
    figures: list[Figure] = []
    for shape in chosen_shapes():
        bench = Bench(shape, directory, progress, Plan(only=(SFT_CASE, RL_CASE)), math.inf)
        bench.run(lambda: None)
        # The engine's process has ended, and the GPU is free.
        alone = bench.outcomes()
        if failed := [f"{key}: {outcome}" for key, outcome in alone.items() if isinstance(outcome, str)]:
            raise WrongResultError(f"{shape.name}, the engine alone: {'; '.join(failed)}")
        progress(f"{shape.name}: SFT through the tinker client")
        found = _run_client("sft", directory, bench.setting, _sft_document(bench.setting))
        figures.append(sft_figure(shape.name, bench.setting, found, alone[SFT_CASE], targets=targets))
        progress(f"{figures[-1].ratio}; an RL step through the tinker client")
        found = _run_client("rl", directory, bench.setting, _rl_document(bench.setting))
        figures.append(rl_figure(shape.name, bench.setting, found, alone[RL_CASE], targets=targets))
        progress(figures[-1].ratio)
    return figures


def sft_figure(
    shape: str, setting: Setting, found: Mapping[str, float], alone: Mapping[str, Any], *, targets: bool
) -> Figure:
    """The client's steps against the engine's. Raises WrongResultError where their losses of the same batch differ."""
    step_tokens, steps = setting.sequences * setting.equal, ROUNDS * len(setting.batches("equal"))
    loss = found["first_loss"] / step_tokens
    if abs(loss - alone["loss"]) > SAME_LOSS * alone["loss"]:
        raise WrongResultError(f"{shape}: the first loss is {loss:.4f}, and the engine's own {alone['loss']:.4f}")
    step_s = found["seconds"] / steps
    return _compared(
        f"{shape} SFT through the tinker client",
        step_tokens / step_s,
        alone["tokens"] / alone["seconds"],
        ratio=SFT_RATIO if targets else None,
        note=f"{setting.sequences} x {setting.equal:,} tokens a step, {steps} steps of {step_s * 1000:,.0f} ms",
    )


def rl_figure(
    shape: str, setting: Setting, found: Mapping[str, float], alone: Mapping[str, Any], *, targets: bool
) -> Figure:
    """The client's sampling against the engine's. Raises WrongResultError where tokens are missing."""
    wanted = setting.groups * setting.group_size * setting.new_tokens
    if found["tokens"] != wanted:
        raise WrongResultError(f"{shape}: {found['tokens']} tokens were sampled, not {wanted}")
    return _compared(
        f"{shape} RL step through the tinker client, sampling",
        found["tokens"] / found["sampled_s"],
        alone["tokens"] / alone["sampled_s"],
        ratio=RL_RATIO if targets else None,
        note=f"{setting.groups} prompts x {setting.group_size} x {setting.new_tokens} tokens in"
        f" {found['sampled_s']:.2f} s, {found['saved_s']:.2f} s of them for the weights; training"
        f" {found['trained_s']:.2f} s, by the engine alone {alone['seconds'] - alone['sampled_s']:.2f} s",
    )


def _compared(name: str, ours: float, alone: float, *, ratio: float | None, note: str) -> Figure:
    return Figure(
        name=name,
        measured=ours,
        unit="tokens/s",
        target=None if ratio is None else ratio * alone,
        at_least=True,
        peer=Peer(name="the engine alone", value=alone, ours=ours),
        note=note,
    )


def _sft_document(setting: Setting) -> dict[str, Any]:
    batches = setting.batches("equal")
    return {
        "batches": [[row.tolist() for row in rows] for rows in batches],
        "warm_steps": len(batches),
        "steps": ROUNDS * len(batches),
    }


def _rl_document(setting: Setting) -> dict[str, Any]:
    return {
        "group_size": setting.group_size,
        "rl_steps": [
            {"prompts": [row.tolist() for row in setting.prompts(setting.groups, seed=seed)], "max_tokens": tokens}
            for seed, tokens in enumerate((setting.warm_tokens, setting.new_tokens))
        ],
    }


def _run_client(loop: str, directory: Path, setting: Setting, document: Mapping[str, Any]) -> dict[str, float]:
    """What the client measured, with a server and a trainer of its own."""
    from benchmarks.engine_work import LEARNING_RATE, RANK

    with serving(directory, Path(setting.model)) as server:
        url = f"http://{server.host}:{server.port}"
        common = {"url": url, "key": server.key, "base_model": ALIAS, "rank": RANK, "learning_rate": LEARNING_RATE}
        try:
            ran = subprocess.run(
                [TINKER, "-m", "benchmarks.tinker_loops", loop],
                input=json.dumps({**common, **document}),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                env=environment(),
                cwd=Path(__file__).parents[1],
            )
        except subprocess.TimeoutExpired as error:
            raise WrongResultError(f"the client's {loop} is not done after {_TIMEOUT_S:.0f} s") from error
    if ran.returncode:
        raise WrongResultError(f"the client's {loop} failed: {ran.stderr[-2000:]}")
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found
