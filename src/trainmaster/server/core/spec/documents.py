"""Job specs as stored documents: without the values of secrets, and with a version that is raised step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainmaster.protocol.secrets import HUB_TOKEN, reference_to, variable_secret
from trainmaster.server.core.errors import NewerSpecError, Problem, SpecError
from trainmaster.server.core.fields import STORED, refuse
from trainmaster.server.core.spec.data import Filters, broken_patterns
from trainmaster.server.core.spec.problems import problems_from
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


def _document(request: SubmitJobRequest, shown: Callable[[str], str]) -> dict[str, Any]:
    document = request.model_dump(mode="json")
    for part in (document["training_config"], document["workload"]):
        if part is not None and part["environment"]:
            part["environment"] = {name: shown(variable_secret(name)) for name in part["environment"]}
    if (initializers := initializers_of(request.workload)) is not None:
        conceal(initializers, document["workload"]["initializers"], shown)
    document["output_config"]["hub_token"] = shown(HUB_TOKEN) if request.output_config.hub_token else None
    return document


SPEC_VERSION = 3
"""Stored beside every document; raised whenever an old document would be read wrongly."""

Upcaster = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_SEALED_SINCE = 2
"""From this version on the values of secrets are not in the document; version 1 has them in the clear."""
_FILTERS: TypeAdapter[Any] = TypeAdapter(Filters | None)


def _from_2(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """`sampling.max` has another name; filters, which had no effect, were not checked; nor was data fetched."""
    changed = dict(document)
    data, training = document.get("data_config"), document.get("training_config")
    if data is not None:
        changed["data_config"] = {**data, "sources": [_with_checked_rows(source) for source in data["sources"]]}
    if document.get("workload") is None and training is not None and training["framework"]["custom_script_path"]:
        changed["workload"] = _script_alone(training["framework"], document["resource_config"])
    return changed


def _with_checked_rows(source: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(source)
    if (sampling := source.get("sampling")) is not None:
        changed["sampling"] = {("max_samples" if name == "max" else name): value for name, value in sampling.items()}
    try:
        filters = _FILTERS.validate_python(source.get("filters"))
        refuse(broken_patterns([filters]))
    except ValidationError:
        changed["filters"] = None
    return changed


def _script_alone(framework: Mapping[str, Any], resources: Mapping[str, Any]) -> dict[str, Any]:
    """The workload of a job that names none: a CUSTOM script, before which nothing ran."""
    nodes = resources["node_count"]
    ranks = framework["distributed"]["world_size"] or resources["gpu_count"] or nodes
    return {"kind": "script", "path": framework["custom_script_path"], "ranks_per_node": ranks // nodes}


UPCASTERS: Mapping[int, Upcaster] = {1: lambda document: document, 2: _from_2}
"""From a version to the next one. Every version below ours has one."""


def load_stored(version: int, document: Mapping[str, Any]) -> SubmitJobRequest:
    """The request of a stored document. Fields that are not known any more are ignored.

    Raises:
        NewerSpecError: a newer version of Trainmaster wrote it.
        SpecError: it cannot be read, because its workload kind is not known any more, for one.
    """
    if version > SPEC_VERSION:
        raise NewerSpecError(
            f"stored job spec has version {version}, and this server reads up to {SPEC_VERSION}; upgrade"
        )
    for older in range(version, SPEC_VERSION):
        document = UPCASTERS[older](document)
    try:
        return SubmitJobRequest.model_validate(document, extra="ignore", context=STORED)
    except ValidationError as error:
        problems = problems_from(error, SubmitJobRequest, document)
    raise SpecError(problems)


def unsealed_values(version: int, document: Mapping[str, Any]) -> dict[str, str]:
    """The values of secrets that an old document has in the clear, by the secrets' names."""
    return secret_values(load_stored(version, document)) if version < _SEALED_SINCE else {}
