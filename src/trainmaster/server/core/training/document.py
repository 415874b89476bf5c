"""`training.json`: what a training was asked to do, as its processes read it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trainmaster.server.core.training.hyperparameters import read_hyperparameters
from trainmaster.server.core.training.sources import model_source
from trainmaster.server.core.training.types import FrameworkType, TrainingType
from trainmaster.server.core.training.values import Value

if TYPE_CHECKING:
    from trainmaster.server.core.spec.submit import SubmitJobRequest
    from trainmaster.server.core.spec.training import TrainingConfig

TRAINING_FILE = "training.json"
"""Its name among the inputs of a launch."""


def training_document(request: SubmitJobRequest) -> dict[str, Any]:
    """The configs of a request without secrets, with whatever follows from them filled in.

    A built-in trainer gets its hyperparameters typed and complete; a script of the user's own gets them as they were
    given.

    Raises:
        RefusedError: a hyperparameter is not known, or cannot be read.
    """
    training, data = request.training_config, request.data_config
    if training is None or data is None:
        raise ValueError("a training has a training_config and a data_config")
    document: dict[str, Any] = {
        "name": request.name,
        "training_config": training.model_dump(mode="json", exclude={"environment"}),
        "data_config": data.model_dump(mode="json"),
        "output_config": request.output_config.model_dump(mode="json"),
        "resource_config": request.resource_config.model_dump(mode="json"),
    }
    if data.preprocess.packing is None:
        packs = training.training_type is TrainingType.CONTINUED_PRETRAIN
        document["data_config"]["preprocess"]["packing"] = packs
    if training.framework.type is not FrameworkType.CUSTOM:
        base = training.base_model
        document["training_config"]["base_model"]["source"] = str(model_source(base.model_id, base.source))
        document["training_config"]["hyperparameters"] = _hyperparameters(request, training)
    return document


def training_text(request: SubmitJobRequest) -> str:
    """The document as it is written."""
    return json.dumps(training_document(request), indent=2, ensure_ascii=False) + "\n"


def _hyperparameters(request: SubmitJobRequest, training: TrainingConfig) -> dict[str, Value]:
    values = read_hyperparameters(training.training_type, training.hyperparameters)
    if values["eval_strategy"] is None:
        values["eval_strategy"] = "epoch" if request.data_config and request.data_config.validation_split else "no"
    if values["eval_steps"] is None:
        values["eval_steps"] = request.output_config.checkpoint.save_steps
    return values
