"""A request as a plain document: for the store, and for people to see. Neither holds the value of a secret."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainmaster.protocol.secrets import HUB_TOKEN, reference_to, variable_secret
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.workloads.base import initializers_of
from trainmaster.server.core.workloads.initializers import conceal
from trainmaster.server.core.workloads.initializers import secret_values as initializer_secrets

HIDDEN = "***"
"""Stands where a secret was."""


def dump(request: SubmitJobRequest) -> dict[str, Any]:
    """The document that is stored: defaults filled, references where environment values and tokens were."""
    return _document(request, reference_to)


def redacted(request: SubmitJobRequest) -> dict[str, Any]:
    """The document that is shown: defaults filled, environment values and tokens hidden."""
    return _document(request, lambda _: HIDDEN)


def with_secrets_of(document: Any, earlier: SubmitJobRequest, values: Mapping[str, str]) -> Any:
    """A document with the secrets of an earlier request wherever it has the `***` that `redacted` shows in that place.

    Args:
        document: of a new request, not validated yet.
        earlier: the stored request that the document was made from.
        values: the earlier request's secrets, by their names.

    Raises:
        SpecError: the document has `***` where the earlier request has no secret.
    """
    problems: list[Problem] = []
    found = _filled(document, redacted(earlier), _document(earlier, lambda name: values.get(name, "")), "", problems)
    if problems:
        raise SpecError(problems)
    return found


def _filled(document: Any, shown: Any, values: Any, path: str, problems: list[Problem]) -> Any:
    if document == HIDDEN:
        if shown != HIDDEN:
            message = f"the earlier job has no secret here, so '{HIDDEN}' stands for nothing; give the value"
            problems.append(Problem(field=path, message=message))
        return values
    if isinstance(document, dict):
        return {
            name: _filled(each, _part(shown, name), _part(values, name), f"{path}.{name}" if path else name, problems)
            for name, each in document.items()
        }
    if isinstance(document, list):
        return [
            _filled(each, _part(shown, index), _part(values, index), f"{path}[{index}]", problems)
            for index, each in enumerate(document)
        ]
    return document


def _part(document: Any, key: str | int) -> Any:
    try:
        return document[key]
    except (LookupError, TypeError):
        return None


def secret_values(request: SubmitJobRequest) -> dict[str, str]:
    """What `dump` leaves out, by the secrets' names. Of a stored request these are references."""
    values = {}
    for part in (request.training_config, request.workload):  # the workload's variables win
        if part is not None and part.environment:
            values.update({variable_secret(name): value for name, value in part.environment.items()})
    if (initializers := initializers_of(request.workload)) is not None:
        values.update(initializer_secrets(initializers))
    if request.output_config.hub_token is not None:
        values[HUB_TOKEN] = request.output_config.hub_token.get_secret_value()
    return values


def with_server_defaults(request: SubmitJobRequest, *, seed: int) -> SubmitJobRequest:
    """The request with what the server decides for it: a seed, where it names none."""
    data = request.data_config
    if data is None or data.seed is not None:
        return request
    return request.model_copy(update={"data_config": data.model_copy(update={"seed": seed})})


def _document(request: SubmitJobRequest, shown: Callable[[str], str]) -> dict[str, Any]:
    document = request.model_dump(mode="json")
    for part in (document["training_config"], document["workload"]):
        if part is not None and part["environment"]:
            part["environment"] = {name: shown(variable_secret(name)) for name in part["environment"]}
    if (initializers := initializers_of(request.workload)) is not None:
        conceal(initializers, document["workload"]["initializers"], shown)
    document["output_config"]["hub_token"] = shown(HUB_TOKEN) if request.output_config.hub_token else None
    return document
