"""The kernels of a GPU in Triton's interpreter, in a process of its own: nothing else shall find Triton on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
FILES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if "\nfrom kernel_runs import" in path.read_text(encoding="utf-8")
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested here")
@pytest.mark.timeout(11 * PATIENCE_S)
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_kernels_give_what_formulas_give() -> None:
    places = list((ROOT / ".venvs" / "triton").glob("lib/python3*/site-packages"))
    assert places, ".venvs/triton is missing: run `make setup-dev`"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *FILES],
        cwd=ROOT,
        env=environment | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(places[0])},
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    # A file that is skipped says so from there.
    assert "kernel_runs.py" not in done.stdout, done.stdout[-20_000:]
