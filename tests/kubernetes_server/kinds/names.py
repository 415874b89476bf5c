"""Validation of names and labels."""

from __future__ import annotations

import re

from kubernetes_server.objects import Object
from kubernetes_server.resources import Resource
from kubernetes_server.statuses import Cause, invalid_value, required

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")

LABEL_MESSAGE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    "an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_SUBDOMAIN_MESSAGE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_1035_MESSAGE = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is "
    "'[a-z]([-a-z0-9]*[a-z0-9])?')"
)
_VALUE_MESSAGE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
_KEY_MESSAGE = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)


def is_label(text: str) -> bool:
    return len(text) <= 63 and _LABEL.fullmatch(text) is not None


def metadata_causes(resource: Resource, obj: Object) -> list[Cause]:
    metadata = obj["metadata"]
    name = metadata.get("name", "")
    causes = []
    if not name:
        causes.append(required("metadata.name", "name or generateName is required"))
    elif resource.plural == "services":
        causes += _length(name, 63, "metadata.name")
        if not _DNS_1035.fullmatch(name):
            causes.append(invalid_value("metadata.name", name, _1035_MESSAGE))
    elif resource.plural == "namespaces":
        if not is_label(name):
            causes.append(invalid_value("metadata.name", name, LABEL_MESSAGE))
    elif not resource.group.startswith("rbac"):
        causes += _length(name, 253, "metadata.name")
        if not _SUBDOMAIN.fullmatch(name):
            causes.append(invalid_value("metadata.name", name, _SUBDOMAIN_MESSAGE))
    return causes + label_causes(metadata.get("labels") or {}, "metadata.labels")


def label_causes(labels: dict[str, str], field: str) -> list[Cause]:
    causes = []
    for key, value in labels.items():
        prefix, slash, name = key.rpartition("/")
        if (slash and not _SUBDOMAIN.fullmatch(prefix)) or len(name) > 63 or not _QUALIFIED.fullmatch(name):
            causes.append(invalid_value(field, key, _KEY_MESSAGE))
        if len(value) > 63:
            causes.append(invalid_value(field, value, "must be no more than 63 characters"))
        if not _VALUE.fullmatch(value):
            causes.append(invalid_value(field, value, _VALUE_MESSAGE))
    return causes


def _length(name: str, limit: int, field: str) -> list[Cause]:
    return [invalid_value(field, name, f"must be no more than {limit} characters")] if len(name) > limit else []
