"""Declared clusters: from a kind and what an operator says of a cluster to its options and its backend."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import SecretStr, ValidationError

from trainmaster.backends import CLUSTER_KINDS
from trainmaster.backends.base import Capabilities
from trainmaster.backends.cluster.backend import ClusterBackend
from trainmaster.backends.cluster.context import ClusterContext
from trainmaster.backends.cluster.engine import ClusterOptions


class WrongOptionsError(ValueError):
    """What an operator says of a cluster is wrong; the message has a line for each option."""


def options_model(kind: str) -> type[ClusterOptions]:
    """Raises WrongOptionsError if there is no such kind, or its library is not installed."""
    if kind not in CLUSTER_KINDS:
        raise WrongOptionsError(f"there is no kind {kind!r} of cluster; there are: {', '.join(CLUSTER_KINDS)}")
    library, extra = CLUSTER_KINDS[kind].library, CLUSTER_KINDS[kind].extra
    if library and importlib.util.find_spec(library) is None:
        raise WrongOptionsError(
            f"clusters of kind {kind} need {library}: run `pip install 'trainmaster[{extra}]'` where the server runs"
        )
    model: type[ClusterOptions] = _named(CLUSTER_KINDS[kind].options)
    return model


def parse_options(kind: str, values: Mapping[str, Any]) -> ClusterOptions:
    """The options of a cluster of this kind; raises WrongOptionsError."""
    model = options_model(kind)
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise WrongOptionsError("\n".join(_problems(model, error))) from None


def _problems(model: type[ClusterOptions], error: ValidationError) -> Iterable[str]:
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        name = ".".join(map(str, problem["loc"])) or "options"
        if problem["type"] == "extra_forbidden":
            yield f"{name}: there is no such option; there are: {', '.join(sorted(model.model_fields))}"
        elif problem["type"] in ("missing", "string_pattern_mismatch") and name in model.model_fields:
            what = "is required" if problem["type"] == "missing" else "is written differently"
            yield f"{name}: {what}. {model.model_fields[name].description or ''}".rstrip()
        else:
            yield f"{name}: {problem['msg'].removeprefix('Value error, ')}"


def secret_names(kind: str) -> frozenset[str]:
    """The options that are stored encrypted and never shown."""
    fields = options_model(kind).model_fields.items()
    return frozenset(name for name, field in fields if field.annotation is SecretStr)


def cluster_capabilities(kind: str, options: ClusterOptions) -> Capabilities:
    """What clusters of this kind can do, with these options."""
    declared = CLUSTER_KINDS[kind].capabilities
    return replace(
        declared,
        images=declared.images or options.runs_images,
        image_optional=not declared.images,
        server_url=options.server_url,
        files=options.files,
        submits_as_users=options.submits_as_users,
        own_image=options.own_image,
        job_nodes_apart=options.job_nodes_apart,
    )


def make_cluster(kind: str, options: ClusterOptions, context: ClusterContext) -> ClusterBackend:
    engine = _named(CLUSTER_KINDS[kind].engine)(context.name, context.instance, options)
    return ClusterBackend(engine, options, cluster_capabilities(kind, options), context)


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
