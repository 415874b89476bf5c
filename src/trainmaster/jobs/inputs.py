"""What a job was started with, for a script of your own: `from trainmaster.jobs import inputs`.

    rate = inputs.hyperparameters()["learning_rate"]
    model = AutoModel.from_pretrained(inputs.prepared()["model_path"])

The rows of its data are given by `trainmaster.training.data.load`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

from trainmaster.protocol import environment

TRAINING_FILE = "training.json"
INITIALIZERS_FILE = "initializers.json"
PREPARED_FILE = "prepared.json"


def training() -> dict[str, Any]:
    """The job's name, training_config, data_config, output_config and resource_config, with all defaults.

    Raises:
        RuntimeError: this process is in no job that has them.
    """
    return _read(environment.INPUTS_DIR, TRAINING_FILE)


def initializers() -> dict[str, Any]:
    """What was fetched before this process started: `dataset`, `model`, as the job names them, without secrets.

    Raises:
        RuntimeError: this process is in no job that has them.
    """
    return _read(environment.INPUTS_DIR, INITIALIZERS_FILE)


def hyperparameters() -> dict[str, Any]:
    """The job's hyperparameters.

    Raises:
        RuntimeError: this process is in no job that has them.
    """
    return cast("dict[str, Any]", training()["training_config"]["hyperparameters"])


def prepared() -> dict[str, Any]:
    """Where the job's model and data lie on this machine: `model_path`, `tokenizer_path` and, of each source, `files`.

    `model_path` is null where the model was left to the script.

    Raises:
        RuntimeError: this process is in no job for which anything was fetched.
    """
    return _read(environment.PREPARED_DIR, PREPARED_FILE)


def _read(variable: str, name: str) -> dict[str, Any]:
    directory = os.environ.get(variable)
    if not directory:
        raise RuntimeError(f"there is no {name}: {variable} is not set, so this is no job with a training_config")
    try:
        return cast("dict[str, Any]", json.loads(Path(directory, name).read_bytes()))
    except FileNotFoundError:
        raise RuntimeError(f"there is no {name} in {directory}: this job has none") from None
