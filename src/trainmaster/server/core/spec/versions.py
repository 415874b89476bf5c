"""Stored specs outlive the version that wrote them: they carry a number, and are lifted step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainmaster.server.core.errors import NewerSpecError, SpecError
from trainmaster.server.core.fields import refuse
from trainmaster.server.core.spec.documents import secret_values
from trainmaster.server.core.spec.filters import Filters, broken_patterns
from trainmaster.server.core.spec.problems import problems_from
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.workloads.registry import STORED

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
