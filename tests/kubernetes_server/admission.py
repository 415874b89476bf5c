"""What is checked and filled in with a look at other objects: namespaces, priorities, service accounts."""

from __future__ import annotations

from kubernetes_server import statuses
from kubernetes_server.objects import Object, random_suffix
from kubernetes_server.resources import NAMESPACES, PODS, PRIORITY_CLASSES, SERVICE_ACCOUNTS, Resource
from kubernetes_server.store import Store

TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"


def admit(store: Store, resource: Resource, obj: Object) -> None:
    """Complete a new object.

    Raises:
        StatusError: it may not be created.
    """
    metadata = obj["metadata"]
    if resource.namespaced:
        _check_namespace(store, resource, metadata.get("name", ""), metadata["namespace"])
    if resource is PODS:
        spec = obj.setdefault("spec", {})
        _set_priority(store, obj, spec)
        _set_service_account(store, obj, spec)


def _check_namespace(store: Store, resource: Resource, name: str, namespace: str) -> None:
    found = store.get(NAMESPACES.store_key, ("", namespace))
    if found is None:
        raise statuses.not_found(NAMESPACES, namespace)
    if "deletionTimestamp" in found["metadata"]:
        why = f"unable to create new content in namespace {namespace} because it is being terminated"
        error = statuses.forbidden(resource, name, why)
        cause = {"reason": "NamespaceTerminating", "message": f"namespace {namespace} is being terminated"}
        error.details = {**(error.details or {}), "causes": [{**cause, "field": "metadata.namespace"}]}
        raise error


def _set_priority(store: Store, pod: Object, spec: Object) -> None:
    name = spec.get("priorityClassName")
    if name:
        priority_class = store.get(PRIORITY_CLASSES.store_key, ("", name))
        if priority_class is None:
            why = f"no PriorityClass with name {name} was found"
            raise statuses.forbidden(PODS, pod["metadata"].get("name", ""), why)
    else:
        classes = [each for each in store.objects(PRIORITY_CLASSES.store_key) if each.get("globalDefault")]
        priority_class = min(classes, key=lambda each: int(each["value"]), default=None)
        if priority_class:
            spec["priorityClassName"] = priority_class["metadata"]["name"]
    spec["priority"] = priority_class["value"] if priority_class else 0
    spec.setdefault("preemptionPolicy", (priority_class or {}).get("preemptionPolicy", "PreemptLowerPriority"))


def _set_service_account(store: Store, pod: Object, spec: Object) -> None:
    namespace = pod["metadata"]["namespace"]
    name = spec.get("serviceAccountName") or spec.get("serviceAccount") or "default"
    account = store.get(SERVICE_ACCOUNTS.store_key, (namespace, name))
    if account is None:
        why = f'error looking up service account {namespace}/{name}: serviceaccount "{name}" not found'
        raise statuses.forbidden(PODS, pod["metadata"].get("name", ""), why)
    spec["serviceAccountName"] = spec["serviceAccount"] = name
    automount = spec.get("automountServiceAccountToken", account.get("automountServiceAccountToken", True))
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    without = [
        each
        for each in containers
        if isinstance(each, dict)
        and not any(mount.get("mountPath") == TOKEN_FOLDER for mount in each.get("volumeMounts") or ())
    ]
    if not automount or not without:
        return
    volume = f"kube-api-access-{random_suffix()}"
    namespace_file = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    sources = [
        {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace_file]}},
    ]
    projected = {"name": volume, "projected": {"sources": sources, "defaultMode": 0o644}}
    spec["volumes"] = [*(spec.get("volumes") or ()), projected]
    for container in without:
        mount = {"name": volume, "readOnly": True, "mountPath": TOKEN_FOLDER}
        container["volumeMounts"] = [*(container.get("volumeMounts") or ()), mount]
