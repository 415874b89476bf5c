"""The JobSet of a TrainJob, from its runtime. Pure."""

from __future__ import annotations

from kubernetes_server.objects import Object, clone, owner_reference
from kubernetes_server.patches import strategic_merge
from kubernetes_server.trainer.definitions import JOB_SETS
from kubernetes_server.trainer.runtimes import ANCESTOR

PORT = 29500


def job_set_of(train_job: Object, runtime: Object) -> Object:
    spec, metadata = train_job["spec"], train_job["metadata"]
    template = clone(runtime["spec"]["template"])
    set_spec = template["spec"]
    for job in set_spec["replicatedJobs"]:
        job.setdefault("replicas", 1)
        step = (job["template"].get("metadata") or {}).get("labels", {}).get(ANCESTOR, "")
        if step == "trainer":
            _set_trainer(job, train_job, runtime)
        elif (part := step.removesuffix("-initializer")) != step:
            _set_initializer(job, step, (spec.get("initializer") or {}).get(part) or {})
    for override in (*(spec.get("podSpecOverrides") or ()), *(spec.get("podTemplateOverrides") or ())):
        targets = {target["name"] for target in override["targetJobs"]}
        old = "podSpecOverrides" in spec
        patch = {"spec": {name: value for name, value in override.items() if name != "targetJobs"}} if old else override
        for job in set_spec["replicatedJobs"]:
            if job["name"] in targets:
                _patch_pods(job, patch)
    for runtime_patch in spec.get("runtimePatches") or ():
        changed = ((runtime_patch.get("trainingRuntimeSpec") or {}).get("template") or {}).get("spec") or {}
        for job_patch in changed.get("replicatedJobs") or ():
            for job in set_spec["replicatedJobs"]:
                if job["name"] == job_patch["name"]:
                    job_template = job_patch.get("template") or {}
                    _patch_pods(job, (job_template.get("spec") or {}).get("template") or {})
    set_spec["suspend"] = spec["suspend"]
    own = template.get("metadata") or {}
    return {
        "apiVersion": JOB_SETS.api_version,
        "kind": JOB_SETS.kind,
        "metadata": {
            "name": metadata["name"],
            "labels": {**(own.get("labels") or {}), **(spec.get("labels") or {})},
            "annotations": {**(own.get("annotations") or {}), **(spec.get("annotations") or {})},
            "ownerReferences": [owner_reference(train_job)],
        },
        "spec": set_spec,
    }


def _set_trainer(job: Object, train_job: Object, runtime: Object) -> None:
    trainer, policy = train_job["spec"].get("trainer") or {}, runtime["spec"].get("mlPolicy") or {}
    nodes = trainer.get("numNodes") or policy.get("numNodes") or 1
    spec = job["template"]["spec"]
    spec["parallelism"] = spec["completions"] = nodes
    container = _container(spec, "node")
    for name in ("image", "command", "args"):
        if trainer.get(name):
            container[name] = trainer[name]
    if trainer.get("resourcesPerNode"):
        container["resources"] = trainer["resourcesPerNode"]
    _add_environment(container, trainer.get("env") or [])
    if "torch" in policy:
        wanted = trainer.get("numProcPerNode") or (policy["torch"] or {}).get("numProcPerNode") or "auto"
        processes = _processes(wanted, container)
        _add_environment(container, _torch_environment(train_job["metadata"]["name"], nodes, processes))
        container.setdefault("ports", []).append({"containerPort": PORT, "protocol": "TCP"})


def _processes(wanted: int | str, container: Object) -> str:
    limits = (container.get("resources") or {}).get("limits") or {}
    gpus = next((int(amount) for name, amount in limits.items() if "gpu" in name.lower()), 0)
    if wanted == "auto" and gpus:
        return str(gpus)
    if wanted in ("auto", "cpu"):
        cpu = str(limits.get("cpu", "1"))
        return cpu if cpu.isdigit() else "1"
    return str(wanted)


def _torch_environment(name: str, nodes: int, processes: str) -> list[Object]:
    rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    return [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": processes},
        {"name": "PET_NODE_RANK", "valueFrom": rank},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]


def _set_initializer(job: Object, step: str, initializer: Object) -> None:
    spec = job["template"]["spec"]
    spec["parallelism"] = spec["completions"] = 1
    container = _container(spec, step)
    uri = [{"name": "STORAGE_URI", "value": initializer["storageUri"]}] if initializer.get("storageUri") else []
    _add_environment(container, [*uri, *(initializer.get("env") or [])])
    if initializer.get("secretRef"):
        container.setdefault("envFrom", []).append({"secretRef": initializer["secretRef"]})


def _container(spec: Object, name: str) -> Object:
    containers: list[Object] = spec["template"]["spec"]["containers"]
    return next(each for each in containers if each["name"] == name)


def _add_environment(container: Object, variables: list[Object]) -> None:
    named = {each["name"]: each for each in container.get("env") or []} | {each["name"]: each for each in variables}
    if named:
        container["env"] = list(named.values())


def _patch_pods(job: Object, patch: Object) -> None:
    template = job["template"]["spec"]["template"]
    for part in ("metadata", "spec"):
        if patch.get(part):
            template[part] = strategic_merge(template.get(part) or {}, patch[part])
