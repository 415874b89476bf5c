"""Programs that use Kubeflow's own client on a Kubernetes cluster, run in the environment of that client."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

from patience import PATIENCE_S

PYTHON = Path(__file__).parents[1] / ".venvs" / "kubeflow" / "bin" / "python"
_BEFORE = """
import json, sys
from kubeflow.trainer import *
from kubeflow.trainer.options import *

client = TrainerClient(KubernetesBackendConfig(config_file=sys.argv[1], namespace=sys.argv[2]))
"""


def run_program(directory: Path, kubeconfig: Path, namespace: str, source: str) -> Any:
    """Run a program that has `client`, and the public names; returns what it left in `said`."""
    assert PYTHON.exists(), f"{PYTHON} is missing: run `make setup-dev`"
    program = directory / "program.py"  # functions are sent as their source, which the client reads from a file
    program.write_text(_BEFORE + textwrap.dedent(source) + "\nprint(json.dumps(said, default=str))\n")
    done = subprocess.run(
        [PYTHON, program, kubeconfig, namespace],
        env={"PATH": os.environ["PATH"], "HOME": str(directory), "NO_PROXY": "*"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, (
        f"the program ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    )
    return json.loads(done.stdout.splitlines()[-1])
