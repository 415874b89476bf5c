"""The recipes of `tinker-cookbook`, unchanged and offline: they must run, learn, and resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_programs import Client

Recipe = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def recipe(client: Callable[[str], Client]) -> Recipe:
    """Runs a recipe with these settings; returns what it logged, a row for each step."""

    def run(name: str, logs: Path, **settings: object) -> list[dict[str, Any]]:
        words = [f"{key}={value}" for key, value in {"log_path": logs, **settings}.items()]
        client("cookbook").run("-m", f"tinker_cookbook.recipes.{name}", *words, timeout_s=400)
        return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]

    return run


def test_sl_loop_learns_and_its_resumed_run_repeats_the_losses(recipe: Recipe, tmp_path: Path) -> None:
    settings = {"batch_size": 8, "max_steps": 6, "save_every": 3, "learning_rate": 0.01, "lora_rank": 8}
    rows = recipe("sl_loop", tmp_path / "sl", **settings)
    losses = [row["train_mean_nll"] for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]

    # As if it had died after its checkpoint: the last one is forgotten.
    checkpoints = tmp_path / "sl" / "checkpoints.jsonl"
    kept = [line for line in checkpoints.read_text().splitlines() if json.loads(line)["name"] != "final"]
    checkpoints.write_text("\n".join(kept) + "\n")
    (tmp_path / "sl" / "metrics.jsonl").unlink()
    resumed = recipe("sl_loop", tmp_path / "sl", **settings)
    assert [row["step"] for row in resumed] == [3, 4, 5]
    assert [row["train_mean_nll"] for row in resumed] == losses[3:]


@pytest.mark.long
def test_sl_basic_trains_evaluates_and_saves(recipe: Recipe, tmp_path: Path) -> None:
    rows = recipe("sl_basic", tmp_path / "sl", max_steps=3, eval_every=2, save_every=2, learning_rate=0.01)
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert losses == sorted(losses, reverse=True)
    assert any(math.isfinite(row.get("test/nll", math.nan)) for row in rows)
    saved = [json.loads(line) for line in (tmp_path / "sl" / "checkpoints.jsonl").read_text().splitlines()]
    assert all(one["state_path"].startswith("tinker://") for one in saved)


@pytest.mark.long
def test_rl_loop_raises_the_reward(recipe: Recipe, tmp_path: Path) -> None:
    settings = {"batch_size": 8, "group_size": 16, "max_tokens": 4, "learning_rate": 0.02, "lora_rank": 8}
    rows = recipe("rl_loop", tmp_path / "rl", max_steps=10, **settings)
    rewards = [row["reward/total"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards


@pytest.mark.long
def test_rl_basic_trains_on_what_it_sampled(recipe: Recipe, tmp_path: Path) -> None:
    rows = recipe("rl_basic", tmp_path / "rl", max_steps=1, max_tokens=4, learning_rate=0.01)
    assert abs(rows[-1]["optim/kl_sample_train_v1"]) < 1e-5
    assert rows[-1]["optim/entropy"] > 0
