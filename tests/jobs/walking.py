"""A job class for tests: a walk whose steps are random, with a state that is easy to compare."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainmaster.jobs import ExecutionSpec, RestoreableJob, job


@dataclass(frozen=True, kw_only=True)
class WalkConfig:
    steps: int = 6
    stride: float = 1.0
    save_every: int = 2


@job("test/walk")
class Walk(RestoreableJob[WalkConfig]):
    """Each step adds a random number to a position; a velocity plays the optimizer's part."""

    def __init__(self, spec: ExecutionSpec, config: Any = None) -> None:
        super().__init__(spec, config)
        self.step = 0
        self.finished = False
        self.state: dict[str, Any] = {"position": np.zeros(3), "velocity": {"m": np.zeros(2, dtype=np.float32)}}

    @property
    def done(self) -> bool:
        return self.step >= self.config.steps

    def run(self) -> None:
        while self.step < self.config.steps:
            self.step += 1
            self.state["position"] = self.state["position"] + self.config.stride * np.random.normal(size=3)
            self.state["velocity"]["m"] += np.float32(random.random())
            self.log({"distance": float(np.abs(self.state["position"]).sum())}, step=self.step)
            self.after_step()
            if self.checkpoint_due(self.step, self.config.save_every):
                self.save()
            self.exit_if_stopped()

    def after_step(self) -> None:
        """For tests to put something in."""

    def save(self) -> None:
        suffix = f"steps/{self.step}"
        self.save_tree_and_metadata(suffix, self.state, {"step": self.step})
        self.register(suffix)

    def finish(self) -> None:
        self.finished = True

    def restore_from_path(self, rel_path: str | os.PathLike[str]) -> None:
        self.state, metadata = self.get_tree_and_metadata_from_path(rel_path, self.state)
        if self.is_own(rel_path):
            self.step = metadata["step"]


def walk(root: Path, name: str = "walk", **config: Any) -> Walk:
    """A new walk, with the generators that it draws from at their start."""
    random.seed(7)
    np.random.seed(7)
    return Walk.local(root, name, config=config)


def flip_a_byte(checkpoint: Path, pattern: str = "*.safetensors") -> None:
    """Damage a file of a checkpoint."""
    path = sorted(checkpoint.glob(pattern))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
