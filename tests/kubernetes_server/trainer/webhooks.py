"""What Trainer's and JobSet's webhooks, and the rules in their schemas, refuse."""

from __future__ import annotations

from kubernetes_server import statuses
from kubernetes_server.objects import Object
from kubernetes_server.resources import Resource
from kubernetes_server.statuses import StatusError
from kubernetes_server.store import Store
from kubernetes_server.trainer.definitions import CLUSTER_RUNTIMES, JOB_SETS, RUNTIMES, TRAIN_JOBS, TRAINER
from kubernetes_server.trainer.runtimes import ANCESTOR, FRAMEWORK

_FIXED = {"2.0": ("runtimeRef", "managedBy"), "2.1": ("runtimeRef", "managedBy")}
_FIXED_NOW = ("runtimeRef", "managedBy", "initializer", "trainer", "activeDeadlineSeconds")
"""What may not be changed of a TrainJob, by the version of Trainer."""
_RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


class Webhooks:
    def __init__(self, store: Store, version: str) -> None:
        self._version = version
        self._store = store

    def check(self, resource: Resource, obj: Object, old: Object | None) -> None:
        """
        Raises:
            StatusError: the object may not be created, or changed like this.
        """
        if resource.store_key == TRAIN_JOBS.store_key:
            self._default(obj)
            self._check_train_job(obj, old)
        elif resource.store_key == JOB_SETS.store_key:
            obj["spec"].setdefault("network", {}).setdefault("enableDNSHostnames", True)

    def runtime_of(self, train_job: Object) -> Object | None:
        reference = train_job["spec"]["runtimeRef"]
        if reference["kind"] == CLUSTER_RUNTIMES.kind:
            return self._store.get(CLUSTER_RUNTIMES.store_key, ("", reference["name"]))
        return self._store.get(RUNTIMES.store_key, (train_job["metadata"]["namespace"], reference["name"]))

    @staticmethod
    def _default(train_job: Object) -> None:
        spec = train_job.setdefault("spec", {})
        spec.setdefault("suspend", False)
        spec.setdefault("managedBy", f"{TRAINER}/trainjob-controller")
        reference = spec.setdefault("runtimeRef", {})
        reference.setdefault("apiGroup", TRAINER)
        reference.setdefault("kind", CLUSTER_RUNTIMES.kind)

    def _check_train_job(self, train_job: Object, old: Object | None) -> None:
        name, spec = train_job["metadata"]["name"], train_job["spec"]
        if old is not None:
            causes = [
                statuses.invalid_value(f"spec.{field}", "object", "field is immutable")
                for field in _FIXED.get(self._version, _FIXED_NOW)
                if spec.get(field) != old["spec"].get(field)
            ]
            if causes:
                raise statuses.invalid(TRAIN_JOBS, name, causes)
            return
        if not spec["runtimeRef"].get("name"):
            raise statuses.invalid(TRAIN_JOBS, name, [statuses.required("spec.runtimeRef.name")])
        runtime = self.runtime_of(train_job)
        if runtime is None:
            reference = spec["runtimeRef"]
            text = f'{reference["kind"]}.{TRAINER} "{reference["name"]}" not found'
            raise _denied(f"spec.RuntimeRef: Invalid value: {text}: it must be created before the TrainJob is created")
        policy = (runtime["spec"].get("mlPolicy") or {}).keys() - {"numNodes", "torch", "jax"}
        if policy or FRAMEWORK not in (runtime["metadata"].get("labels") or {}):
            raise _denied(f"this test server has no runtimes with {', '.join(policy) or 'no framework'}")
        steps = {
            (job["template"].get("metadata") or {}).get("labels", {}).get(ANCESTOR)
            for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]
        }
        for part in spec.get("initializer") or {}:
            if f"{part}-initializer" not in steps:
                raise _denied(f"spec.runtimeRef: must have {part}-initializer job when trainJob is configured with it")
        for variable in (spec.get("trainer") or {}).get("env") or ():
            if variable["name"] in _RESERVED:
                raise _denied(f"spec.trainer.env: must not have reserved envs, invalid envs configured: {variable}")


def _denied(why: str) -> StatusError:
    webhook = f"validator.trainjob.{TRAINER}"
    return StatusError(403, "Forbidden", f'admission webhook "{webhook}" denied the request: {why}')
