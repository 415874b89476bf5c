"""The JobSet controller."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kubernetes_server.controllers.loop import Controller
from kubernetes_server.deletion import DeleteOptions
from kubernetes_server.objects import (
    Key,
    Object,
    clone,
    condition_of,
    controller_of,
    has_condition,
    is_deleting,
    key_of,
    labels_of,
    owner_reference,
    set_condition,
)
from kubernetes_server.resources import JOBS, SERVICES
from kubernetes_server.store import Change
from kubernetes_server.trainer.definitions import JOB_SETS

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster

_PREFIX = "jobset.sigs.k8s.io"
SET_NAME = f"{_PREFIX}/jobset-name"
REPLICATED_JOB = f"{_PREFIX}/replicatedjob-name"
_ATTEMPT = f"{_PREFIX}/restart-attempt"


class JobSetController(Controller):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.store.subscribe(JOB_SETS.store_key, self.enqueue_change)
        self.store.subscribe(JOBS.store_key, self._job_changed)

    def _job_changed(self, change: Change) -> None:
        owner = controller_of(change.record.object)
        if owner and owner["kind"] == JOB_SETS.kind:
            self.enqueue((change.record.key[0], owner["name"]))

    def sync(self, key: Key) -> None:
        job_set = self.store.get(JOB_SETS.store_key, key)
        if job_set is None or is_deleting(job_set):
            return
        records = self.store.dependents(job_set["metadata"]["uid"])
        jobs = [record.object for record in records if record.store_key == JOBS.store_key]
        if has_condition(job_set, "Completed") or has_condition(job_set, "Failed"):
            self._delete([job for job in jobs if not _has_ended(job)])
            return
        restarts = (job_set.get("status") or {}).get("restarts", 0)
        self._delete([job for job in jobs if labels_of(job)[_ATTEMPT] != str(restarts)])
        jobs = [job for job in jobs if labels_of(job)[_ATTEMPT] == str(restarts)]
        changed = clone(job_set)
        status = changed.setdefault("status", {})
        status.setdefault("restarts", 0)
        self._count(changed, jobs)
        if not self._end(changed, jobs):
            self._make_service(job_set)
            self._make_jobs(job_set, jobs, restarts)
            self._suspend(changed, jobs)
        self.operations.commit(JOB_SETS, job_set, changed)

    @staticmethod
    def _count(job_set: Object, jobs: list[Object]) -> None:
        counts = []
        for replicated in job_set["spec"]["replicatedJobs"]:
            own = [job for job in jobs if labels_of(job)[REPLICATED_JOB] == replicated["name"]]
            running = [job for job in own if not _has_ended(job)]
            counts.append(
                {
                    "name": replicated["name"],
                    "active": sum(bool((job.get("status") or {}).get("active")) for job in running),
                    "failed": sum(has_condition(job, "Failed") for job in own),
                    "ready": sum(_is_ready(job) for job in own),
                    "succeeded": sum(has_condition(job, "Complete") for job in own),
                    "suspended": sum(bool(job["spec"]["suspend"]) for job in running),
                }
            )
        job_set["status"]["replicatedJobsStatus"] = counts

    @staticmethod
    def _end(job_set: Object, jobs: list[Object]) -> bool:
        """Whether the set has ended, or starts again."""
        status, spec = job_set["status"], job_set["spec"]
        conditions = status.setdefault("conditions", [])
        failed = next((job for job in jobs if has_condition(job, "Failed")), None)
        if failed is not None:
            restarts = (spec.get("failurePolicy") or {}).get("maxRestarts", 0)
            if status["restarts"] < restarts:
                status["restarts"] += 1
                return True
            text = f"jobset failed due to one or more job failures (first failed job: {failed['metadata']['name']})"
            set_condition(conditions, "Failed", "True", reason="FailedJobs", message=text)
            status["terminalState"] = "Failed"
            return True
        wanted = sum(replicated.get("replicas", 1) for replicated in spec["replicatedJobs"])
        if sum(has_condition(job, "Complete") for job in jobs) == wanted:
            text = "jobset completed successfully"
            set_condition(conditions, "Completed", "True", reason="AllJobsCompleted", message=text)
            status["terminalState"] = "Completed"
            return True
        if not conditions:
            del status["conditions"]
        return False

    def _make_service(self, job_set: Object) -> None:
        network, metadata = job_set["spec"].get("network") or {}, job_set["metadata"]
        name = network.get("subdomain") or metadata["name"]
        if not network.get("enableDNSHostnames") or self.store.get(SERVICES.store_key, (metadata["namespace"], name)):
            return
        service = {
            "metadata": {"name": name, "ownerReferences": [owner_reference(job_set)]},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
                "selector": {SET_NAME: metadata["name"]},
            },
        }
        self.operations.create(SERVICES, metadata["namespace"], service)

    def _make_jobs(self, job_set: Object, jobs: list[Object], restarts: int) -> None:
        present = {job["metadata"]["name"] for job in jobs}
        for replicated in job_set["spec"]["replicatedJobs"]:
            if not all(_is_met(each, jobs) for each in replicated.get("dependsOn") or ()):
                continue
            for index in range(replicated.get("replicas", 1)):
                job = _job(job_set, replicated, index, restarts)
                if job["metadata"]["name"] not in present:
                    self.operations.create(JOBS, job_set["metadata"]["namespace"], job)

    def _suspend(self, job_set: Object, jobs: list[Object]) -> None:
        suspend = bool(job_set["spec"].get("suspend"))
        for job in jobs:
            if not _has_ended(job) and job["spec"]["suspend"] != suspend:
                self.operations.modify(JOBS, key_of(job), lambda each: each["spec"].update(suspend=suspend))
        conditions = job_set["status"].get("conditions") or []
        if suspend:
            set_condition(conditions, "Suspended", "True", reason="SuspendedJobs", message="jobset is suspended")
        elif has_condition(job_set, "Suspended"):
            set_condition(conditions, "Suspended", "False", reason="ResumeJobs", message="jobset is resumed")
        if conditions:
            job_set["status"]["conditions"] = conditions

    def _delete(self, jobs: list[Object]) -> None:
        for job in jobs:
            if not is_deleting(job):
                self.operations.deletion.delete(JOBS, key_of(job), DeleteOptions(propagation="Foreground"))


def _job(job_set: Object, replicated: Object, index: int, restarts: int) -> Object:
    name, metadata = job_set["metadata"]["name"], job_set["metadata"]
    job_name = f"{name}-{replicated['name']}-{index}"
    template = clone(replicated["template"])
    own, spec = template.get("metadata") or {}, template["spec"]
    labels = {
        SET_NAME: name,
        f"{_PREFIX}/jobset-uid": metadata["uid"],
        REPLICATED_JOB: replicated["name"],
        f"{_PREFIX}/replicatedjob-replicas": str(replicated.get("replicas", 1)),
        f"{_PREFIX}/job-index": str(index),
        f"{_PREFIX}/job-key": hashlib.sha1(f"{metadata['namespace']}/{job_name}".encode()).hexdigest(),
        _ATTEMPT: str(restarts),
    }
    spec.setdefault("completionMode", "Indexed")
    spec.setdefault("completions", spec.get("parallelism", 1))
    spec.setdefault("parallelism", spec["completions"])
    spec["suspend"] = bool(job_set["spec"].get("suspend"))
    pods = spec["template"]
    of_pods = pods.setdefault("metadata", {})
    of_pods["labels"] = {**(of_pods.get("labels") or {}), **labels}
    of_pods["annotations"] = {**(of_pods.get("annotations") or {}), **labels}
    pods["spec"].setdefault("restartPolicy", "OnFailure")
    pods["spec"].setdefault("subdomain", (job_set["spec"].get("network") or {}).get("subdomain") or name)
    return {
        "apiVersion": JOBS.api_version,
        "kind": JOBS.kind,
        "metadata": {
            "name": job_name,
            "labels": {**(own.get("labels") or {}), **labels},
            "annotations": {**(own.get("annotations") or {}), **labels},
            "ownerReferences": [owner_reference(job_set)],
        },
        "spec": spec,
    }


def _is_met(dependency: Object, jobs: list[Object]) -> bool:
    own = [job for job in jobs if labels_of(job)[REPLICATED_JOB] == dependency["name"]]
    is_done = _is_ready if dependency["status"] == "Ready" else _is_complete
    return bool(own) and all(is_done(job) for job in own)


def _is_complete(job: Object) -> bool:
    return has_condition(job, "Complete")


def _is_ready(job: Object) -> bool:
    status = job.get("status") or {}
    return (status.get("ready") or 0) + (status.get("succeeded") or 0) >= job["spec"].get("parallelism", 1)


def _has_ended(job: Object) -> bool:
    return condition_of(job, "Complete") is not None or condition_of(job, "Failed") is not None
