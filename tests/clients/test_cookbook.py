"""The recipes of `tinker-cookbook`, unchanged and offline: they must run, learn, and resume. Downloads of saved
weights, by it and by the command of `tinker`, old and new."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file
from tinker_calls import ADAM, PASS, Plain

from client_programs import Client, facts
from patience import PATIENCE_S
from real_server import RealServer

Recipe = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def recipe(client: Callable[[str], Client]) -> Recipe:
    """Runs a recipe with these settings; returns what it logged, a row for each step."""

    def run(name: str, logs: Path, **settings: object) -> list[dict[str, Any]]:
        words = [f"{key}={value}" for key, value in {"log_path": logs, **settings}.items()]
        client("cookbook").run("-m", f"tinker_cookbook.recipes.{name}", *words, timeout_s=400)
        return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]

    return run


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cookbook")


@pytest.fixture(scope="module")
def results(client: Callable[[str], Client], ground: Path, output: Path) -> dict[str, Any]:
    """What a program that does several things has to say of each."""
    program = client("cookbook")
    return program.scenarios("cookbook.py", str(ground / "model"), str(output), timeout_s=2 * PATIENCE_S)


def test_sl_loop_learns_and_its_resumed_run_repeats_the_losses(results: dict[str, Any]) -> None:
    found = facts(results, "sl_loop")
    losses = [row["train_mean_nll"] for row in found["rows"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    assert [row["step"] for row in found["resumed"]] == [3, 4, 5]
    assert [row["train_mean_nll"] for row in found["resumed"]] == losses[3:]


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


def test_custom_losses_are_computed_in_the_client(results: dict[str, Any]) -> None:
    """With `tinker` alone: in the environment of the cookbook it has torch beside it."""
    found = facts(results, "custom_loss")
    assert found["custom"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["by_handle"] == pytest.approx(found["plain"][0], rel=1e-5)
    assert {"mine", "loss:sum", "surrogate_loss:sum"} <= set(found["metrics"])


# -- downloads --


@pytest.fixture(scope="module")
def plain(service_server: RealServer) -> Iterator[Plain]:
    """A trained model, with weights of every kind."""
    with httpx.Client(timeout=PATIENCE_S) as http:
        made = Plain(server=service_server, http=http)
        made.session_id = made.new_session()
        made.model_id = made.run_id = made.new_model(made.session_id)
        made.done("forward_backward", made.work(forward_backward_input=PASS))
        made.done("optim_step", made.work(adam_params=ADAM))
        made.save("kept")
        made.done("save_weights_for_sampler", made.work(path="for-sampling"))
        made.done("save_weights_external", made.work(path="out"))
        yield made


def downloaded(client: Client, path: str, output: Path) -> Path:
    """What `tinker checkpoint download` leaves."""
    command = [client.python.parent / "tinker", "checkpoint", "download", path, "--output", output]
    done = subprocess.run(command, env=client.environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (directory,) = output.iterdir()
    return directory


# The cookbook downloads external weights, too.
@pytest.mark.parametrize("place", ["weights/kept", pytest.param("external_weights/out", marks=pytest.mark.long)])
def test_command_of_the_latest_client_downloads_an_adapter(
    client: Callable[[str], Client], plain: Plain, tmp_path: Path, place: str
) -> None:
    directory = downloaded(client("tinker"), f"tinker://{plain.run_id}/{place}", tmp_path)
    assert sorted(path.name for path in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert any(
        np.abs(each).max() > 0
        for name, each in load_file(directory / "adapter_model.safetensors").items()
        if "lora_B" in name
    )
    # What was exported for the download alone is gone.
    listed = plain.request("GET", "/checkpoints").json()["checkpoints"]
    assert not [each for each in listed if each["tinker_path"].endswith("/download")]


@pytest.mark.parametrize("environment", ["tinker-0.24.1", pytest.param("tinker-0.25.0", marks=pytest.mark.long)])
@pytest.mark.parametrize("place", ["weights/kept", "sampler_weights/for-sampling"])
def test_command_of_older_clients_downloads_an_archive(
    client: Callable[[str], Client], plain: Plain, tmp_path: Path, environment: str, place: str
) -> None:
    directory = downloaded(client(environment), f"tinker://{plain.run_id}/{place}", tmp_path)
    names = {path.name for path in directory.rglob("*") if path.is_file()}
    assert {"checkpoint_complete", "manifest.json"} <= names
    assert place.startswith("weights/") or {"adapter_config.json", "adapter_model.safetensors"} <= names


def test_cookbook_downloads_decrypts_and_merges(results: dict[str, Any], ground: Path, output: Path) -> None:
    """It has the weights of a training checkpoint encrypted on their way; of a tied model it merges the unembedding
    into the embedding."""
    found = facts(results, "downloads")
    assert found["config"]["r"] == 8
    assert found["tokenizers"] == ["User :", "User :"]
    training, external = (load_file(output / kind / "adapter_model.safetensors") for kind in ("training", "external"))
    assert set(training) == set(external)
    for name, each in training.items():
        np.testing.assert_array_equal(each, external[name])
    assert not list((output / "training").glob("*.age"))
    base, merged = (
        load_file(ground / "model" / "model.safetensors"),
        load_file(output / "merged" / "model.safetensors"),
    )
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        assert np.abs(merged[name] - base[name]).max() > 0
    assert sorted(found["left"]).count(found["paths"]["external"]) == 1
    assert not [path for path in found["left"] if path.endswith("/download")]
