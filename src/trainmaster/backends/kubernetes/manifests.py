"""The objects of an attempt: an Indexed Job, the Secret that it owns, and for a gang a headless Service. Pure.

The text of users is in annotations and, changed to what labels allow, in one label; a TrainJob may have the name of its
job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from trainmaster.backends.cluster.engine import EngineLaunch, EngineRefusedError
from trainmaster.backends.kubernetes.carried_python import carries_python, with_python
from trainmaster.backends.kubernetes.gpus import GpuChoice
from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.backends.kubernetes.overlays import WORKER, check_overlay, merged
from trainmaster.protocol.environment import ECHO
from trainmaster.protocol.request import EngineNeeds
from trainmaster.server.core.resources import REGION

Manifest = dict[str, Any]

PREFIX = "trainmaster.io/"
INSTANCE, ATTEMPT, ACCOUNT = f"{PREFIX}instance", f"{PREFIX}attempt", f"{PREFIX}account"
"""Labels: the Trainmaster that an object belongs to, the name of the attempt on the engine, and whose job it is."""
ATTEMPT_ID, JOB_NAME = f"{PREFIX}attempt-id", f"{PREFIX}job-name"
"""Annotations with text as it is."""
STARTED = f"{PREFIX}started"
"""The annotation that a Job gets when all that belongs to it is there. Without it, nothing has run."""
NODE = "node"
"""The container, and the replicated job, of a training runtime in which a job works."""
MANAGED_BY = "app.kubernetes.io/managed-by"
QUEUE = "kueue.x-k8s.io/queue-name"
NODE_VARIABLE = "JOB_COMPLETION_INDEX"
REGION_LABEL = "topology.kubernetes.io/region"

SETUP_S = 600
"""What an attempt may need in addition to max_runtime_s, which counts from the start of its ranks: pulling its image,
fetching the worker, packages and data. Its own timeout thus comes before that of Kubernetes."""
_GRACE_MARGIN_S = 10
"""After the grace of the ranks: for the worker to report how they ended."""
_LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,59}[a-z0-9])?")
_LONGEST_ANNOTATION = 1000
_PREFERENCE = 10
"""The weight of a label to prefer or to avoid."""


def job(launch: EngineLaunch, options: KubernetesOptions, gpus: GpuChoice) -> Manifest:
    """Suspended, as the Secret has to be there first; `started` lets it go.

    Raises EngineRefusedError if an attempt needs what Kubernetes cannot express.
    """
    if _NAME.fullmatch(launch.name) is None:
        raise ValueError(f"{launch.name!r} is no name of an attempt")
    count = launch.node_count
    spec: Manifest = {
        "suspend": True,
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        # Retries are Trainmaster's own; what Kubernetes disrupts fails the Job, and says so.
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
    }
    if launch.request.max_runtime_s is not None:
        spec["activeDeadlineSeconds"] = math.ceil(launch.request.max_runtime_s + SETUP_S + launch.grace_s)
    spec["template"] = pod_template(launch, options, gpus)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata_of_job(launch), "spec": spec}


def started(options: KubernetesOptions) -> Manifest:
    """The patch with which a complete Job goes to the queue. Kueue lets those go that have its label."""
    marks: Manifest = {"annotations": {STARTED: "true"}}
    if options.kueue_queue:
        return {"metadata": {**marks, "labels": {QUEUE: options.kueue_queue}}}
    return {"metadata": marks, "spec": {"suspend": False}}


def is_started(job: Manifest) -> bool:
    return bool((job["metadata"].get("annotations") or {}).get(STARTED) == "true")


def secret(launch: EngineLaunch, owner: Manifest) -> Manifest:
    values = dict(launch.secrets)
    head = {**metadata(launch), "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": head, "type": "Opaque", "stringData": values}


def service(launch: EngineLaunch, owner: Manifest) -> Manifest:
    """Gives the pods of a gang names, `NAME-0.NAME`, before they are ready."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {ATTEMPT: launch.name}}
    head = {**metadata(launch), "ownerReferences": [owner]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": head, "spec": spec}


def needs_service(launch: EngineLaunch, made: Manifest) -> bool:
    """A JobSet has a Service of its own."""
    return launch.node_count > 1 and made["kind"] == "Job"


def owner_of(created: Manifest) -> Manifest:
    """What makes Kubernetes remove an object with its Job. The Job does not wait for that: to have it wait takes the
    right to update its finalizers (OwnerReferencesPermissionEnforcement)."""
    head = created["metadata"]
    owner = {"apiVersion": created["apiVersion"], "kind": created["kind"], "name": head["name"], "uid": head["uid"]}
    return {**owner, "controller": True}


def metadata(launch: EngineLaunch) -> Manifest:
    return {"name": launch.name, "labels": labels(launch), "annotations": notes(launch)}


def metadata_of_job(launch: EngineLaunch) -> Manifest:
    """With the labels and annotations that the attempt asks for."""
    asked, own = launch.request.launch.kubernetes, metadata(launch)
    return {
        **own,
        "labels": {**asked.labels, **own["labels"]},
        "annotations": {**asked.annotations, **own["annotations"]},
    }


def labels(launch: EngineLaunch) -> dict[str, str]:
    own = {MANAGED_BY: "trainmaster", INSTANCE: launch.instance, ATTEMPT: launch.name}
    return {**own, ACCOUNT: label_value(launch.needs.account)}


def notes(launch: EngineLaunch) -> dict[str, str]:
    return {
        ATTEMPT_ID: launch.request.attempt_id,
        ACCOUNT: launch.needs.account,
        JOB_NAME: launch.needs.job_name[:_LONGEST_ANNOTATION],
    }


def label_value(text: str) -> str:
    """Any text as the value of a label.

    >>> label_value("team A/ü"), label_value("-x-")
    ('team-A', 'x')
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("-_.")


def pod_template(launch: EngineLaunch, options: KubernetesOptions, gpus: GpuChoice) -> Manifest:
    """What the pods of an attempt have in common, whatever makes them."""
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(launch.grace_s) + _GRACE_MARGIN_S,
        # Variables for every Service of the namespace would be settings of programs that know none of them.
        "enableServiceLinks": False,
        "automountServiceAccountToken": bool(options.service_account),
        "tolerations": _tolerations(options),
    }
    if launch.node_count > 1:
        spec["subdomain"] = launch.name
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secrets]
    if name := options.priority_class(launch.needs.priority):
        spec["priorityClassName"] = name
    if affinity := _affinity(launch.needs, options, gpus):
        spec["affinity"] = {"nodeAffinity": affinity}
    spec["containers"] = [_container(launch, options)]
    spec["volumes"] = [{"name": "shm", "emptyDir": _shared_memory(launch, options)}]
    own = {"metadata": {"labels": labels(launch), "annotations": notes(launch)}, "spec": spec}
    template = merged(own, options.pod_template)
    for patch in launch.request.launch.kubernetes.pod_patches:
        template = merged(template, _of_worker(patch))
    # An overlay adds labels and annotations; it does not change whose the pods are.
    template = merged(template, {"metadata": own["metadata"]})
    return with_python(template, options) if carries_python(launch, options) else template


def _of_worker(patch: Mapping[str, Any]) -> Manifest:
    """A patch of the pods of a training runtime, whose container has another name. Raises EngineRefusedError."""
    spec = patch.get("spec") or {}
    containers = [
        {**each, "name": WORKER} if each.get("name") == NODE else each for each in spec.get("containers") or ()
    ]
    ours = {**patch, "spec": {**spec, **({"containers": containers} if containers else {})}}
    try:
        check_overlay(ours)
    except ValueError as error:
        raise EngineRefusedError(f"a runtime patch cannot be applied: {error}") from None
    return ours


def _container(launch: EngineLaunch, options: KubernetesOptions) -> Manifest:
    asked = launch.request.launch.container
    variables: list[Manifest] = [
        {"name": name, "value": literal(value)} for name, value in sorted(launch.environment.items())
    ]
    variables.append({"name": ECHO, "value": "1"})
    if not launch.needs.gpus:
        # Images for GPUs would otherwise see all GPUs of the node.
        variables.append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"})
    variables += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": launch.name, "key": name}}} for name in launch.secrets
    ]
    container: Manifest = {
        "name": WORKER,
        "image": launch.request.launch.image or options.image,
        "imagePullPolicy": asked.pull_policy or options.image_pull_policy.value,
        "command": [literal(word) for word in launch.command],
        "env": variables,
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if amounts := _amounts(launch.needs, options):
        container["resources"] = {"requests": amounts, "limits": amounts}
    return container


def literal(text: str) -> str:
    """Text in which Kubernetes replaces nothing: `$(NAME)` would be a variable, and `$$` one dollar.

    >>> literal("$(date) costs $5"), literal("$HOME")
    ('$$(date) costs $$5', '$HOME')
    """
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _amounts(needs: EngineNeeds, options: KubernetesOptions) -> dict[str, str]:
    wanted = {
        "cpu": str(needs.cpu_cores),
        "memory": f"{needs.memory_mb}Mi",
        "ephemeral-storage": f"{needs.storage_mb}Mi",
        options.gpu_resource: str(needs.gpus),
    }
    return {name: amount for name, amount in wanted.items() if not amount.startswith("0")}


def _shared_memory(launch: EngineLaunch, options: KubernetesOptions) -> Manifest:
    size_mb = launch.request.launch.container.shm_mb or options.shm_mb or launch.needs.memory_mb
    return {"medium": "Memory", **({"sizeLimit": f"{size_mb}Mi"} if size_mb else {})}


def _tolerations(options: KubernetesOptions) -> list[Manifest]:
    lost = [
        {
            "key": f"node.kubernetes.io/{condition}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": options.node_lost_after_s,
        }
        for condition in ("not-ready", "unreachable")
    ]
    return [*options.tolerations, *lost]


def _affinity(needs: EngineNeeds, options: KubernetesOptions, gpus: GpuChoice) -> Manifest:
    required = [{"key": key, "operator": "In", "values": [value]} for key, value in options.node_selector.items()]
    for name in needs.capabilities:
        if (expression := node_label(name)) is None:
            raise EngineRefusedError(f"the capability {name!r} cannot be a label of a Kubernetes node; leave it out")
        required.append(expression)
    if gpus.values:
        required.append({"key": options.gpu_type_label, "operator": "In", "values": list(gpus.values)})
    # What cannot be a label is on no node, and soft wishes need not come true.
    liked = [each for name in needs.affinity if (each := node_label(name)) is not None]
    avoided = [{**each, "operator": "NotIn"} for name in needs.anti_affinity if (each := node_label(name)) is not None]
    affinity: Manifest = {}
    if required:
        terms = [{"matchExpressions": required}]
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": terms}
    if liked or avoided:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": _PREFERENCE, "preference": {"matchExpressions": [each]}} for each in (*liked, *avoided)
        ]
    return affinity


def node_label(capability: str) -> Manifest | None:
    """The label of nodes that a capability is: `key=value`, or a key that is there and not false.

    >>> node_label("zone=a"), node_label("a b")
    ({'key': 'zone', 'operator': 'In', 'values': ['a']}, None)
    """
    key, equals, value = capability.partition("=")
    if capability.startswith(REGION):
        key = REGION_LABEL
    if _LABEL.fullmatch(key) is None or _VALUE.fullmatch(value) is None:
        return None
    return {"key": key, "operator": "In", "values": [value] if equals else ["", "true"]}


def document(launch: EngineLaunch, made: Manifest, patch: Manifest, *, namespace: str = "") -> str:
    """All objects of an attempt as YAML, without the values of secrets: the one that runs it, what that owns, and what
    is changed once all of them are there."""
    owner = owner_of({**made, "metadata": {**made["metadata"], "uid": f"(of the {made['kind']})"}})
    hidden = secret(launch, owner)
    hidden["stringData"] = dict.fromkeys(launch.secrets, "(hidden)")
    objects = [made, hidden, *([service(launch, owner)] if needs_service(launch, made) else [])]
    for each in objects:
        if namespace:
            each["metadata"] = {"name": launch.name, "namespace": namespace, **each["metadata"]}
    changes = yaml.dump(patch, Dumper=_Dumper, sort_keys=False, width=120)
    comment = "".join(f"#   {line}\n" for line in changes.splitlines())
    text = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120)
    return f"{text}---\n# Once all of them are there, the {made['kind']} is patched:\n{comment}"


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such, and everything in full."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
