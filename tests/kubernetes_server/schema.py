"""The fields of the types that clients write most, so that a field that does not exist is noticed.

The real server drops unknown fields, with a warning, or refuses them with `fieldValidation=Strict`; a value of the
wrong type it always refuses.
"""

from __future__ import annotations

from typing import Any

from kubernetes_server.objects import Object
from kubernetes_server.resources import Resource
from kubernetes_server.statuses import StatusError

STR, INT, BOOL, ANY = "string", "int32", "bool", "any"
STRINGS: Any = {"*": STR}
"""A map of strings."""


def _fields(names: str, kind: str = STR) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_SELECTOR = {
    "matchLabels": STRINGS,
    "matchExpressions": [{**_fields("key operator"), "values": [STR]}],
}
_METADATA = {
    **_fields("name generateName namespace uid resourceVersion creationTimestamp deletionTimestamp selfLink"),
    **_fields("generation deletionGracePeriodSeconds", INT),
    "labels": STRINGS,
    "annotations": STRINGS,
    "finalizers": [STR],
    "ownerReferences": [{**_fields("apiVersion kind name uid"), **_fields("controller blockOwnerDeletion", BOOL)}],
    "managedFields": ANY,
}
_KEY_REF = {**_fields("name key"), "optional": BOOL}
_ENV = {
    **_fields("name value"),
    "valueFrom": {
        "secretKeyRef": _KEY_REF,
        "configMapKeyRef": _KEY_REF,
        "fieldRef": _fields("apiVersion fieldPath"),
        "resourceFieldRef": {**_fields("containerName resource"), "divisor": ANY},
    },
}
_NAME_REF = {"name": STR, "optional": BOOL}
_RESOURCES = {"limits": {"*": ANY}, "requests": {"*": ANY}, "claims": ANY}
_PROBE = {
    **_fields(
        "initialDelaySeconds timeoutSeconds periodSeconds successThreshold failureThreshold "
        "terminationGracePeriodSeconds",
        INT,
    ),
    **_fields("exec httpGet tcpSocket grpc", ANY),
}
_CONTAINER = {
    **_fields("name image workingDir imagePullPolicy terminationMessagePath terminationMessagePolicy restartPolicy"),
    **_fields("stdin stdinOnce tty", BOOL),
    **_fields("securityContext lifecycle resizePolicy volumeDevices", ANY),
    "command": [STR],
    "args": [STR],
    "env": [_ENV],
    "envFrom": [{"prefix": STR, "configMapRef": _NAME_REF, "secretRef": _NAME_REF}],
    "ports": [{**_fields("name protocol hostIP"), **_fields("containerPort hostPort", INT)}],
    "resources": _RESOURCES,
    "volumeMounts": [
        {**_fields("name mountPath subPath subPathExpr mountPropagation recursiveReadOnly"), "readOnly": BOOL}
    ],
    "livenessProbe": _PROBE,
    "readinessProbe": _PROBE,
    "startupProbe": _PROBE,
}
_ITEMS = [{**_fields("key path"), "mode": INT}]
_DOWNWARD = [{"path": STR, "mode": INT, "fieldRef": ANY, "resourceFieldRef": ANY}]
_CONFIG_MAP_SOURCE = {"name": STR, "items": _ITEMS, "optional": BOOL}
_VOLUME = {
    "name": STR,
    "emptyDir": {"medium": STR, "sizeLimit": ANY},
    "configMap": {**_CONFIG_MAP_SOURCE, "defaultMode": INT},
    "secret": {"secretName": STR, "items": _ITEMS, "optional": BOOL, "defaultMode": INT},
    "hostPath": _fields("path type"),
    "downwardAPI": {"items": _DOWNWARD, "defaultMode": INT},
    "projected": {"sources": ANY, "defaultMode": INT},
    "persistentVolumeClaim": {"claimName": STR, "readOnly": BOOL},
    **_fields("nfs csi ephemeral iscsi cephfs rbd image fc", ANY),
}
_TOLERATION = {**_fields("key operator value effect"), "tolerationSeconds": INT}
_POD_SPEC = {
    **_fields(
        "restartPolicy dnsPolicy serviceAccountName serviceAccount nodeName hostname subdomain schedulerName "
        "priorityClassName runtimeClassName preemptionPolicy"
    ),
    **_fields("terminationGracePeriodSeconds activeDeadlineSeconds priority", INT),
    **_fields(
        "automountServiceAccountToken hostNetwork hostPID hostIPC shareProcessNamespace setHostnameAsFQDN "
        "enableServiceLinks hostUsers",
        BOOL,
    ),
    **_fields("securityContext affinity dnsConfig readinessGates overhead os ephemeralContainers", ANY),
    **_fields("topologySpreadConstraints resourceClaims resources", ANY),
    "schedulingGates": [{"name": STR}],
    "containers": [_CONTAINER],
    "initContainers": [_CONTAINER],
    "volumes": [_VOLUME],
    "nodeSelector": STRINGS,
    "imagePullSecrets": [{"name": STR}],
    "tolerations": [_TOLERATION],
    "hostAliases": [{"ip": STR, "hostnames": [STR]}],
}
_FAILURE_RULE = {
    "action": STR,
    "onExitCodes": {**_fields("containerName operator"), "values": [INT]},
    "onPodConditions": [_fields("type status")],
}
_JOB_SPEC = {
    **_fields(
        "parallelism completions activeDeadlineSeconds backoffLimit backoffLimitPerIndex maxFailedIndexes "
        "ttlSecondsAfterFinished",
        INT,
    ),
    **_fields("suspend manualSelector", BOOL),
    **_fields("completionMode podReplacementPolicy managedBy"),
    "podFailurePolicy": {"rules": [_FAILURE_RULE]},
    "successPolicy": ANY,
    "selector": _SELECTOR,
    "template": {"metadata": _METADATA, "spec": _POD_SPEC},
}
_SERVICE_SPEC = {
    **_fields("clusterIP type sessionAffinity externalName internalTrafficPolicy externalTrafficPolicy ipFamilyPolicy"),
    **_fields("publishNotReadyAddresses allocateLoadBalancerNodePorts", BOOL),
    **_fields("clusterIPs ipFamilies externalIPs sessionAffinityConfig loadBalancerIP healthCheckNodePort", ANY),
    **_fields("loadBalancerClass loadBalancerSourceRanges trafficDistribution", ANY),
    "selector": STRINGS,
    "ports": [{**_fields("name protocol appProtocol"), **_fields("port nodePort", INT), "targetPort": ANY}],
}
_TOP = {"apiVersion": STR, "kind": STR, "metadata": _METADATA}
SCHEMAS: dict[str, dict[str, Any]] = {
    "pods": {**_TOP, "spec": _POD_SPEC, "status": ANY},
    "jobs.batch": {**_TOP, "spec": _JOB_SPEC, "status": ANY},
    "services": {**_TOP, "spec": _SERVICE_SPEC, "status": ANY},
    "configmaps": {**_TOP, "data": STRINGS, "binaryData": STRINGS, "immutable": BOOL},
    "secrets": {**_TOP, "data": STRINGS, "stringData": STRINGS, "type": STR, "immutable": BOOL},
    "leases.coordination.k8s.io": {
        **_TOP,
        "spec": {
            **_fields("holderIdentity acquireTime renewTime strategy preferredHolder"),
            **_fields("leaseDurationSeconds leaseTransitions", INT),
        },
    },
}


