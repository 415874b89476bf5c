"""Pods: defaults and validation of their specification, also of the templates in jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kubernetes_server.kinds.names import LABEL_MESSAGE, is_label
from kubernetes_server.objects import Object, clone
from kubernetes_server.quantities import quantity
from kubernetes_server.statuses import (
    Cause,
    duplicate,
    forbidden_field,
    invalid_value,
    not_found_cause,
    required,
    unsupported,
)

TOLERATED_S = 300
"""For how long a pod stays on a node that is lost, if it does not say."""


def default_pod_spec(spec: Object) -> None:
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    if account := spec.get("serviceAccountName") or spec.get("serviceAccount"):
        spec["serviceAccountName"] = spec["serviceAccount"] = account
    for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        image = container.get("image", "")
        tag = image.rpartition("/")[2].partition(":")[2]
        latest = "@" not in image and tag in ("", "latest")
        container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        resources = container.setdefault("resources", {})
        if limits := resources.get("limits"):
            requests = resources.setdefault("requests", {})
            for name, value in limits.items():
                requests.setdefault(name, value)
        for kind in ("limits", "requests"):
            for name, value in (resources.get(kind) or {}).items():
                if not isinstance(value, str):
                    resources[kind][name] = str(value)
        for port in container.get("ports", ()):
            port.setdefault("protocol", "TCP")
        for variable in container.get("env", ()):
            reference = (variable.get("valueFrom") or {}).get("fieldRef")
            if reference is not None:
                reference.setdefault("apiVersion", "v1")
        for name in ("readinessProbe", "livenessProbe", "startupProbe"):
            if probe := container.get(name):
                probe.setdefault("timeoutSeconds", 1)
                probe.setdefault("periodSeconds", 10)
                probe.setdefault("successThreshold", 1)
                probe.setdefault("failureThreshold", 3)
                if "httpGet" in probe:
                    probe["httpGet"].setdefault("path", "/")
                    probe["httpGet"].setdefault("scheme", "HTTP")
    for volume in spec.get("volumes", ()):
        if len(volume) == 1:
            volume["emptyDir"] = {}
        for kind in ("configMap", "secret", "downwardAPI", "projected"):
            if isinstance(volume.get(kind), dict):
                volume[kind].setdefault("defaultMode", 0o644)
        if isinstance(volume.get("hostPath"), dict):
            volume["hostPath"].setdefault("type", "")


def default_pod(pod: Object) -> None:
    default_pod_spec(pod.setdefault("spec", {}))
    spec = pod["spec"]
    spec.setdefault("enableServiceLinks", True)
    tolerations = spec.setdefault("tolerations", [])
    for name in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{name}"
        if not any(each.get("key") in (key, None, "") and each.get("effect") != "NoSchedule" for each in tolerations):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": TOLERATED_S}
            )
    pod["status"] = {"phase": "Pending", "qosClass": qos_class(spec)}


def qos_class(spec: Object) -> str:
    containers = [*spec.get("initContainers", ()), *spec.get("containers", ())]
    resources = [container.get("resources") or {} for container in containers]
    compute = ("cpu", "memory")
    wanted = [
        (each.get("requests") or {}).get(name) or (each.get("limits") or {}).get(name)
        for each in resources
        for name in compute
    ]
    if not any(wanted):
        return "BestEffort"
    guaranteed = all(
        (each.get("limits") or {}).get(name) and each["limits"][name] == (each.get("requests") or {}).get(name)
        for each in resources
        for name in compute
    )
    return "Guaranteed" if guaranteed else "Burstable"


def pod_spec_causes(spec: Object, at: str, restart_policies: tuple[str, ...] = ()) -> list[Cause]:
    causes = list(_container_list_causes(spec, at))
    policy = spec.get("restartPolicy")
    if restart_policies and policy not in restart_policies:
        if policy == "Always":
            causes.append(
                Cause(
                    field=f"{at}.restartPolicy",
                    message='Required value: valid values: "OnFailure", "Never"',
                    reason="FieldValueRequired",
                )
            )
        else:
            causes.append(unsupported(f"{at}.restartPolicy", policy, restart_policies))
    elif policy not in ("Always", "OnFailure", "Never"):
        causes.append(unsupported(f"{at}.restartPolicy", policy, ("Always", "OnFailure", "Never")))
    causes += [
        invalid_value(f"{at}.{name}", spec[name], LABEL_MESSAGE)
        for name in ("hostname", "subdomain")
        if spec.get(name) and not is_label(spec[name])
    ]
    names: set[str] = set()
    for i, volume in enumerate(spec.get("volumes", ())):
        name = volume.get("name", "")
        if not name:
            causes.append(required(f"{at}.volumes[{i}].name"))
        elif not is_label(name):
            causes.append(invalid_value(f"{at}.volumes[{i}].name", name, LABEL_MESSAGE))
        if name in names:
            causes.append(duplicate(f"{at}.volumes[{i}].name", name))
        names.add(name)
        if len([key for key in volume if key != "name"]) > 1:
            causes.append(forbidden_field(f"{at}.volumes[{i}]", "may not specify more than 1 volume type"))
    for i, toleration in enumerate(spec.get("tolerations") or ()):
        if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
            text = "effect must be 'NoExecute' when `tolerationSeconds` is set"
            causes.append(invalid_value(f"{at}.tolerations[{i}].effect", toleration.get("effect", ""), text))
        if toleration.get("operator", "Equal") == "Exists" and toleration.get("value"):
            text = "value must be empty when `operator` is 'Exists'"
            causes.append(invalid_value(f"{at}.tolerations[{i}].operator", toleration["value"], text))
    return causes


def pod_update_causes(new: Object, old: Object) -> list[Cause]:
    """Only a few fields of a pod may change."""

    def fixed(pod: Object) -> Any:
        spec = clone(pod["spec"])
        for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
            container.pop("image", None)
        for name in ("activeDeadlineSeconds", "terminationGracePeriodSeconds", "schedulingGates"):
            spec.pop(name, None)
        tolerations = spec.pop("tolerations", None) or []
        return spec, tolerations

    (new_spec, new_tolerations), (old_spec, old_tolerations) = fixed(new), fixed(old)
    if old["spec"].get("schedulingGates"):
        for spec in (new_spec, old_spec):
            spec.pop("nodeSelector", None)
            spec.pop("affinity", None)
    if new_spec == old_spec and all(each in new_tolerations for each in old_tolerations):
        return []
    text = (
        "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
        "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
        "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
    )
    return [forbidden_field("spec", text)]


def _container_list_causes(spec: Object, at: str) -> Iterator[Cause]:
    volumes = {volume.get("name") for volume in spec.get("volumes", ())}
    names: set[str] = set()
    if not spec.get("containers"):
        yield required(f"{at}.containers")
    for field in ("initContainers", "containers"):
        for i, container in enumerate(spec.get(field) or ()):
            place = f"{at}.{field}[{i}]"
            name = container.get("name", "")
            if not name:
                yield required(f"{place}.name")
            elif not is_label(name):
                yield invalid_value(f"{place}.name", name, LABEL_MESSAGE)
            elif name in names:
                yield duplicate(f"{place}.name", name)
            names.add(name)
            if not container.get("image"):
                yield required(f"{place}.image")
            yield from _container_causes(container, place, volumes)


def _container_causes(container: Object, place: str, volumes: set[str | None]) -> Iterator[Cause]:
    paths: set[str] = set()
    for i, mount in enumerate(container.get("volumeMounts") or ()):
        at = f"{place}.volumeMounts[{i}]"
        if not mount.get("name"):
            yield required(f"{at}.name")
        elif mount["name"] not in volumes:
            yield not_found_cause(f"{at}.name", mount["name"])
        if not mount.get("mountPath"):
            yield required(f"{at}.mountPath")
        elif mount["mountPath"] in paths:
            yield invalid_value(f"{at}.mountPath", mount["mountPath"], "must be unique")
        paths.add(mount.get("mountPath", ""))
    for i, variable in enumerate(container.get("env") or ()):
        if not variable.get("name"):
            yield required(f"{place}.env[{i}].name")
        if variable.get("value") and variable.get("valueFrom"):
            yield invalid_value(f"{place}.env[{i}].valueFrom", "", "may not be specified when `value` is not empty")
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    for kind in ("limits", "requests"):
        for name, value in (resources.get(kind) or {}).items():
            try:
                number = quantity(value)
            except ValueError:
                text = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
                yield invalid_value(f"{place}.resources.{kind}[{name}]", value, text)
                continue
            if number < 0:
                text = "must be greater than or equal to 0"
                yield invalid_value(f"{place}.resources.{kind}[{name}]", value, text)
            if kind == "requests" and name in limits and number > quantity(limits[name]):
                text = f"must be less than or equal to {name} limit of {limits[name]}"
                yield invalid_value(f"{place}.resources.requests", value, text)
            if kind == "requests" and "/" in name and name not in limits:
                yield required(f"{place}.resources.limits", "Limit must be set for non overcommitable resources")
    for kind in ("exec", "httpGet"):
        probe = container.get("readinessProbe") or {}
        if kind in probe and not isinstance(probe[kind], dict):
            yield required(f"{place}.readinessProbe", json.dumps(probe[kind]))
