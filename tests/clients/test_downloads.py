"""Downloads of saved weights by public clients: the command of `tinker`, old and new, and tinker-cookbook."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from client_programs import Client, facts
from safetensors.numpy import load_file
from tinker_calls import ADAM, PASS, Plain

from patience import PATIENCE_S
from real_server import RealServer


@pytest.fixture(scope="module")
def plain(service_server: RealServer) -> Any:
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


@pytest.mark.parametrize("place", ["weights/kept", "external_weights/out"])
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


def test_cookbook_downloads_decrypts_and_merges(client: Callable[[str], Client], ground: Path, tmp_path: Path) -> None:
    """It has the weights of a training checkpoint encrypted on their way; of a tied model it merges the unembedding
    into the embedding."""
    through = client("cookbook")
    results = through.scenarios("downloads.py", str(ground / "model"), str(tmp_path))
    found = facts(results, "downloads")
    assert found["config"]["r"] == 8
    training, external = (load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("training", "external"))
    assert set(training) == set(external)
    for name, each in training.items():
        np.testing.assert_array_equal(each, external[name])
    assert not list((tmp_path / "training").glob("*.age"))
    base, merged = (
        load_file(ground / "model" / "model.safetensors"),
        load_file(tmp_path / "merged" / "model.safetensors"),
    )
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        assert np.abs(merged[name] - base[name]).max() > 0
    assert sorted(found["left"]).count(found["paths"]["external"]) == 1
    assert not [path for path in found["left"] if path.endswith("/download")]
