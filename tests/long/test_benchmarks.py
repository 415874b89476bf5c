"""The benchmarks that train, with tiny models: that they find figures. Too long for CI: `make test-long`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("service_tokens", ["tiny SFT through the tinker client", "tiny RL step through the tinker client, sampling"]),
        (
            "training",
            [
                "LORA of a tiny model, tokens/s through a job",
                "LORA of a tiny model, tokens/s through a job, against the engine",
                "LORA of a tiny model, rows of mixed lengths, packed",
                "LORA of a tiny model, compiled",
            ],
        ),
    ],
)
def test_benchmark_finds_its_figures(tmp_path: Path, name: str, figures: list[str]) -> None:
    found = tmp_path / "figures.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--directory", tmp_path, "--json", found],
        check=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "BENCH_SHAPES": "tiny", "BENCH_TYPES": "LORA"},
    )
    document = json.loads(found.read_text())
    assert [each["name"] for each in document["figures"]] == figures
    assert all(each["measured"] > 0 for each in document["figures"])
