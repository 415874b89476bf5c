"""`client.data`: a look at training data before anything is trained on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from trainmaster.client.connection import Connection
from trainmaster.client.types import CheckedData

PATIENCE_S = 180.0
"""A server takes up to two minutes."""


class Data:
    """Training data."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def validate(
        self,
        data_config: Mapping[str, Any],
        *,
        base_model: Mapping[str, Any] | None = None,
        training_type: str = "SFT",
        hyperparameters: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        files: Sequence[Mapping[str, Any]] = (),
        limit: int = 3,
    ) -> CheckedData:
        """Have real rows read, and see what a model will see of them.

        Args:
            data_config: as a job has it.
            base_model: whose tokenizer is used; without it and `preprocess.tokenizer_id`, rows are only read.
            training_type: what the rows are for.
            hyperparameters: as a job has them.
            environment: variables such as HF_TOKEN, for this one time.
            files: uploaded files that relative paths name, as in `workload.files`.
            limit: how many rows of each source are shown.
        """
        body = {
            "data_config": data_config,
            "base_model": base_model,
            "training_type": training_type,
            "hyperparameters": hyperparameters or {},
            "environment": environment or {},
            "files": [*files],
            "limit": limit,
        }
        answer = self._connection.call("POST", "/v1/data/validate", json=body, patience_s=PATIENCE_S)
        return cast(CheckedData, answer)
