"""Label and field selectors."""

from __future__ import annotations

import re
from collections.abc import Callable

from kubernetes_server.objects import Object, at_path, labels_of
from kubernetes_server.resources import Resource
from kubernetes_server.statuses import bad_request

Predicate = Callable[[Object], bool]

_INVOLVED = ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
_EVENT_FIELDS = (
    *(f"involvedObject.{name}" for name in _INVOLVED),
    *("reason", "reportingComponent", "source", "type"),
)
_FIELDS = {
    "pods": (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "spec.hostNetwork",
        "status.phase",
        "status.podIP",
        "status.nominatedNodeName",
    ),
    "events": _EVENT_FIELDS,
    "nodes": ("spec.unschedulable",),
    "namespaces": ("status.phase",),
    "secrets": ("type",),
    "jobs": ("status.successful",),
    "services": ("spec.clusterIP", "spec.type"),
}
_TERM = re.compile(
    r"^\s*(?P<not>!)?\s*(?P<key>[A-Za-z0-9][-A-Za-z0-9_./]*|[A-Za-z0-9])\s*"
    r"(?:(?P<operator>==|=|!=)\s*(?P<value>[-A-Za-z0-9_.]*)|(?P<set>in|notin)\s*\((?P<values>[^)]*)\))?\s*$"
)


def label_predicate(selector: str) -> Predicate | None:
    """What a label selector accepts, or None if it accepts everything."""
    terms = [_label_term(term, selector) for term in _split(selector)]
    if not terms:
        return None
    return lambda obj: all(term(labels_of(obj)) for term in terms)


def field_predicate(selector: str, resource: Resource) -> Predicate | None:
    terms = [_field_term(term, selector, resource) for term in selector.split(",") if term]
    if not terms:
        return None
    return lambda obj: all(term(obj) for term in terms)


def matches_expression(labels: dict[str, str], key: str, operator: str, values: list[str]) -> bool:
    value = labels.get(key)
    match operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and int(value) > int(values[0])
        case "Lt":
            return value is not None and int(value) < int(values[0])
    return False


def _split(selector: str) -> list[str]:
    """At the commas outside parentheses."""
    return [term for term in re.split(r",(?![^(]*\))", selector) if term.strip()]


def _label_term(term: str, selector: str) -> Callable[[dict[str, str]], bool]:
    found = _TERM.match(term)
    if found is None or (found["not"] and (found["operator"] or found["set"])):
        raise bad_request(f"unable to parse requirement: invalid label selector {selector!r}")
    key = found["key"]
    if found["set"]:
        values = [value.strip() for value in found["values"].split(",")]
        operator = "In" if found["set"] == "in" else "NotIn"
    elif found["operator"]:
        values = [found["value"]]
        operator = "NotIn" if found["operator"] == "!=" else "In"
    else:
        values = []
        operator = "DoesNotExist" if found["not"] else "Exists"
    return lambda labels: matches_expression(labels, key, operator, values)


def _unknown_field(path: str, resource: Resource) -> str:
    if resource.plural == "jobs":
        return f'field label "{path}" not supported for Job'
    if resource.custom or resource.plural not in _FIELDS:
        return f'"{path}" is not a known field selector: only "metadata.name", "metadata.namespace"'
    return f"field label not supported: {path}"


def _field_term(term: str, selector: str, resource: Resource) -> Predicate:
    found = re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", term)
    if found is None:
        raise bad_request(f"invalid selector: '{selector}'; can't understand '{term}'")
    path, operator, wanted = found.groups()
    known = ("metadata.name", *(("metadata.namespace",) if resource.namespaced else ()))
    if path not in known + (() if resource.custom else _FIELDS.get(resource.plural, ())):
        gv = f"{resource.group}/{resource.version}" if resource.group else f"/{resource.version}"
        raise bad_request(
            f'Unable to find "{gv}, Resource={resource.plural}" that match label selector "", '
            f'field selector "{selector}": {_unknown_field(path, resource)}'
        )
    parts = ("status", "succeeded") if path == "status.successful" else tuple(path.split("."))
    if path == "source":
        parts = ("source", "component")

    def accepts(obj: Object) -> bool:
        value = at_path(obj, parts)
        text = (
            {True: "true", False: "false", None: ""}.get(value, str(value)) if value in (True, False, None) else value
        )
        return (str(text) == wanted) == (operator != "!=")

    return accepts
