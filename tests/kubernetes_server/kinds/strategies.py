"""What the server does with each kind before it stores an object: defaults and validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kubernetes_server.kinds import jobs, others, pods
from kubernetes_server.objects import Object
from kubernetes_server.resources import (
    CLAIMS,
    CONFIG_MAPS,
    DEFINITIONS,
    JOBS,
    NAMESPACES,
    NODES,
    PODS,
    PRIORITY_CLASSES,
    SECRETS,
    SERVICES,
    Resource,
)
from kubernetes_server.statuses import Cause


def _nothing(obj: Object) -> None:
    pass


def _no_causes(obj: Object) -> list[Cause]:
    return []


def _no_update_causes(new: Object, old: Object) -> list[Cause]:
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    default: Callable[[Object], None] = _nothing
    """Fills in a new object."""
    default_update: Callable[[Object], None] = _nothing
    """Fills in an object that replaces another."""
    validate: Callable[[Object], list[Cause]] = _no_causes
    validate_update: Callable[[Object, Object], list[Cause]] = _no_update_causes
    with_identity: Callable[[Object], None] = _nothing
    """Fills in what depends on the name and the uid of a new object."""


def _validate_pod(pod: Object) -> list[Cause]:
    return pods.pod_spec_causes(pod["spec"], "spec")


def _default_pod_update(pod: Object) -> None:
    pods.default_pod_spec(pod["spec"])


_STRATEGIES = {
    PODS.store_key: Strategy(
        default=pods.default_pod,
        default_update=_default_pod_update,
        validate=_validate_pod,
        validate_update=pods.pod_update_causes,
    ),
    JOBS.store_key: Strategy(
        default=jobs.default_job,
        default_update=jobs.default_job,
        validate=jobs.job_causes,
        validate_update=jobs.job_update_causes,
        with_identity=jobs.own_pods,
    ),
    SECRETS.store_key: Strategy(
        default=others.default_secret,
        default_update=others.default_secret,
        validate=others.data_causes,
        validate_update=others.data_update_causes,
    ),
    CONFIG_MAPS.store_key: Strategy(validate=others.data_causes, validate_update=others.data_update_causes),
    SERVICES.store_key: Strategy(
        default=others.default_service,
        validate=others.service_causes,
        validate_update=others.service_update_causes,
    ),
    PRIORITY_CLASSES.store_key: Strategy(
        default=others.default_priority_class,
        default_update=others.default_priority_class,
        validate_update=others.priority_class_update_causes,
    ),
    NAMESPACES.store_key: Strategy(default=others.default_namespace),
    NODES.store_key: Strategy(default=others.default_node, default_update=others.default_node),
    CLAIMS.store_key: Strategy(with_identity=others.default_claim),
    DEFINITIONS.store_key: Strategy(default=others.default_definition, validate=others.definition_causes),
}
_PLAIN = Strategy()


def strategy_of(resource: Resource) -> Strategy:
    return _STRATEGIES.get(resource.store_key, _PLAIN)
