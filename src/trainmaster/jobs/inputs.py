"""The inputs of a job, for your own script: `from trainmaster.jobs import inputs`.

    rate = inputs.hyperparameters()["learning_rate"]
    model = AutoModel.from_pretrained(inputs.prepared()["model_path"])

`trainmaster.training.data.load` loads the rows of its data. Outside a job that has such inputs, each function raises
RuntimeError.
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
    """The job's name, training_config, data_config, output_config and resource_config, with all defaults."""
    return _read(environment.INPUTS_DIR, TRAINING_FILE)


def initializers() -> dict[str, Any]:
    """The `dataset` and `model` that were fetched before this process started, as the job names them; no secrets."""
    return _read(environment.INPUTS_DIR, INITIALIZERS_FILE)


def hyperparameters() -> dict[str, Any]:
    return cast("dict[str, Any]", training()["training_config"]["hyperparameters"])


def prepared() -> dict[str, Any]:
    """The paths of the job's data and model: `files` of each source, `tokenizer_path`, and `model_path` or null."""
    return _read(environment.PREPARED_DIR, PREPARED_FILE)


def _read(variable: str, name: str) -> dict[str, Any]:
    if not (directory := os.environ.get(variable)):
        raise RuntimeError(f"there is no {name}: {variable} is not set, so this is no job with a training_config")
    try:
        return cast("dict[str, Any]", json.loads(Path(directory, name).read_bytes()))
    except FileNotFoundError:
        raise RuntimeError(f"there is no {name} in {directory}: this job has none") from None
