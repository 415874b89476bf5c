"""A request as a plain document: for the store, and for people to see."""

from __future__ import annotations

from typing import Any

from trainmaster.core.spec.submit import SubmitJobRequest

HIDDEN = "***"
"""Stands where a secret was."""


def dump(request: SubmitJobRequest) -> dict[str, Any]:
    """The document that is stored: everything, defaults filled, but the Hub token."""
    return request.model_dump(mode="json")


def redacted(request: SubmitJobRequest) -> dict[str, Any]:
    """The document that is shown: defaults filled, environment values and the Hub token hidden."""
    document = dump(request)
    for part in (document["training_config"], document["workload"]):
        if part is not None:
            part["environment"] = dict.fromkeys(part["environment"], HIDDEN)
    document["output_config"]["hub_token"] = HIDDEN if request.output_config.hub_token else None
    return document


def with_server_defaults(request: SubmitJobRequest, *, seed: int) -> SubmitJobRequest:
    """The request with what the server decides for it: a seed, where it names none."""
    data = request.data_config
    if data is None or data.seed is not None:
        return request
    return request.model_copy(update={"data_config": data.model_copy(update={"seed": seed})})