def prune(resource: Resource, obj: Object) -> list[str]:
    """Drop the fields that the type does not have, in place, and name them.

    Raises:
        StatusError: 400, a value has the wrong type.
    """
    unknown: list[str] = []
    if resource.custom:
        spec = (resource.schema.get("properties") or {}).get("spec") or {}
        _prune_custom(obj.get("spec"), spec, "spec", unknown)
        return unknown
    schema = SCHEMAS.get(resource.qualified, {**_TOP, "*": ANY})
    _prune(obj, schema, "", unknown, resource)
    return unknown


def _prune_custom(value: Any, schema: Object, at: str, unknown: list[str]) -> None:
    properties = schema.get("properties")
    if isinstance(value, list):
        for i, item in enumerate(value):
            _prune_custom(item, schema.get("items") or {}, f"{at}[{i}]", unknown)
    if properties is None or schema.get("x-kubernetes-preserve-unknown-fields") or not isinstance(value, dict):
        return
    for name in list(value):
        if name in properties:
            _prune_custom(value[name], properties[name], f"{at}.{name}", unknown)
        else:
            unknown.append(f"{at}.{name}")
            del value[name]


def _prune(value: Any, schema: Any, at: str, unknown: list[str], resource: Resource) -> None:
    if schema is ANY or value is None:
        return
    if isinstance(schema, dict):
        _expect(isinstance(value, dict), value, "object", at, resource)
        for name in list(value):
            inner = schema.get(name, schema.get("*"))
            path = f"{at}.{name}" if at else name
            if inner is None:
                unknown.append(path)
                del value[name]
            else:
                _prune(value[name], inner, path, unknown, resource)
    elif isinstance(schema, list):
        _expect(isinstance(value, list), value, "array", at, resource)
        for i, item in enumerate(value):
            _prune(item, schema[0], f"{at}[{i}]", unknown, resource)
    elif schema == STR:
        _expect(isinstance(value, str), value, "string", at, resource)
    elif schema == BOOL:
        _expect(isinstance(value, bool), value, "bool", at, resource)
    else:
        _expect(isinstance(value, int) and not isinstance(value, bool), value, schema, at, resource)


def _expect(holds: bool, value: Any, wanted: str, at: str, resource: Resource) -> None:
    if holds:
        return
    names = {str: "string", bool: "bool", int: "number", float: "number", dict: "object", list: "array"}
    message = (
        f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
        f"json: cannot unmarshal {names[type(value)]} into Go struct field .{at} of type {wanted}"
    )
    raise StatusError(400, "BadRequest", message)
