"""The loops of `examples/`: each is short, runs as it is, and learns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_programs import ROOT, Client

from real_server import RealServer, running

LOOPS = ROOT / "examples" / "loops"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples' own model."""
    directory = tmp_path_factory.mktemp("example") / "tiny"
    subprocess.run([sys.executable, ROOT / "examples" / "make_tiny_model.py", directory], check=True)
    return directory


@pytest.fixture(scope="module")
def service_server(model: Path) -> Iterator[RealServer]:
    """A server that knows it by the examples' name."""
    data_root = str(model.parent)
    with running(model.parent / "data", "--data-root", data_root, "--model-alias", f"tiny={model}") as started:
        yield started


@pytest.fixture(scope="module")
def loop(client: Callable[[str], Client], model: Path) -> Callable[..., list[float]]:
    """Runs a loop; returns the number after `word` of every step."""

    def run(environment: str, name: str, word: str, *options: str) -> list[float]:
        said = client(environment).run(LOOPS / name, "--tokenizer", model / "tokenizer.json", *options)
        steps = [line.split() for line in said.splitlines() if line.startswith("step ")]
        return [float(words[words.index(word) + 1]) for words in steps]

    return run


def test_sft_loop_lowers_the_loss(loop: Callable[..., list[float]]) -> None:
    losses = loop("tinker", "sft_loop.py", "loss", "--steps", "20")
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]


def test_grpo_loop_raises_the_reward(loop: Callable[..., list[float]]) -> None:
    rewards = loop("tinker", "grpo_loop.py", "reward", "--steps", "12")
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6, rewards


def test_dpo_loop_lowers_the_loss(loop: Callable[..., list[float]]) -> None:
    losses = loop("cookbook", "dpo_loop.py", "loss", "--steps", "12")
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.5


@pytest.mark.parametrize("path", sorted(LOOPS.glob("*.py")), ids=lambda path: path.stem)
def test_loops_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100
