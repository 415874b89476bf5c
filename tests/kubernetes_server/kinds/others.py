"""Defaults and validation of the smaller kinds."""

from __future__ import annotations

import base64
import binascii

from kubernetes_server.objects import Object
from kubernetes_server.statuses import Cause, StatusError, forbidden_field, invalid_value, required

SIZE_LIMIT = 1024 * 1024
"""Bytes in one ConfigMap or Secret."""


def default_secret(secret: Object) -> None:
    secret.setdefault("type", "Opaque")
    if (plain := secret.pop("stringData", None)) is not None:
        data = secret.setdefault("data", {}) or {}
        secret["data"] = data | {name: base64.b64encode(value.encode()).decode() for name, value in plain.items()}
    for name, value in (secret.get("data") or {}).items():
        try:
            base64.b64decode(value, validate=True)
        except binascii.Error as error:
            text = (
                'Secret in version "v1" cannot be handled as a Secret: illegal base64 data at input byte 0 '
                f"(key {name})"
            )
            raise StatusError(400, "BadRequest", text) from error


def data_causes(obj: Object) -> list[Cause]:
    encoded = obj["kind"] == "Secret"
    values = [*(obj.get("data") or {}).values()]
    sizes = sum(len(value) * 3 // 4 if encoded else len(value.encode()) for value in values)
    sizes += sum(len(value) * 3 // 4 for value in (obj.get("binaryData") or {}).values())
    causes = []
    if sizes > SIZE_LIMIT:
        text = f"Too long: may not be more than {SIZE_LIMIT} bytes"
        causes.append(Cause(field="data" if encoded else "[]", message=text, reason="FieldValueTooLong"))
    for name in obj.get("data") or {}:
        if not name or len(name) > 253 or not all(letter.isalnum() or letter in "-_." for letter in name):
            text = (
                "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or "
                "'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
            )
            causes.append(invalid_value(f"data[{name}]", name, text))
    return causes


def data_update_causes(new: Object, old: Object) -> list[Cause]:
    if not old.get("immutable"):
        return []
    text = "field is immutable when `immutable` is set"
    return [
        forbidden_field(name, text)
        for name in ("immutable", "data", "binaryData")
        if (new.get(name) or None) != (old.get(name) or None)
    ]


def default_service(service: Object) -> None:
    spec = service.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    spec.setdefault("internalTrafficPolicy", "Cluster")
    if spec["type"] != "ExternalName":
        spec.setdefault("ipFamilies", ["IPv4"])
        spec.setdefault("ipFamilyPolicy", "SingleStack")
        # Nothing serves these addresses: only headless services can be reached.
        spec.setdefault("clusterIP", f"10.96.{hash(service['metadata'].get('name')) % 250}.7")
        spec.setdefault("clusterIPs", [spec["clusterIP"]])
    for port in spec.get("ports") or ():
        port.setdefault("protocol", "TCP")
        port.setdefault("targetPort", port.get("port"))
    service.setdefault("status", {"loadBalancer": {}})


def service_causes(service: Object) -> list[Cause]:
    spec = service["spec"]
    if not spec.get("ports") and spec.get("clusterIP") != "None" and spec["type"] != "ExternalName":
        return [required("spec.ports")]
    return []


def service_update_causes(new: Object, old: Object) -> list[Cause]:
    causes = []
    for name in ("clusterIP", "clusterIPs"):
        new["spec"].setdefault(name, old["spec"].get(name))
    if new["spec"].get("clusterIP") != old["spec"].get("clusterIP"):
        causes.append(invalid_value("spec.clusterIPs[0]", new["spec"].get("clusterIP", ""), "may not change once set"))
    return causes


def priority_class_update_causes(new: Object, old: Object) -> list[Cause]:
    return [
        Cause(field=name, message="Forbidden: may not be changed in an update.", reason="FieldValueForbidden")
        for name in ("value", "preemptionPolicy")
        if new.get(name) != old.get(name)
    ]


def default_priority_class(obj: Object) -> None:
    obj.setdefault("preemptionPolicy", "PreemptLowerPriority")


def default_namespace(namespace: Object) -> None:
    namespace["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = namespace["metadata"]["name"]
    namespace["spec"] = {"finalizers": ["kubernetes"]}
    namespace["status"] = {"phase": "Active"}


def default_node(node: Object) -> None:
    node.setdefault("spec", {})
    status = node.setdefault("status", {})
    if "capacity" in status:
        status.setdefault("allocatable", dict(status["capacity"]))


def default_claim(claim: Object) -> None:
    claim.setdefault("spec", {}).setdefault("volumeMode", "Filesystem")
    # There are no volumes, so claims are bound at once to a folder of the test server.
    claim["spec"].setdefault("volumeName", f"pvc-{claim['metadata'].get('uid', '')}")
    claim["status"] = {"phase": "Bound"}


def default_definition(definition: Object) -> None:
    names = definition["spec"]["names"]
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", f"{names['kind']}List")
    definition["spec"].setdefault("conversion", {"strategy": "None"})
    definition["status"] = {
        "acceptedNames": dict(names),
        "storedVersions": [version["name"] for version in definition["spec"]["versions"] if version.get("storage")],
        "conditions": [
            {"type": "NamesAccepted", "status": "True", "reason": "NoConflicts", "message": "no conflicts found"},
            {
                "type": "Established",
                "status": "True",
                "reason": "InitialNamesAccepted",
                "message": "the initial names have been accepted",
            },
        ],
    }


def definition_causes(definition: Object) -> list[Cause]:
    spec = definition.get("spec") or {}
    wanted = f"{spec['names']['plural']}.{spec['group']}"
    if definition["metadata"].get("name") != wanted:
        text = 'must be spec.names.plural+"."+spec.group'
        return [invalid_value("metadata.name", definition["metadata"].get("name", ""), text)]
    return []
